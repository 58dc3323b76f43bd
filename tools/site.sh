#!/usr/bin/env bash
# Builds the documentation site into site/, any warning being an error; `--serve` shows it on this machine instead.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh
install dev
export NO_MKDOCS_2_WARNING=1 # of the theme's authors, about a successor of mkdocs
if [ "${1:-}" = --serve ]; then
    exec .venv/bin/mkdocs serve
fi
.venv/bin/mkdocs build --strict
echo "site/index.html opens in a browser; with search: bash tools/site.sh --serve"
