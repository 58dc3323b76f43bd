"""Launch: the world is joined, and what only the world can tell is checked."""

from __future__ import annotations

import atexit
import weakref
from typing import TYPE_CHECKING

from dream_trainer.compat.pytorch import enable_flight_recorder
from dream_trainer.distributed.seeds import hash_seed, seed_everything
from dream_trainer.distributed.world import World, choose_device, close_at_exit, environment_ranks
from dream_trainer.errors import ConfigError
from dream_trainer.trainer.event_table import event_table
from dream_trainer.trainer.rank_differences import refuse_different_configs
from dream_trainer.trainer.user_class.class_checks import uncalled_hooks, uncalled_methods

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer


def launch(trainer: AbstractTrainer) -> None:
    """Gives `trainer` its world and the event table of its rank, and seeds all generators, the same on all ranks.

    Raises:
        ConfigError: The mesh does not fit, the device is missing, or several ranks have nothing that keeps them equal.
        RanksDifferError: The ranks have other configs than each other.
    """
    cls = type(trainer)
    _record_collectives(trainer)
    world = trainer._world = World(
        trainer.config.device_parameters, shard_by_default=cls._shards_parameters, workers=trainer._workers
    )
    if world.world_size > 1 and not cls._keeps_ranks_equal:
        raise ConfigError(
            f"{cls.__name__} runs on {world.world_size} ranks, but nothing in it keeps them equal. "
            "Add SetupMixin to the trainer (and SetupConfigMixin to its config), or start one process."
        )
    if world.world_size == 1:
        atexit.register(_close_if_alive, weakref.ref(trainer))
    else:
        close_at_exit(world)
    reference = weakref.ref(trainer)
    world.tell_where(lambda: _where(reference))
    refuse_different_configs(trainer)
    for hook in uncalled_hooks(cls):
        trainer.warn_once(hook, f"{cls.__name__}.{hook} is never called: only SetupMixin does. Add SetupMixin.")
    for message in uncalled_methods(trainer):
        trainer.warn_once(message, message)
    trainer._events = event_table(trainer, is_main=world.is_main)
    seed_everything(hash_seed(b"setup", trainer.config.seed))


def _record_collectives(trainer: AbstractTrainer) -> None:
    """Has NCCL write down its last collectives when one times out; its groups read that as they are made."""
    _, local_rank, world_size = environment_ranks()
    device = trainer.config.device_parameters.device
    if world_size > 1 and choose_device(device, local_rank).type == "cuda":
        enable_flight_recorder(trainer.run_dir / "flight_recorder")


def _where(reference: weakref.ref[AbstractTrainer]) -> str:
    trainer = reference()
    return "the end" if trainer is None else f"step {trainer.global_step}"


def _close_if_alive(reference: weakref.ref[AbstractTrainer]) -> None:
    trainer = reference()
    if trainer is not None:
        trainer.close()
