"""Pictures of the examples: curves over the steps, and beside them digits of 8 x 8 pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

Curve = Sequence[tuple[int, float]]


def curves(
    by_name: Mapping[str, Curve],
    ylabel: str,
    *,
    guess: float | None = None,
    beside: Sequence[float] = (),
    **options: Any,
) -> tuple[Figure, list[Any]]:
    """A figure with curves, and the axes beside them.

    Args:
        by_name: Steps and values of each curve, as `trainer.history_of` returns them.
        ylabel: Text at the vertical axis.
        guess: Value of a dotted line, what guessing reaches.
        beside: Width of each of the other axes, compared with that of the curves.
        **options: Of the axes, such as `yscale="log"`.
    """
    figure = Figure(figsize=(4 + 4 * sum(beside), 3.6), layout="constrained")
    left, *others = figure.subplots(1, 1 + len(beside), squeeze=False, width_ratios=(1, *beside))[0]
    if guess is not None:
        left.axhline(guess, color="grey", linestyle=":", label="guessing")
    plot(left, by_name, ylabel, **options)
    return figure, others


def plot(axes: Any, by_name: Mapping[str, Curve], ylabel: str, **options: Any) -> None:
    """Draws curves over the steps."""
    for name, curve in by_name.items():
        axes.plot(*zip(*curve, strict=True), label=name)
    axes.set(**{"xlabel": "optimizer step", "ylabel": ylabel, **options})
    axes.legend()


def report(trainer: Any, metric: str, grids: Mapping[str, Tensor], columns: int, **options: Any) -> None:
    """Draws a metric and, beside it, images by name in rows of `columns`; every rank may call it."""
    if trainer.world.is_main:
        beside = [0.6] * len(grids)
        figure, places = curves({metric: trainer.history_of(metric)}, metric, beside=beside, **options)
        for axes, (name, images) in zip(places, grids.items(), strict=True):
            tiles(axes, images, columns, name)
        save(trainer, figure, metric)


def save(trainer: Any, figure: Figure, metric: str) -> None:
    """Writes a figure into the run's directory, and prints where it is and what a metric is at last."""
    path = trainer.run_dir / "picture.png"
    figure.savefig(path, dpi=90)
    print(f"{metric}: {trainer.history_of(metric)[-1][1]:.3f}; picture: {path}")


def tiles(axes: Any, images: Tensor, columns: int, title: str, captions: Sequence[str] = ()) -> None:
    """Shows images [count, 8, 8] in rows of `columns`, with a caption at the bottom of each."""
    grid = F.pad(images.reshape(-1, columns, 8, 8), (1, 1, 1, 4 if captions else 1), value=float(images.min()))
    height = grid.shape[2]
    axes.imshow(grid.transpose(1, 2).reshape(-1, columns * 10).numpy(), cmap="gray_r")
    for number, caption in enumerate(captions):
        row, column = divmod(number, columns)
        axes.text(column * 10 + 5, row * height + height - 1, caption, fontsize=7, ha="center")
    axes.set(title=title, xticks=[], yticks=[])
