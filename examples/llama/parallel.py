"""How ranks share the work of each layer of the Llama: its tensor-parallel plan, in PyTorch's own words.

Heads, hidden channels and the vocabulary are split over the ranks (Shoeybi et al., 2019, arXiv:1909.08053). With
sequence parallelism the residual stream and its norms are split too, along time (Korthikanti et al., 2022,
arXiv:2205.05198): the same traffic, less memory, and every parameter has a place on the mesh.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from model import Llama, LlamaConfig, generate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def check_split(config: LlamaConfig, n_ranks: int) -> None:
    """Checks that every part of the model can be split evenly.

    Raises:
        ValueError: Some part cannot; the message names it.
    """
    for name in ("n_heads", "n_kv_heads", "hidden_dim", "vocab_size"):
        size = vars(config)[name]
        if size % n_ranks != 0:
            raise ValueError(
                f"{name}={size} cannot be split over tensor_parallel={n_ranks} ranks. Use a divisor of {size}."
            )


def check_length(length: int, n_ranks: int) -> None:
    """Checks that a sequence can be split evenly.

    Raises:
        ValueError: It cannot.
    """
    if length % n_ranks != 0:
        raise ValueError(
            f"{length} tokens cannot be split over tensor_parallel={n_ranks} ranks. Use sequences of a multiple of "
            f"{n_ranks} tokens, or sequence_parallel=False."
        )


def parallelize(model: Llama, mesh: DeviceMesh, *, sequence_parallel: bool, loss_parallel: bool) -> None:
    """Splits the layers of `model` over `mesh`.

    Without sequence parallelism the norms stay plain parameters, equal on all ranks.

    Args:
        model: Changed in place; a tied head must be tied again afterwards, which Dream Trainer does.
        mesh: One dimension.
        sequence_parallel: Whether norms and the residual stream are split along time.
        loss_parallel: Whether the logits are a DTensor split over the vocabulary, for PyTorch's `loss_parallel`.

    Raises:
        ValueError: Some part cannot be split evenly; with sequence parallelism, in forward, the sequence.
    """
    check_split(model.config, mesh.size())
    stream = Shard(1) if sequence_parallel else Replicate()
    logits = ColwiseParallel(
        input_layouts=stream,
        output_layouts=Shard(-1) if loss_parallel else Replicate(),
        use_local_output=not loss_parallel,
    )
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    # Of a pipeline's stages the first has the embedding, and the last the head.
    ends = {"embed": embedding, "head": logits}
    parallelize_module(model, mesh, {name: ends[name] for name, _ in model.named_children() if name in ends})
    for layer in model.layers:
        # Gathered once for all projections, whose gradients then go back as one sum.
        whole = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
        plan: dict[str, ParallelStyle] = {"attention": whole, "feed_forward": whole}
        plan |= {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        plan |= {f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")}
        plan |= {name: RowwiseParallel(output_layouts=stream) for name in ("attention.wo", "feed_forward.w2")}
        parallelize_module(layer, mesh, plan)
    if sequence_parallel:
        if model.embed is not None:
            model.register_forward_pre_hook(_SplittableLength(mesh.size()))
        for part in (model, *model.layers):
            names = (name for name, child in part.named_children() if isinstance(child, nn.RMSNorm))
            parallelize_module(part, mesh, {name: SequenceParallel() for name in names})


def whole_logits(model: nn.Module, tokens: Tensor, *, multiple_of: int) -> Tensor:
    """Logits as a plain tensor for sequences of any length, from a model split in any of the ways above.

    A sequence is filled up on the right, where a causal model does not look, so that ranks can share it.

    Args:
        model: The model.
        tokens: [batch, time].
        multiple_of: What the length must be divisible by: the number of ranks under sequence parallelism, else 1.

    Returns:
        [batch, time, vocab_size].
    """
    length = tokens.shape[1]
    logits = model(F.pad(tokens, (0, -length % multiple_of)))
    return (logits.full_tensor() if isinstance(logits, DTensor) else logits)[:, :length]


def sample(trainer: Any) -> str:
    """Text that the trained model writes; every rank calls it, since a sharded model needs all of them."""
    trainer.model.eval()
    config, prompt = trainer.config, torch.tensor(list(b"def "), device=trainer.world.device)
    is_cut_in_time = config.tensor_parallel_parameters.sequence_parallel
    multiple = config.device_parameters.tensor_parallel if is_cut_in_time else 1
    model = partial(whole_logits, trainer.model, multiple_of=multiple)
    with trainer.autocast():
        tokens = generate(model, prompt, config.sample_tokens, window=config.seq_len)
    # A vocabulary beyond bytes has tokens that no text taught it.
    return bytes(min(token, 255) for token in tokens.tolist()).decode(errors="replace")


class _SplittableLength:
    """Before a forward: gloo ends the process, without an error, where ranks have unequal parts of a sequence."""

    def __init__(self, n_ranks: int) -> None:
        self.n_ranks = n_ranks

    def __call__(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        check_length(inputs[0].shape[1], self.n_ranks)
