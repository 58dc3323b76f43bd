"""The schedulers inside PyTorch's schedulers."""

import torch
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

from tests.api import inner_schedulers, steps_taken


def test_those_at_any_depth_are_found() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    warmup, cosine, constant = LinearLR(optimizer), CosineAnnealingLR(optimizer, 5), ConstantLR(optimizer)
    sequence = SequentialLR(optimizer, [warmup, cosine], [2])
    chain = ChainedScheduler([sequence, constant], optimizer)
    assert inner_schedulers(chain) == [sequence, warmup, cosine, constant]
    assert inner_schedulers(sequence) == [warmup, cosine]
    assert inner_schedulers(warmup) == []


def test_steps_are_counted_in_parts_where_the_whole_has_no_count() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    chain = ChainedScheduler([LinearLR(optimizer), ConstantLR(optimizer)], optimizer)
    sequence = SequentialLR(optimizer, [LinearLR(optimizer), CosineAnnealingLR(optimizer, 5)], [2])
    assert (steps_taken(chain), steps_taken(sequence)) == (0, 0)
    optimizer.step()
    for _ in range(3):
        chain.step()
        sequence.step()
    assert (steps_taken(chain), steps_taken(sequence)) == (3, 3)
