"""What the watchdog knows about a trainer: where it is, and how long it may stay there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dream_trainer.distributed.watchdog import Watchdog

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer

SHARE = 0.9
"""Share of the collectives' time-out after which standing still is a hang, so that stacks are written before it."""


@contextmanager
def watched(trainer: AbstractTrainer) -> Iterator[None]:
    """Ends the job, with every rank's stacks in `<run_dir>/stacks`, when training makes no progress inside."""
    devices, world = trainer.config.device_parameters, trainer.world
    if devices.hang_timeout_seconds is None:
        yield
        return
    after_start = devices.hang_timeout_seconds
    limit = SHARE * devices.step_timeout_seconds if after_start == "auto" else after_start
    patient_limit = max(limit, SHARE * devices.start_timeout_seconds)

    def where() -> str:
        phase = "training" if trainer.training else "validation"
        exchanges = trainer._agreement.exchanges  # one before each window and at each validation batch
        alone = "" if world.forbidden is None else f", in {world.forbidden}"  # a collective there waits for ever
        stage = f", rank {world.stage_rank} of the pipeline" if world.stages > 1 else ""
        counted = f"step {trainer.global_step}, batch {trainer.local_batches}, exchange {exchanges}"
        return f"{phase}, {counted}{stage}{alone}"

    trainer._session.watchdog = Watchdog(
        where,
        lambda: patient_limit if trainer._session.is_first_window else limit,
        patient_limit_seconds=patient_limit,
        directory=trainer.run_dir / "stacks",
        rank=world.rank,
        world_size=world.world_size,
        store=world.connect_to_store(),
    )
    try:
        with trainer._session.watchdog:
            yield
    finally:
        trainer._session.watchdog = None
