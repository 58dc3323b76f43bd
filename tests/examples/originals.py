"""Runs the originals of examples/coming_from, all in one process, and writes what they report as JSON.

    python tests/examples/originals.py FILE NAME...

Each runs in a directory of its own beside FILE, and leaves there the weights that it started from.
"""

import contextlib
import importlib
import json
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "coming_from"


def main(result: Path, *names: str) -> None:
    sys.path.insert(0, str(EXAMPLES))
    sys.argv[1:] = []  # they have a command line of their own
    found = {}
    for name in names:
        directory = result.parent / name
        directory.mkdir()
        with contextlib.chdir(directory):
            found[name] = importlib.import_module(f"{name}_before").main()
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
