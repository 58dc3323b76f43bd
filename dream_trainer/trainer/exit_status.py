"""With which status a process ends after a signal, so that torchrun and schedulers do what is meant."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import torch

from dream_trainer.distributed.signals import exit_code, may_be_restarted

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer


def exit_status(trainer: AbstractTrainer) -> int:
    """0 where no signal has ended training; after SIGTERM a collective where a job has several hosts.

    Where SIGTERM came to other hosts only, and this one's torchrun may start its processes again, they end in a way
    that makes it do so: the run is not over, and goes on without those hosts, or with them when they are back.
    """
    agreement, world = trainer._agreement, trainer.world
    number = agreement.ended_by
    if number is None:
        return 0
    if number != signal.SIGTERM or world.n_hosts == 1 or not may_be_restarted():
        return exit_code(number)
    was_told = agreement.requests.terminated and number not in agreement.signals.relayed
    hosts = world.all_gather(torch.tensor([world.host_number if was_told else -1])).flatten().tolist()
    return exit_code(number, restart=world.host_number not in hosts)
