"""Context-parallel attention: replaces `scaled_dot_product_attention`, with its arguments. Gathered: keys and values of
all ranks, this rank's queries. Ulysses: all positions, this rank's heads."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from types import FunctionType
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode

from dream_trainer.checks import refuse
from dream_trainer.compat.attention import (
    KERNELS,
    CausalBias,
    attend_elsewhere,
    causal_to_the_last_key,
    has_keys_elsewhere,
)
from dream_trainer.compat.compiler import (
    CompiledInside,
    change_calls,
    changing_backend,
    errors_of_compiler,
    exchanged_in_graph,
    gathered_in_graph,
    is_opaque,
    is_traced,
    summed_in_graph,
)
from dream_trainer.compat.pytorch import function_modes, in_backward, is_dtensor
from dream_trainer.distributed.world import gathered_rows, linear, summed_rows
from dream_trainer.errors import ConfigError, DreamTrainerError, StepError
from dream_trainer.modules.class_change import Changed, change_class

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Masked = Callable[..., Tensor]


class ContextAttention(ABC):
    def __init__(self, parts: SequenceParts) -> None:
        self.parts = parts  # who has which positions
        self.lengths: set[int] = set()  # this rank's positions of the running batch's sequences
        self.rows = 1  # samples in the running batch
        self.given: list[tuple[Tensor, int | None]] = []  # the step's tensors, and the dimension of the cut, if any

    def _is_length(self, size: object) -> bool:
        """Whether it is that of a part; a compiler may not know a size yet, such as how many tokens an expert gets."""
        return isinstance(size, int) and size in self.lengths

    def scaled_dot_product_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """PyTorch's, over all ranks' positions. A mask's columns are those of the whole sequence, in its order."""
        if is_dtensor(query):
            raise StepError(
                "attention was called with DTensors under context_parallel. Have the plan of tensor parallelism give "
                "local heads (use_local_output=True, ColwiseParallel's default)."
            )
        attend = partial(F.scaled_dot_product_attention, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa)
        if not self._is_length(key.shape[-2]):
            if self._is_length(query.shape[-2]) and is_causal:
                raise StepError(
                    f"causal attention of {query.shape[-2]} queries, this rank's part of a sequence, to "
                    f"{key.shape[-2]} keys, which are no part of it. Cut both in cut_batch, or neither."
                )
            return attend(query, key, value, attn_mask, is_causal=is_causal)
        self._refuse_unlike(query, key, attn_mask, is_causal)
        kind = query.device.type
        if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:  # before they are sent, so that less is
            query, key, value = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (query, key, value))
        return self._attend(query, key, value, attn_mask, is_causal, attend)

    @abstractmethod
    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, attend: Masked
    ) -> Tensor:
        """The same for what is of the shared sequence; `attend` is PyTorch's, with all but mask and `is_causal`."""

    def _refuse_unlike(self, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> None:
        queries, keys = query.shape[-2], key.shape[-2]
        columns, wrong = keys * self.parts.size, ""
        if not self._is_length(queries) or (is_causal and queries != keys):
            wrong = (
                f"attention of {queries} queries to {keys} keys, which are this rank's part of a sequence: the queries "
                "are no such part. Cut what they come from in cut_batch, too."
            )
        elif isinstance(mask, CausalBias):
            wrong = "attn_mask is a CausalBias, which knows nothing of other ranks' positions. Use is_causal=True."
        elif mask is not None and is_causal:
            wrong = "attention was called with is_causal=True and attn_mask. Use one of them."
        elif mask is not None and (mask.shape[-1] != columns or mask.shape[-2] not in (1, queries)):
            wrong = (
                f"attn_mask has the shape {tuple(mask.shape)}, and this rank's {queries} queries see the keys of all "
                f"{self.parts.size} ranks: it must end in ({queries}, {columns}), or (1, {columns}). Only cut a whole "
                "mask along its queries, cut(mask, dim=-2), or make it with packed_attention_mask, outside compiled "
                "blocks."
            )
        refuse(wrong, wrong, StepError)


class GatheredAttention(ContextAttention):
    """All keys and values on each rank, its own queries."""

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, attend: Masked
    ) -> Tensor:
        key, value = self.gather(key, value)
        if not is_causal:
            return attend(query, key, value, mask)
        length = key.shape[-2] // self.parts.n_chunks
        attended = []
        for chunk, queries in zip(self.parts.chunks, query.split(length, dim=-2), strict=True):
            seen = (chunk + 1) * length
            mask = causal_to_the_last_key(length, seen)
            attended.append(attend(queries, key[..., :seen, :], value[..., :seen, :], mask))
        return torch.cat(attended, dim=-2)

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Those of all positions, in one collective where they have one shape."""
        if key.shape != value.shape:
            return self.parts.joined(key, -2), self.parts.joined(value, -2)
        both = self.parts.joined(torch.stack((key, value)), -2)
        return both[0], both[1]


class UlyssesAttention(ContextAttention):
    """All positions on each rank, its share of the heads."""

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, attend: Masked
    ) -> Tensor:
        dims = {tensor.ndim for tensor in (query, key, value)}
        if dims == {3}:  # heads of all sequences
            return self._attend(query[None], key[None], value[None], mask, is_causal, attend)[0]
        if dims != {4}:
            raise StepError(
                f'attention="ulysses" was called with queries of the shape {tuple(query.shape)} and keys of '
                f'{tuple(key.shape)}, whose heads it does not know. Use [batch, heads, length, width], or "gathered".'
            )
        if mask is not None:
            if mask.ndim > 2 and mask.shape[-3] != 1:
                raise StepError(
                    f"attn_mask has the shape {tuple(mask.shape)}, one for each head, and ranks have different heads. "
                    'Use attention="gathered", or one mask for all heads.'
                )
            if mask.shape[-2] > 1:
                mask = self.parts.joined(mask, -2)
        return self.attend_with_own_heads(query, key, value, partial(attend, attn_mask=mask, is_causal=is_causal))

    def attend_with_own_heads(self, query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Tensor:
        size, heads = self.parts.size, (query.shape[1], key.shape[1])
        if any(count % size for count in heads):
            raise ConfigError(
                f'attention="ulysses" with context_parallel={size} gives each rank some of the {heads[0]} heads of '
                f"queries and {heads[1]} of keys on this rank, which {size} does not divide. Use a "
                'divisor of both, or attention="gathered".'
            )
        # In one collective: for each rank its heads of all three.
        split = [tensor.unflatten(1, (size, -1)).movedim(1, 0) for tensor in (query, key, value)]
        flat = self.parts.exchanged(torch.cat([tensor.flatten(1) for tensor in split], dim=1))
        pieces = flat.split([tensor[0].numel() for tensor in split], dim=1)
        whole = [
            piece.view(tensor.shape).movedim(0, 2).flatten(2, 3) for piece, tensor in zip(pieces, split, strict=True)
        ]
        by_rank = attend(*whole).unflatten(2, (size, -1)).movedim(2, 0)
        return self.parts.exchanged(by_rank).movedim(0, 1).flatten(1, 2)


_BY_OPERATION = torch.ops.aten.scaled_dot_product_attention


class AttentionTakeover(TorchFunctionMode):
    """Inside, as in a context-parallel step, some functions of PyTorch and this package are replaced by their handlers.
    Other code that looks at other positions only sees this rank's: the first step's verification finds it."""

    def __init__(self, attention: ContextAttention, further: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.attention = attention
        self.is_in_graphs = False  # whether it is for Python code that graphs call as it is, while they are compiled
        self.compiled: dict[Any, Callable[..., Any]] = {}  # for the lengths of sequences, by whose it is
        names = (F.scaled_dot_product_attention, _BY_OPERATION, _BY_OPERATION.default)
        self.handlers: dict[Any, Callable[..., Any]] = {
            **further,
            **dict.fromkeys(names, attention.scaled_dot_product_attention),
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_compiling() and not self.is_in_graphs:
            raise StepError(
                "torch.compile, or flex_attention, inside a step under context_parallel. Call "
                "scaled_dot_product_attention, uncompiled, or packed_attention, which may use flex_attention."
            )
        return self.handlers.get(func, func)(*args, **(kwargs or {}))

    def is_on(self) -> bool:
        """Whether a step is running, outside `aside`."""
        return self in function_modes()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, nothing is replaced, for what calls no attention and very many functions."""
        if self not in function_modes()[-1:]:
            yield
            return
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]


class SequenceParts:
    """The positions of a sequence that each rank has, and the collectives that join or exchange its parts. For causal
    work each rank has two chunks: one from the front (its queries see few keys) and one from the end."""

    def __init__(self, rank: int, size: int, group: ProcessGroup, *, is_balanced: bool) -> None:
        self.size = size
        self.n_chunks = 2 * size if is_balanced else size  # chunks of a sequence
        self._chunks_of = [(r, 2 * size - 1 - r) if is_balanced else (r,) for r in range(size)]
        self.chunks = self._chunks_of[rank]  # this rank's chunks, rising
        self._group = group

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's positions of `whole`, whose length along `dim` is a multiple of `n_chunks`."""
        return self._part(whole, dim, self.chunks)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Where this rank's `length` positions are in the sequence: int64 `[length]`."""
        return self.cut(torch.arange(length * self.size, device=device), 0)

    def joined(self, part: Tensor, dim: int) -> Tensor:
        """All ranks' positions, in their order; backward sums over ranks what they have for each position."""
        return linear(part, partial(self.gather, dim=dim), partial(self.sum_of_own, dim=dim))

    def as_if_alike(self, part: Tensor, dim: int) -> Tensor:
        """The result of `joined` if all ranks had this one's positions."""
        own = part.chunk(self.n_chunks // self.size, dim)
        return torch.cat([chunk for chunk in own for _ in range(self.size)], dim)

    def exchanged(self, by_rank: Tensor) -> Tensor:
        """Exchanges parts: `by_rank` `[size, ...]` has this rank's part for each, `out[j]` is rank j's for this one."""
        return linear(by_rank, self.exchange, self.exchange)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        part = part.contiguous()
        if is_traced(part):
            parts = gathered_in_graph(part.flatten(), self.size, self._group).view(self.size, *part.shape)
        else:
            parts = gathered_rows(part[None], self._group)
        length = part.shape[dim] * self.size // self.n_chunks
        owners = {chunk: (rank, place) for rank, own in enumerate(self._chunks_of) for place, chunk in enumerate(own)}
        places = [owners[chunk] for chunk in range(self.n_chunks)]
        return torch.cat([parts[rank].narrow(dim, place * length, length) for rank, place in places], dim)

    def sum_of_own(self, whole: Tensor, dim: int) -> Tensor:
        """The sum over ranks of this one's positions of `whole`, without gradients."""
        every = torch.stack([self._part(whole, dim, chunks) for chunks in self._chunks_of])
        if is_traced(every):
            return summed_in_graph(every.flatten(), self.size, self._group).view(every.shape[1:])
        return summed_rows(every, self._group)[0]

    def exchange(self, by_rank: Tensor) -> Tensor:
        by_rank = by_rank.contiguous()
        if is_traced(by_rank):
            return exchanged_in_graph(by_rank.flatten(), self.size, self._group).view(by_rank.shape)
        out = torch.empty_like(by_rank)
        dist.all_to_all_single(out, by_rank, group=self._group)
        return out

    def _part(self, whole: Tensor, dim: int, chunks: tuple[int, ...]) -> Tensor:
        length = whole.shape[dim] // self.n_chunks
        return torch.cat([whole.narrow(dim, chunk * length, length) for chunk in chunks], dim)


class SharedBlock(CompiledInside, Changed):
    """Is compiled for whole sequences, and for each length that ranks share."""

    _backend: tuple[str, str | None, Any]  # its name, mode and options
    _whole: Callable[..., Any]  # the forward of its class, compiled as it is

    # A graph compiled around it would trace it as if there were no mode, and attend within this rank's positions.
    @torch.compiler.disable(reason="blocks are compiled by themselves under context_parallel")  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        modes = function_modes()
        takeover = next((mode for mode in modes if isinstance(mode, AttentionTakeover)), None)
        if (in_backward() and takeover is None) or (takeover is not None and takeover is not modes[-1]):
            raise StepError(
                "a compiled block was called in context_parallel by torch.utils.checkpoint around it, in backward, or "
                "within another mode, such as torch.device: its attention would not be taken over. Use "
                "device_parameters.activation_checkpointing, or compile=False."
            )
        if takeover is None:  # outside steps, each rank has whole sequences
            with _own_errors():
                return type(self)._whole(self, *args, **kwargs)
        forward, lengths = super().forward, frozenset(takeover.attention.lengths)
        # Equal blocks share graphs, up to PyTorch's limit; if blocks differ more, each gets separate graphs.
        for key in ((type(self), lengths), (ref(self), lengths)):
            if key not in takeover.compiled:
                takeover.compiled[key] = _compiled(takeover, *type(self)._backend)
            try:
                with takeover.aside(), has_keys_elsewhere(), _own_errors():
                    output = takeover.compiled[key](forward, *args, **kwargs)
            except errors_of_compiler().FailOnRecompileLimitHit:  # from now on only its graphs that fit are used
                takeover.compiled[key] = torch.compiler.set_stance("eager_on_recompile")(takeover.compiled[key])
                continue
            if output is not None:
                return output[0]
        return forward(*args, **kwargs)


def _compiled(takeover: AttentionTakeover, name: str, mode: str | None, options: Any) -> Callable[..., Any]:
    """`_run`, compiled for the lengths of now."""
    in_graphs = copy.copy(takeover)
    in_graphs.is_in_graphs = True
    torch.compiler.allow_in_graph(attend_elsewhere)
    # A separate function has separate graphs, and its own limit on their number.
    run = FunctionType(_run.__code__.replace(), globals())
    backend = changing_backend(name, mode, options, partial(change_calls, change=partial(_share, in_graphs)))
    return torch.compile(run, backend=backend, fullgraph=True, dynamic=False)


def _run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any] | None:
    """The result of `forward`; None, uncomputed, if the compiler does not trace it."""
    return (forward(*args, **kwargs),) if is_compiling() else None


def compile_with_shared_attention(module: nn.Module, backend: str, mode: str | None, options: Any = None) -> None:
    """Compiles the forward of `module`, each shape by itself, for whole sequences and for context-parallel ones."""
    whole = torch.compile(type(module).forward, backend=backend, mode=mode, options=options, dynamic=False)
    of_class = {"_backend": (backend, mode, options), "_whole": staticmethod(whole)}
    change_class(module, SharedBlock, key=(backend, mode, repr(options)), **of_class)


def _share(in_graphs: AttentionTakeover, node: torch.fx.Node, is_in_function: bool) -> None:
    function: Any = node.target
    handler = in_graphs.handlers.get(function)
    if handler is not None and is_in_function:
        raise StepError(
            "attention inside a torch.autograd.Function, in a compiled block under context_parallel: its backward "
            "would be of this rank's part of a sequence. Call scaled_dot_product_attention outside of it."
        )
    if function in KERNELS:
        raise StepError(
            'flex_attention, or a mask of kind "flex" or "varlen", in a compiled block under context_parallel. Use '
            'scaled_dot_product_attention, or packed_attention_mask(..., kind="sdpa"); or compile=False.'
        )
    if handler is not None:
        node.target = handler
    elif is_opaque(function):

        @wraps(function)
        def call_inside(*args: Any, **kwargs: Any) -> Any:
            with in_graphs:
                return function(*args, **kwargs)

        node.target = call_inside


@contextmanager
def _own_errors() -> Iterator[None]:
    """Inside, our errors come without the compiler's around them, and those of attention's shapes are explained."""
    errors = errors_of_compiler()
    try:
        yield
    except errors.BackendCompilerFailed as error:
        if isinstance(error.inner_exception, DreamTrainerError):
            raise error.inner_exception from None
        raise
    except errors.TorchRuntimeError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        raise StepError(
            "scaled_dot_product_attention in a compiled block was given shapes that do not fit. In context_parallel a "
            "mask has the keys of all ranks, and the compiler knows those of one: use packed_attention, "
            f"is_causal=True, or compile=False. PyTorch says: {str(error).splitlines()[0]}"
        ) from error
