"""Episodes of a pole on a cart that is pushed to the left or to the right (Barto, Sutton, Anderson 1983)."""

from __future__ import annotations

import torch
from torch import Tensor

import dream_trainer as dt

LONGEST = 200  # moves of an episode, 0.02 seconds each
DISCOUNT, TRACE = 0.99, 0.95  # how far advantages look ahead: gamma and lambda of GAE


def luck(episode: int) -> tuple[Tensor, Tensor]:
    """The start [4] of an episode, and a number from 0 to 1 for each of its actions [LONGEST]."""
    # Of seed, epoch and episode: the same on any number of ranks, and a resumed run has nothing to catch up on.
    return torch.rand(4) * 0.1 - 0.05, torch.rand(LONGEST)


def episodes(count: int) -> dt.data.TransformedDataset:
    """The luck of each."""
    return dt.data.TransformedDataset(range(count), [dt.data.Map(luck)])


def move(state: Tensor, right: Tensor) -> Tensor:
    """Position, speed, angle and turning [episodes, 4] of carts 0.02 s after a push."""
    _, speed, angle, turning = state.unbind(1)
    push = (20 * right - 10 + 0.05 * turning.square() * angle.sin()) / 1.1
    turned = (9.8 * angle.sin() - angle.cos() * push) / (2 / 3 - 0.05 * angle.cos().square() / 1.1)
    pushed = push - 0.05 * turned * angle.cos() / 1.1
    return state + 0.02 * torch.stack([speed, pushed, turning, turned], dim=1)


def stands(state: Tensor) -> Tensor:
    """Whether [episodes] the cart is on the track and the pole within 12 degrees."""
    return (state[:, 0].abs() < 2.4) * (state[:, 2].abs() < 0.21)


def advantages(alive: Tensor, values: Tensor) -> Tensor:
    """Generalised advantage estimates [episodes, LONGEST] (Schulman et al. 2016); a move is worth 0.01."""
    errors, ahead = 0.01 * alive + DISCOUNT * values[:, 1:] - values[:, :-1], torch.zeros_like(values)
    for step in reversed(range(LONGEST)):
        ahead[:, step] = (errors[:, step] + DISCOUNT * TRACE * ahead[:, step + 1]) * alive[:, step]
    return ahead[:, :-1]
