"""Whether Python runs in a notebook."""

from __future__ import annotations

import sys
from typing import Any


def is_in_notebook() -> bool:
    """Whether this process is the kernel of a notebook: Jupyter, Colab, or whatever else runs one of IPython's."""
    # Whoever runs in a notebook has IPython loaded; a shell of IPython in a terminal has no kernel.
    ipython: Any = sys.modules.get("IPython")
    if ipython is None:
        return False
    shell = ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config
