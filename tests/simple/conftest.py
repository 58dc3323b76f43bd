"""Each test of this folder runs in an empty directory."""

from __future__ import annotations
