#!/usr/bin/env bash
# Builds the wheel and the source archive into dist/, twice, which must be equal bit for bit; then tries the wheel in an
# environment that has nothing else, and with `--tests` runs the tests from the unpacked source archive.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh
install dev

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
rm -rf dist
for directory in dist "$scratch/again"; do
    .venv/bin/python -m hatchling build --directory "$directory"
done
diff -r dist "$scratch/again"
echo "two builds are equal:"
sha256sum dist/*

"$(find_python)" -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip install --quiet dist/*.whl --constraint tools/constraints.txt
# The README's first trainer.
sed -n '/^```python$/,/^```$/{//d;p}; /^```$/q' README.md >"$scratch/train.py"
(
    cd "$scratch" # nothing of the clone is on the path here
    venv/bin/dream-trainer --help >/dev/null
    OMP_NUM_THREADS=1 venv/bin/python train.py
)
echo "the wheel works with the required packages alone"

if [ "${1:-}" = --tests ]; then
    tar -xzf dist/*.tar.gz -C "$scratch"
    cd "$scratch"/dream_trainer-*/
    bash tools/test.sh --ci
fi
