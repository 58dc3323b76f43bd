# Sourced by demo.sh and test.sh: makes an environment and installs this package into it, and does nothing where that is
# done. PYTHON chooses the interpreter of one that is not there yet.

VENV=.venv
CONSTRAINTS=tools/constraints.txt

# The first interpreter that is new enough, or nothing.
find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
}

# use_torch VERSION: another PyTorch than the pinned one has an environment of its own beside .venv.
use_torch() {
    if grep -qx "torch==$1" tools/constraints.txt; then
        return
    fi
    if ! [[ "$1" =~ ^2\.(1[1-9]|[2-9][0-9])\.[0-9]+$ ]]; then
        echo "--torch $1 is not a version of PyTorch from 2.11.0 on. Give all three numbers, such as 2.11.0." >&2
        exit 2
    fi
    VENV=.venv-$1
    CONSTRAINTS=$VENV/constraints.txt
    mkdir -p "$VENV"
    sed "s/^torch==.*/torch==$1/" tools/constraints.txt >"$CONSTRAINTS"
}

# install EXTRAS [options of python -m venv]: an editable install with the versions of $CONSTRAINTS.
install() {
    local extras=$1 python stamp
    shift
    # The stamp names what was installed; another extra, a changed pin or a moved clone installs again.
    stamp="$PWD $extras $(cat pyproject.toml "$CONSTRAINTS" | cksum)"
    if [ -x "$VENV/bin/python" ] && grep -qxF "$stamp" "$VENV/installed" 2>/dev/null; then
        return
    fi
    python=$(find_python)
    if [ -z "$python" ]; then
        echo "Python 3.11 or newer is needed and was not found. Install it, or set PYTHON to its path." >&2
        exit 1
    fi
    if [ ! -x "$VENV/bin/python" ]; then
        echo "Making a virtual environment in $VENV with $("$python" --version)"
        "$python" -m venv "$@" "$VENV"
    fi
    echo "Installing dream-trainer[$extras]"
    "$VENV/bin/python" -m pip install --quiet --editable ".[$extras]" --constraint "$CONSTRAINTS"
    echo "$stamp" >>"$VENV/installed"
}
