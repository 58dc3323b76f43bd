"""Retention: which checkpoints are kept after a newer one is on the disk. The newest always is; only valid ones go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from dream_trainer.best_value import is_value, mode_by_name, mode_of
from dream_trainer.checkpoint import files
from dream_trainer.checkpoint.manifest import Manifest, list_checkpoints
from dream_trainer.config.checkpoint_parameters import CheckpointParameters, Mode
from dream_trainer.errors import ConfigError


def mode_of_run(manifests: Sequence[Manifest], metric: str) -> Mode:
    """Whether the smallest or the largest value of a metric is best, as the run's config and the metric's name say."""
    parameters = manifests[-1].config.get("checkpoint_parameters", {}) if manifests else {}
    by_run: Mode | None = parameters.get("best_mode") if parameters.get("best_metric") == metric else None
    by_name = mode_by_name(metric)
    if by_run and by_name and by_run != by_name:  # once "min" was the default of all metrics
        raise ConfigError(f"the run took {by_run} for best of {metric}, and its name says {by_name}. Set --mode.")
    return mode_of(metric, by_run, named_by="--metric", set_by="--mode")


def best_checkpoint(manifests: Iterable[Manifest], metric: str, mode: Mode) -> Manifest | None:
    """The checkpoint whose `metric` is best; of equal ones that of the earlier step. None if none has a value."""
    best = _by_merit(manifests, metric, mode)
    return best[0] if best else None


def _by_merit(manifests: Iterable[Manifest], metric: str, mode: Mode) -> list[Manifest]:
    sign = 1 if mode == "min" else -1
    valued = [manifest for manifest in manifests if is_value(manifest.metrics.get(metric))]
    return sorted(valued, key=lambda manifest: (sign * manifest.metrics[metric], manifest.step))


def kept(manifests: Iterable[Manifest], retention: CheckpointParameters) -> set[int]:
    """Steps of the checkpoints that stay: all of them while `keep_best` asks for a metric that none has."""
    ordered = sorted(manifests, key=lambda manifest: manifest.step)
    steps = [manifest.step for manifest in ordered]
    if retention.keeps_all:
        return set(steps)
    stay = set(steps[-(retention.keep_last or 1) :])
    if retention.keep_every_n_steps is not None:
        stay |= {step for step in steps if step % retention.keep_every_n_steps == 0}
    if retention.keep_best is not None and retention.best_metric is not None:
        best = _by_merit(ordered, retention.best_metric, retention.known_best_mode())
        if not best:  # a mistyped name, or no validation yet: the best are unknown
            return set(steps)
        stay |= {manifest.step for manifest in best[: retention.keep_best]}
    return stay


def retire(root: Path, retention: CheckpointParameters) -> list[Path]:
    """Removes the checkpoints that the policy lets go, the oldest first, on one rank; returns their paths."""
    if retention.keeps_all:
        return []
    manifests = list_checkpoints(root)
    stay = kept(manifests, retention)
    removed = [manifest.path for manifest in manifests if manifest.step not in stay]
    for path in removed:
        files.discard(path)
    return removed
