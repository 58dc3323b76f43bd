"""Inside a step whose sequences are shared by ranks: calls of attention go to ours, and what cannot is named.

A model needs no change, where all that looks at other positions is `scaled_dot_product_attention`. Everything else that
does would see this rank's positions alone, and train wrong without a word: what of it can be told is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from dream_trainer.compat.pytorch import function_modes
from dream_trainer.errors import StepError
from dream_trainer.modules.context_attention import ContextAttention

Handler = Callable[..., Any]

_MIXING: dict[Callable[..., Any], tuple[str, ...]] = {
    **dict.fromkeys((torch.mean, Tensor.mean, torch.cumsum, Tensor.cumsum), ("dim",)),
    **dict.fromkeys((torch.var, Tensor.var, torch.std, Tensor.std), ("dim",)),
    **dict.fromkeys((torch.roll, Tensor.roll), ("shifts", "dim")),
    **dict.fromkeys((torch.diff, Tensor.diff), ("n", "dim")),
    **dict.fromkeys((torch.norm, Tensor.norm), ("p", "dim")),
    **dict.fromkeys((torch.linalg.norm, torch.linalg.vector_norm), ("ord", "dim")),
}
"""What mixes values along a dimension, by the names of its arguments; `dims` and `axis` are `dim`, too."""
_COMPILED = (
    "torch.compile, or flex_attention, which is compiled, inside a step whose sequences are shared by ranks. Under "
    "context_parallel call scaled_dot_product_attention, uncompiled; for packed rows packed_attention, which may use "
    "flex_attention."
)


class AttentionTakeover(TorchFunctionMode):
    """Inside, functions of PyTorch and of ours are replaced by their handlers.

    Args:
        attention: What attention goes to.
        further: Gives handlers of further functions that take part in PyTorch's override protocol.
        warn: Told once, under a key, of what may be wrong.

    Attributes:
        attention: What attention goes to.
        further: As given.
        warn: As given.
        checks: What is called before other functions, with their arguments.
        compiled: What was compiled for the lengths of sequences, by whose it is.
    """

    def __init__(
        self,
        attention: ContextAttention,
        further: Callable[[ContextAttention], Mapping[Callable[..., Any], Handler]],
        warn: Callable[[str, str], None],
    ) -> None:
        super().__init__()
        self.attention, self.further, self.warn = attention, further, warn
        self.compiled: dict[Any, Callable[..., Any]] = {}
        self.checks: dict[Any, Handler] = {
            F.multi_head_attention_forward: _refuse_multi_head_attention,
            torch.arange: self._warn_of_positions,
            F.conv1d: self._refuse_convolution,
            torch.conv1d: self._refuse_convolution,
        }
        self.checks |= dict.fromkeys((torch.softmax, F.softmax, Tensor.softmax), self._refuse_own_attention)
        self.checks |= {mixing: partial(self._warn_of_mixing, mixing) for mixing in _MIXING}
        self.checks |= {F.pad: self._warn_of_padding, torch.cat: self._warn_of_joining}
        self._handlers = {function: _checked(function, check) for function, check in self.checks.items()}
        self._handlers |= {F.scaled_dot_product_attention: self._attend, **further(attention)}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_compiling():
            raise StepError(_COMPILED)
        return self._handlers.get(func, func)(*args, **(kwargs or {}))

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

    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            _refuse_reentrant_checkpoint()
        return self.attention.scaled_dot_product_attention(*args, **kwargs)

    def _refuse_own_attention(self, scores: Tensor, *_: Any, **__: Any) -> None:
        if scores.ndim >= 4 and scores.shape[-1] in self.attention.lengths and scores.shape[-2] == scores.shape[-1]:
            raise StepError(
                f"softmax over scores of the shape {tuple(scores.shape)}: the model computes attention by itself, "
                "within this rank's part of a sequence. Under context_parallel call scaled_dot_product_attention (in "
                'transformers: attn_implementation="sdpa"), or packed_attention.'
            )

    def _refuse_convolution(self, values: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(("bias", "stride", "padding", "dilation"), args, strict=False)) | kwargs
        dilation = given.get("dilation", 1)
        reach = (weight.shape[-1] - 1) * (dilation if isinstance(dilation, int) else dilation[0])
        # It may be padded already, in front or on both sides.
        if reach and any(length <= values.shape[-1] <= length + 2 * reach for length in self.attention.lengths):
            raise StepError(
                f"conv1d of width {weight.shape[-1]} over {values.shape[-1]} positions, which are this rank's part of "
                "a sequence: it would mix positions that are no neighbours. Train with context_parallel=1."
            )

    def _warn_of_mixing(self, mixing: Callable[..., Any], values: Tensor, *args: Any, **kwargs: Any) -> None:
        given = kwargs | dict(zip(_MIXING[mixing], args, strict=False))
        dims = next((given[name] for name in ("dim", "dims", "axis") if name in given), None)
        for dim in (dims,) if isinstance(dims, int) else dims or ():
            self._warn_of_part(mixing.__name__.removeprefix("linalg_"), values, dim, values.shape[dim])

    def _warn_of_padding(self, values: Tensor, pad: Any, *_: Any, **__: Any) -> None:
        for place in range(len(pad) // 2):  # of the last dimension first, on both sides
            if pad[2 * place] or pad[2 * place + 1]:
                self._warn_of_part("pad", values, -1 - place, values.shape[-1 - place])

    def _warn_of_joining(self, tensors: Any, dim: int = 0, **kwargs: Any) -> None:
        dim = kwargs.get("axis", dim)
        if len(tensors) > 1 and len({part.ndim for part in tensors}) == 1:
            length = sum(part.shape[dim] for part in tensors)
            self._warn_of_part("cat", tensors[0], dim, length)

    def _warn_of_part(self, name: str, values: Tensor, dim: int, length: int) -> None:
        """Warns that `name` mixes `length` values along a dimension, if they may be this rank's positions."""
        # The last dimension is that of features, but for tokens, positions and masks.
        is_of_features = dim % values.ndim == values.ndim - 1 and (values.ndim > 2 or values.is_floating_point())
        if length in self.attention.lengths and not is_of_features:
            self.warn(
                f"{name} under context_parallel",
                f"the step calls {name} along dimension {dim} of {tuple(values.shape)}, over {length} values, as many "
                "as this rank's part of a sequence has. If it is one, the result is of this part alone, and not what "
                "one rank would compute. Compute it in the loader and cut it as the tokens are, or train with "
                "context_parallel=1.",
            )

    def _warn_of_positions(self, *args: Any, **kwargs: Any) -> None:
        names = ("start", "end", "step") if len(args) > 1 else ("end",)
        given = {"start": 0, "step": 1} | dict(zip(names, args, strict=False)) | kwargs
        end = given.get("end")
        if given["start"] == 0 and given["step"] == 1 and end in self.attention.lengths:
            self.warn(
                "arange under context_parallel",
                f"the step calls torch.arange({end}), as many numbers as this rank has positions of a sequence. If "
                "these are positions, they are wrong: those of a part are not the first. Give the model positions from "
                "the batch, cut as its tokens are.",
            )


def _checked(function: Callable[..., Any], check: Callable[..., None]) -> Handler:
    def call(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def _refuse_reentrant_checkpoint() -> None:
    """Autograd runs a backward without modes, so what such a checkpoint computes again would be this rank's part alone.

    The other form finds by itself that it computed something else, and raises.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise StepError(
                "attention inside torch.utils.checkpoint with use_reentrant=True: in backward it would be computed "
                "again within this rank's part of a sequence. Under context_parallel set "
                'device_parameters.activation_checkpointing to "full" or "selective" instead.'
            )
        frame = frame.f_back


def _refuse_multi_head_attention(*_: Any, **__: Any) -> NoReturn:
    raise StepError(
        "nn.MultiheadAttention, which nn.TransformerEncoderLayer and its like use, attends within this rank's part of "
        "a sequence. Under context_parallel call scaled_dot_product_attention on heads of your own."
    )
