"""Draws the loss curve of a run from its `metrics.jsonl`.

python examples/gpt/plot.py runs/examples/gpt/stdlib/metrics.jsonl loss.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def read_metrics(path: Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, in order; a step that a resumed run logged again counts once, as logged last."""
    points: dict[int, float] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if name in record:
            points[record["step"]] = record[name]
    steps = sorted(points)
    return steps, [points[step] for step in steps]


def plot_loss(metrics: Path, picture: Path, unigram_entropy: float | None = None) -> None:
    """Writes a PNG with training and validation loss over optimizer steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*read_metrics(metrics, "train/loss"), color="tab:blue", alpha=0.6, label="training")
    axes.plot(*read_metrics(metrics, "val/loss"), color="tab:orange", marker="o", label="validation")
    if unigram_entropy is not None:
        axes.axhline(unigram_entropy, color="gray", linestyle="--", label="byte-unigram entropy")
    axes.set(xlabel="optimizer step", ylabel="nats per byte", title="A GPT learns the Python standard library")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    plot_loss(Path(sys.argv[1]), Path(sys.argv[2]))
