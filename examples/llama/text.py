"""The text to train on: that of examples/gpt."""

from __future__ import annotations

import sys
from pathlib import Path

# Last, so that `model` stays the one beside this file.
sys.path.append(str(Path(__file__).parent.parent / "gpt"))
from corpus import load_corpus as load_corpus
