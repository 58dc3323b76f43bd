# Sourced by demo.sh and test.sh: makes .venv and installs this package into it, and does nothing where that is done.
# PYTHON chooses the interpreter of a .venv that is not there yet, TORCH another PyTorch than the pinned one (2.11.0).

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

# install EXTRAS [options of python -m venv]: an editable install with the pinned versions.
install() {
    local extras=$1 python stamp
    shift
    # The stamp names what was installed; another extra, a changed pin or a moved clone installs again.
    stamp="$PWD $extras $(cat pyproject.toml tools/constraints.txt | cksum)"
    if [ -z "${TORCH:-}" ] && [ -x .venv/bin/python ] && grep -qxF "$stamp" .venv/installed 2>/dev/null; then
        return
    fi
    python=$(find_python)
    if [ -z "$python" ]; then
        echo "Python 3.11 or newer is needed and was not found. Install it, or set PYTHON to its path." >&2
        exit 1
    fi
    if [ ! -x .venv/bin/python ]; then
        echo "Making a virtual environment in .venv with $("$python" --version)"
        "$python" -m venv "$@" .venv
    fi
    if [ -n "${TORCH:-}" ]; then
        # No stamp: whoever comes next without TORCH gets the pinned versions again.
        rm -f .venv/installed
        sed "s/^torch==.*/torch==$TORCH/" tools/constraints.txt >.venv/constraints.txt
        echo "Installing dream-trainer[$extras] with torch $TORCH"
        .venv/bin/python -m pip install --quiet --editable ".[$extras]" --constraint .venv/constraints.txt
        return
    fi
    echo "Installing dream-trainer[$extras]"
    .venv/bin/python -m pip install --quiet --editable ".[$extras]" "${CONSTRAINTS[@]}"
    echo "$stamp" >>.venv/installed
}
