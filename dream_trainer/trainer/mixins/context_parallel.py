"""ContextParallelMixin: several ranks share the positions of each sequence, so that it may be as long as they together
have room for.

`device_parameters.context_parallel` switches it. Each rank gets the same batch, `cut_batch` cuts it, and while a step
runs, `scaled_dot_product_attention` and `packed_attention` see the whole sequence. Everything else in a model acts at
each position by itself. A step's loss is the mean over this rank's labels, weighted by their number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torch import Tensor

from dream_trainer.config.parallel_parameters import ContextParallelConfigMixin
from dream_trainer.distributed.seeds import hash_seed, preserved_random_state, seed_device
from dream_trainer.errors import HookError
from dream_trainer.modules.shared_draws import seed_for_sequence
from dream_trainer.trainer.abstract import AbstractTrainer
from dream_trainer.trainer.hooks import Hooks
from dream_trainer.trainer.sequence_cut import SequenceCut

if TYPE_CHECKING:
    from dream_trainer.modules.context_attention import ContextAttention

Step = Callable[[Any, int], Any]


class ContextParallelMixin(AbstractTrainer):
    """Context-parallel training. Override `cut_batch(batch, cut)`.

    `predict` computes whole sequences on each rank, and so does a forward outside of the steps.

    Example:
        ```python
        def cut_batch(self, batch, cut):
            tokens, labels = batch[:, :-1], batch[:, 1:]
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            return cut(tokens), cut(labels), cut(positions)

        def training_step(self, batch, batch_idx):
            tokens, labels, positions = batch
            loss = F.cross_entropy(self.model(tokens, positions).flatten(0, 1), labels.flatten())
            self.backward(loss, weight=labels.numel())
            ...
        ```
    """

    _config_class: ClassVar[type | None] = ContextParallelConfigMixin
    _cuts_sequences: ClassVar[bool] = True

    if TYPE_CHECKING:
        config = cast(Any, ...)  # see AbstractTrainer

    def _finish_setup(self) -> None:
        super()._finish_setup()
        if self.world.mesh_shape.cp == 1:
            return
        from dream_trainer.data.packing.shared_rows import handlers
        from dream_trainer.modules.attention_takeover import AttentionTakeover

        attention = _attention(self)
        self._sequence_cut = SequenceCut(attention, self.world)
        self._takeover = takeover = AttentionTakeover(attention, handlers, self.warn_once)
        self._outside_forward = takeover.aside

    def _wrap_step(self, step: Step) -> Step:
        step = super()._wrap_step(step)
        if type(self).cut_batch is Hooks.cut_batch:
            return step

        def with_whole_batch(batch: Any, batch_idx: int) -> Any:
            return step(_checked(self, self.cut_batch(batch, _whole)), batch_idx)

        if self.world.mesh_shape.cp == 1:
            return with_whole_batch
        cut, takeover, device = self._sequence_cut, self._takeover, self.world.device
        assert takeover is not None  # since `_finish_setup`

        def with_part(batch: Any, batch_idx: int) -> Any:
            if not self.training and self._validation.buffer is None:  # a prediction
                return with_whole_batch(batch, batch_idx)
            seed = _step_seed(self, batch_idx)
            cut.begin(batch)
            with preserved_random_state(device):
                seed_device(seed, device)
                part = _checked(self, self.cut_batch(batch, cut.cut))
            cut.end(is_training=self.training)
            seed_for_sequence(hash_seed(b"step", seed))
            with takeover:
                return step(part, batch_idx)

        return with_part


def _step_seed(trainer: ContextParallelMixin, batch_idx: int) -> int:
    """Of what ranks that share sequences draw alike: the same for a step whenever it runs, and where it is resumed."""
    seed, progress, dp_rank = trainer.config.seed, trainer.progress, trainer.world.dp_rank
    if not trainer.training:
        return hash_seed(b"val" + trainer.val_name.encode(), seed, batch_idx, dp_rank)
    return hash_seed(b"train", seed, progress.current_epoch, progress.global_step, batch_idx, dp_rank)


def _attention(trainer: ContextParallelMixin) -> ContextAttention:
    from dream_trainer.modules.context_attention import GatheredAttention, UlyssesAttention
    from dream_trainer.modules.sequence_parts import SequenceParts

    mesh = trainer.world.mesh
    assert mesh is not None  # several ranks share sequences
    rank, size, group = mesh["cp"].get_local_rank(), mesh["cp"].size(), mesh["cp"].get_group()
    if trainer.config.context_parallel_parameters.attention == "ulysses":
        return UlyssesAttention(SequenceParts(rank, size, group, is_balanced=False))
    return GatheredAttention(SequenceParts(rank, size, group, is_balanced=True))


def _whole(tensor: Tensor, dim: int = 1) -> Tensor:
    return tensor


def _checked(trainer: ContextParallelMixin, batch: Any) -> Any:
    if batch is None:
        raise HookError(
            f"{type(trainer).__name__}.cut_batch returned None. Return the batch, with cut(tensor) in place of each "
            "tensor along the sequence."
        )
    return batch
