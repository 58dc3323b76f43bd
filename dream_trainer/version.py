"""The version of this package; `pyproject.toml` reads it from here."""

from __future__ import annotations

__version__ = "0.4.0.dev0"
