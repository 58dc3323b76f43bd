"""How runs and metrics are told apart in pictures and pages."""

from __future__ import annotations

COLOURS = ("#2468b0", "#d9632a", "#2f9266", "#8b4fb3", "#b58a00", "#c23b68", "#3aa5c4", "#6b6b6b")
LINES = ("-", "--", ":", "-.")
"""Line styles of matplotlib."""
DASHES = ("", "6 4", "1.5 4", "6 3 1.5 3")
"""The same in SVG."""
