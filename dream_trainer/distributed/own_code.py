"""The code of the job itself: what was imported that nobody installed."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent


class CodeFile(NamedTuple):
    """A module's file, and a digest of what is in it now."""

    path: Path
    digest: str


def own_code() -> dict[str, CodeFile]:
    """By module, without those of this package, the standard library and whatever pip installed."""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    elsewhere = tuple(place + os.sep for place in (*installed, str(PACKAGE)))
    found = {}
    for name, module in list(sys.modules.items()):
        path = str(vars(module).get("__file__") or "") if module is not None else ""
        if not path.endswith(".py") or path.startswith(elsewhere):
            continue
        try:
            found[name] = CodeFile(Path(path), digest_of_code(Path(path).read_bytes()))
        except OSError:  # of an archive, or gone since
            continue
    return found


def digest_of_code(content: bytes) -> str:
    """Short enough to be shown."""
    return hashlib.sha256(content).hexdigest()[:12]
