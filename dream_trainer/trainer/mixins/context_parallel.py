"""ContextParallelMixin: several ranks share the positions of each sequence. Each rank gets the same batch, and
`cut_batch` cuts it. A loss is the mean over this rank's labels, weighted by their number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from dream_trainer.config.device_parameters import ContextParallelConfigMixin
from dream_trainer.distributed.ranks import refuse_differences
from dream_trainer.distributed.seeds import hash_seed, preserved_random_state, seed_device
from dream_trainer.distributed.world import World
from dream_trainer.errors import DataError, HookError
from dream_trainer.loggers.buffer import NoRecord
from dream_trainer.nested import leaves
from dream_trainer.parallel.axis import CONTEXT, Parallelism
from dream_trainer.parallel.micro_batches import digest
from dream_trainer.trainer.abstract import AbstractTrainer

if TYPE_CHECKING:
    from dream_trainer.parallel.context_attention import ContextAttention

Step = Callable[[Any, int], Any]


class ContextParallelMixin(AbstractTrainer):
    """Context-parallel training. Override `cut_batch(batch, cut)`.

    `predict` computes whole sequences on each rank, and so does a forward outside the steps.
    """

    _config_class: ClassVar[type | None] = ContextParallelConfigMixin
    _parallelism: ClassVar[Parallelism | None] = CONTEXT

    def cut_batch(self, batch: Any, cut: Callable[..., Any]) -> Any:
        """Cuts every tensor along the sequence in `batch` to this rank's positions, for the step. Required if
        `device_parameters.context_parallel` > 1. An override is called before each step on any number of ranks, so that
        steps do not depend on it.

        A mask `[batch, 1, queries, keys]` is only cut along its queries: `cut(mask, dim=-2)`. Labels are shifted
        before they are cut, not in the step, and positions are tensors of the batch.

        Args:
            batch: On the device.
            cut: `cut(tensor, dim=1)` gives this rank's positions of a tensor whose dimension `dim` is the sequence;
                the tensor itself without context parallelism.
        """
        return batch

    def _finish_setup(self) -> None:
        super()._finish_setup()
        mesh = self.world.mesh
        if mesh is None or self.world.mesh_shape.cp == 1:
            return
        from dream_trainer.data.packing.attention_mask import handlers
        from dream_trainer.parallel.context_attention import (
            AttentionTakeover,
            GatheredAttention,
            SequenceParts,
            UlyssesAttention,
        )

        is_ulysses = self._runtime.config.context_parallel_parameters.attention == "ulysses"
        rank, size, group = mesh["cp"].get_local_rank(), mesh["cp"].size(), mesh["cp"].get_group()
        parts = SequenceParts(rank, size, group, is_balanced=not is_ulysses)
        attention = UlyssesAttention(parts) if is_ulysses else GatheredAttention(parts)
        self.__sequence_cut = SequenceCut(attention, self.world)
        self._runtime.takeover = AttentionTakeover(attention, handlers(attention))

    def _wrap_step(self, step: Step) -> Step:
        step = super()._wrap_step(step)
        if type(self).cut_batch is ContextParallelMixin.cut_batch:
            return step

        def with_whole_batch(batch: Any, batch_idx: int) -> Any:
            return step(self.cut_batch(batch, lambda tensor, dim=1: tensor), batch_idx)

        if self.world.mesh_shape.cp == 1:
            return with_whole_batch
        cut, takeover, device = self.__sequence_cut, self._runtime.takeover, self.world.device
        assert takeover is not None  # since `_finish_setup`

        def with_part(batch: Any, batch_idx: int) -> Any:
            if isinstance(self._runtime.records.current, NoRecord):  # a prediction
                return with_whole_batch(batch, batch_idx)
            # Fixed for a step, also after a resume, and equal on context-parallel ranks.
            runtime, progress, dp_rank = self._runtime, self._runtime.progress, self._runtime.world.dp_rank
            seed = hash_seed(b"val" + runtime.state.val_name.encode(), runtime.config.seed, batch_idx, dp_rank)
            if runtime.state.training:
                place = progress.current_epoch, progress.global_step, batch_idx
                seed = hash_seed(b"train", runtime.config.seed, *place, dp_rank)
            cut.clear()
            with preserved_random_state(device):
                seed_device(seed, device)
                part = self.cut_batch(batch, cut.cut)
            cut.end(part, is_training=self.training)
            seed_device(hash_seed(b"step", seed), device)
            with takeover:
                result = step(part, batch_idx)
            cut.clear()
            return result

        return with_part


@dataclass(eq=False, repr=False)
class SequenceCut:
    _attention: ContextAttention
    _world: World
    _digest: int = 0
    _is_compared: bool = False

    def clear(self) -> None:
        """Before a step, and after it, so that no tensor of the batch is kept."""
        self._digest = 0
        self._attention.lengths = set()
        self._attention.rows, self._attention.given = 1, []

    def cut(self, tensor: Tensor, dim: int = 1) -> Tensor:
        length, parts = tensor.size(dim), self._attention.parts
        if length == 0 or length % parts.n_chunks:
            above = -(-length // parts.n_chunks) * parts.n_chunks or parts.n_chunks
            twice = "twice " if parts.n_chunks > parts.size else ""
            raise DataError(
                f"cut_batch cut a tensor of shape {tuple(tensor.shape)}, whose {length} positions along dimension "
                f"{dim} are not a multiple of {parts.n_chunks}, {twice}context_parallel={parts.size}. Use sequences of "
                f"such a length, or pad them in the loader to {above} (with labels that do not count)."
            )
        if not self._is_compared:
            self._digest = digest(tensor, self._digest)
        part = parts.cut(tensor, dim)
        self._attention.lengths.add(part.shape[dim])
        self._attention.rows = max(self._attention.rows, part.shape[0] if dim % part.ndim else 1)
        self._attention.given.append((part, dim % part.ndim))
        return part

    def end(self, part: Any, *, is_training: bool) -> None:
        """The batch is cut to `part`; ranks that share sequences compare the first one of training (a collective)."""
        if not self._attention.lengths:
            raise HookError(
                f"cut_batch cut nothing, and each of the {self._attention.parts.size} ranks would do the whole work. "
                "Call cut(tensor) there for every tensor along the sequence."
            )
        self._attention.given += [(leaf, None) for leaf in leaves(part) if isinstance(leaf, Tensor)]
        if is_training and not self._is_compared:
            self._is_compared = True
            refuse_differences(
                self._world,
                {"a batch": self._digest},
                "Ranks that share sequences (context_parallel) need the same ones. Make the loader independent of the "
                "rank, since the trainer deals dataset and sampler to dp_rank of dp_size.",
                among=self._world.rank // self._world.sample_copies,
            )
