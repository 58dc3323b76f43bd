"""What a model in stages cannot be given, or called for, in the words of its user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from dream_trainer.compat.pipelining import asked_for_what_is_not_there
from dream_trainer.errors import RanksDifferError, StepError
from dream_trainer.nested import leaves
from dream_trainer.parallel.micro_batches import digest

if TYPE_CHECKING:
    from dream_trainer.distributed.world import World


_UNWEIGHTED = (
    "forward_backward() was given no weight=, and targets hold -100, which PyTorch's losses leave out: micro-batches, "
    "which have unequal numbers of labels, count alike, which is no mean over labels as one process's is. Pass "
    "weight=lambda targets: (targets != -100).sum(), and have loss_fn give the mean over as many."
)


def _have_unequal_labels(targets: Any, microbatches: int) -> bool:
    """Whether micro-batches have unequal numbers of -100 among integers, the label that PyTorch's losses ignore."""
    tensors = (leaf for leaf in leaves(targets) if isinstance(leaf, Tensor) and leaf.dtype == torch.int64)
    integers = [leaf for leaf in tensors if leaf.ndim and len(leaf) % microbatches == 0]
    ignored = [(leaf == -100).unflatten(0, (microbatches, -1)).flatten(1).sum(1) for leaf in integers]
    return any(bool((counts != counts[0]).any()) for counts in ignored)


def naming_what_is_elsewhere(step: Callable[[Any, int], Any], stages: int) -> Callable[[Any, int], Any]:
    """`step`, which says why where it asks a part of a model for something that other stages hold."""

    def run(batch: Any, batch_idx: int) -> Any:
        try:
            return step(batch, batch_idx)
        except AttributeError as error:
            if not asked_for_what_is_not_there(error):
                raise
            raise StepError(
                f"the step asked for {error.name!r} of None ({error}) under pipeline_parallel={stages}, where each "
                "rank has the layers of its own stages, and None in place of others. Ask `is not None` first, or leave "
                "it to the model's forward."
            ) from error

    return run


def refuse_graphs(batch: Any, name: str, stages: int) -> None:
    """Raises StepError if something in a batch has a graph, which would go on behind the first stage, or the last."""
    if any(leaf.requires_grad for leaf in leaves(batch) if isinstance(leaf, Tensor)):
        raise StepError(
            f"forward_backward of {name} was given inputs or targets that need gradients, as another model's outputs "
            f"do, under pipeline_parallel={stages}, where gradients go from stage to stage alone. Put both models into "
            "one module, or detach() what this loss is not to train."
        )


def look_at_first(
    batch: Any,
    targets: Any,
    weights: Sequence[Tensor | float] | None,
    world: World,
    microbatches: int,
    warn: Callable[[str], None],
) -> None:
    """Refuses a first batch that ranks of the pipeline differ in; a collective. Warns of labels without weights."""
    _refuse_different_batches(batch, weights, world)
    if weights is None and _have_unequal_labels(targets, microbatches):
        warn(_UNWEIGHTED)


def _refuse_different_batches(batch: Any, weights: Sequence[Tensor | float] | None, world: World) -> None:
    """Raises RanksDifferError if ranks of a pipeline have other batches, or other weights of the same; a collective."""
    numbers = None if weights is None else [torch.tensor(float(weight)) for weight in weights]
    of_stages = world.all_gather(torch.tensor([digest(batch), digest(numbers)])).view(world.stages, -1, 2)
    has_others, weighs_others = (of_stages != of_stages[:1]).flatten(0, 1).any(dim=0).tolist()
    if has_others:
        raise RanksDifferError(
            "the ranks of a pipeline (pipeline_parallel) have different batches, and the last stage would compare "
            "outputs with targets of others. Have the loader read what does not depend on the rank; dataset and "
            "sampler are dealt to dp_rank of dp_size by the trainer."
        )
    if weighs_others:
        raise RanksDifferError(
            "the ranks of a pipeline (pipeline_parallel) were given other weights of the same micro-batches, and "
            "stages would be scaled otherwise than each other. Pass the same weight= to forward_backward on all of "
            "them, a function of targets alone."
        )


def refuse_calls_with_gradients(stages: int) -> None:
    """Raises StepError where gradients are enabled, and nobody would have the graph."""
    if torch.is_grad_enabled():
        raise StepError(
            f"the model was called under pipeline_parallel={stages}, with gradients, where each rank has some of its "
            "layers. In training_step call self.forward_backward(model, inputs, targets, loss_fn, weight=...); "
            "elsewhere call the model under torch.no_grad(), on all ranks."
        )


def refuse_inside(running: str, name: str, stages: int) -> NoReturn:
    """Raises StepError: where `running`, a model in stages, is computed, `name` was called, which is another one."""
    raise StepError(
        f"{name}, which is cut into stages by pipeline_parallel={stages}, was called in a loss or layer of {running}, "
        "which only some ranks compute. For a loss that goes through both put both into one module, or keep "
        f"{name} whole on each rank: have pipeline_stages return None for it. Else call it before, under "
        "torch.no_grad(), and hand its outputs on as targets."
    )


def refuse_unfrozen(stage: int, name: str) -> NoReturn:
    """Refuses a stage that gives what needs a gradient, where the next one has made no room to send it back."""
    raise StepError(
        f"what stage {stage} of {name} gives needs gradients, and did not in the first batch of this shape: layers "
        "before it were unfrozen since. In a pipeline unfreeze them before the first batch, or train them from the "
        "start at a rate of 0 and raise that."
    )
