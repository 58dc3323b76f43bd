"""Gathered weights that a graph has saved, and that are given back before its backward."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dream_trainer.errors import StepError


class Owner(Protocol):
    """What gathers weights: a group of `fully_shard`."""

    def gather_again(self) -> None:
        """A backward needs them; a collective if they were given back."""


class SavedWeights(torch.autograd.graph.saved_tensors_hooks):
    """Around forwards of sharded blocks: a weight that a graph has saved is gathered again when a backward asks for it.

    `fully_shard` gathers a block when the gradient of its output comes, which a loss of what it kept lacks."""

    def __init__(self, owners: dict[int, Owner]) -> None:
        self._entered = 0

        def pack(tensor: Tensor) -> tuple[Tensor, Owner | int]:
            group = owners.get(tensor.untyped_storage()._cdata)
            return tensor, tensor._version if group is None else group

        def unpack(packed: tuple[Tensor, Owner | int]) -> Tensor:
            tensor, saved = packed
            if not isinstance(saved, int):
                saved.gather_again()
            elif tensor._version != saved:  # PyTorch does not look itself, where there are hooks
                raise StepError(
                    f"a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place: it is at "
                    f"version {tensor._version} and was saved at {saved}. Use operations that return a new tensor."
                )
            return tensor

        super().__init__(pack, unpack)

    def begin(self) -> bool:
        """Whether they are entered: where others are, as a checkpoint's, these have to see what is saved."""
        wanted = (
            torch.is_grad_enabled()
            and torch._C._autograd._top_saved_tensors_default_hooks(False) is None  # pyright: ignore
            and torch._C._current_graph_task_id() == -1
            and not torch._C._are_functorch_transforms_active()
        )
        if wanted:
            self._entered += 1
            self.__enter__()
        return wanted

    def end(self) -> None:
        self._entered -= 1
        self.__exit__(None, None, None)

    def leave_all(self) -> None:
        """Leaves what a forward that raised did not leave."""
        while self._entered:
            self.end()
