"""Memory of tensors of any class is counted once, by the storages that they hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dream_trainer.compat.kept_bytes import Held, Remembered, noted


def test_views_of_a_storage_count_once_and_as_a_whole() -> None:
    held, others = Held(), Held()
    whole = torch.zeros(100)
    held.add({"a": [whole[:10], whole[50:]], "b": (torch.zeros(5, dtype=torch.int64), "text", 3)})
    assert held.n_bytes() == 400 + 40
    others.add(whole)
    assert held.n_bytes(others) == 40
    meta = Held()
    meta.add([torch.empty(7, device="meta"), torch.empty(7, device="meta")])
    assert meta.n_bytes() == 2 * 28


def test_what_is_remembered_takes_no_memory_and_is_never_taken_for_another() -> None:
    remembered = Remembered()
    for _ in range(100):  # whose memory and identity the next one would get
        held = Held()
        held.add(torch.zeros(1000))
        assert held.n_bytes(remembered) == 4000
        remembered.add(held)
        assert held.n_bytes(remembered) == 0
    assert all(reference.expired() for number, reference in remembered._storages.items() if number not in held)


def test_what_a_backward_needs_and_what_operations_gave_is_noted() -> None:
    x, weight = torch.ones(4, 8, requires_grad=True), torch.ones(8, 16, requires_grad=True)
    saved, outputs = Held(), Held()
    with noted(saved, outputs, [torch.ops.aten.mm.default]):
        y: Tensor = (x @ weight).sin() + 1
    assert outputs.n_bytes() == 4 * 4 * 16
    assert saved.n_bytes() == 4 * (4 * 8 + 8 * 16 + 4 * 16)
    y.sum().backward()


class Part(torch.Tensor):
    """A tensor of which this rank has a part, as a DTensor is."""

    part: Tensor

    @staticmethod
    def __new__(cls, part: Tensor, n_ranks: int) -> Part:
        whole = torch.Size((n_ranks * part.shape[0], *part.shape[1:]))
        tensor: Part = torch.Tensor._make_wrapper_subclass(cls, whole, dtype=part.dtype)
        tensor.part = part
        return tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["part"], None

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], context: None, size: torch.Size, stride: tuple[int, ...]
    ) -> Part:
        return Part(parts["part"], 1)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("not reached")


def test_of_a_split_tensor_it_is_this_ranks_part() -> None:
    held = Held()
    held.add([Part(torch.zeros(8, 4), 4)])
    assert held.n_bytes() == 4 * 8 * 4
