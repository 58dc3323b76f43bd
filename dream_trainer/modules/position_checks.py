"""What mixes positions of a sequence, in a step that has a part of them: what is certain is refused, the rest named.

Attention is taken over (`attention_takeover.py`). All else that looks at other positions would see this rank's part
alone, and train wrong without a word. It is told by its shapes: it goes along a dimension of as many values as the part
has. The checks look at arguments only, and say nothing of most calls after one comparison.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations
from types import BuiltinFunctionType, FrameType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from dream_trainer.compat.computed_from import viewed
from dream_trainer.errors import StepError
from dream_trainer.modules.context_attention import ContextAttention

Check = Callable[..., None]

_MIXING: Mapping[Callable[..., Any], int] = {
    **dict.fromkeys((torch.mean, Tensor.mean, torch.sum, Tensor.sum, torch.prod, Tensor.prod), 0),
    **dict.fromkeys((torch.var, Tensor.var, torch.std, Tensor.std, torch.logsumexp, Tensor.logsumexp), 0),
    **dict.fromkeys((torch.amax, Tensor.amax, torch.amin, Tensor.amin, torch.max, Tensor.max), 0),
    **dict.fromkeys((torch.min, Tensor.min, torch.median, Tensor.median), 0),
    **dict.fromkeys((torch.cumsum, Tensor.cumsum, torch.cumprod, Tensor.cumprod, torch.cummax, Tensor.cummax), 0),
    **dict.fromkeys((torch.argmax, Tensor.argmax, torch.argmin, Tensor.argmin, torch.any, Tensor.any), 0),
    **dict.fromkeys((torch.all, Tensor.all, torch.nansum, Tensor.nansum, torch.nanmean, Tensor.nanmean), 0),
    **dict.fromkeys((torch.var_mean, torch.std_mean, torch.count_nonzero, Tensor.count_nonzero), 0),
    **dict.fromkeys((torch.mode, Tensor.mode, torch.cummin, Tensor.cummin, torch.logcumsumexp), 0),
    **dict.fromkeys((torch.quantile, Tensor.quantile, torch.kthvalue, Tensor.kthvalue, F.normalize), 1),
    **dict.fromkeys((torch.fft.ifft, torch.fft.irfft), 1),
    **dict.fromkeys((torch.flip, Tensor.flip, torch.sort, Tensor.sort, torch.argsort, Tensor.argsort), 0),
    **dict.fromkeys((torch.unbind, Tensor.unbind, torch.select, Tensor.select, Tensor.unfold), 0),
    **dict.fromkeys((torch.roll, Tensor.roll, torch.diff, Tensor.diff, torch.topk, Tensor.topk), 1),
    **dict.fromkeys((torch.gather, Tensor.gather, torch.index_select, Tensor.index_select, torch.narrow), 0),
    **dict.fromkeys((torch.aminmax, Tensor.aminmax, torch.nanmedian, Tensor.nanmedian, Tensor.narrow), 0),
    **dict.fromkeys((torch.gradient, torch.trapezoid, F.glu, torch.trapz, torch.special.logsumexp), 0),
    **dict.fromkeys((torch.cumulative_trapezoid, torch.fft.fftshift, torch.fft.ifftshift), 0),
    **dict.fromkeys((torch.take_along_dim, Tensor.take_along_dim, torch.renorm, Tensor.renorm), 1),
    **dict.fromkeys((torch.cosine_similarity, torch.nanquantile, Tensor.nanquantile), 1),
    **dict.fromkeys((torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm), 1),
    **dict.fromkeys((torch.fft.fft, torch.fft.rfft, torch.fft.hfft, torch.fft.ihfft), 1),
}
"""What mixes values along a dimension, by the place of that dimension after the values."""
_DIMENSIONS = ("dim", "dims", "axis", "dimension")
_MASKS = "transformers.masking_utils"
_LOOKING = __name__, "dream_trainer.modules.attention_takeover"
_COMPILING = "dream_trainer.modules.compiled_attention"


class PositionChecks:
    """Looks at the arguments of functions for this rank's positions.

    Attributes:
        of: The check of each function, called with its arguments before it.
    """

    def __init__(self, attention: ContextAttention, warn: Callable[[str, str], None]) -> None:
        self._attention, self._told = attention, warn
        self.of: dict[Any, Check] = {mixing: partial(self._mixing, mixing, at) for mixing, at in _MIXING.items()}
        by_check: dict[Check, Iterable[Any]] = {
            self._own_attention: (
                *(torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax, F.softmin, F.gumbel_softmax),
            ),
            self._own_log_attention: (
                *(torch.log_softmax, F.log_softmax, Tensor.log_softmax, torch.special.log_softmax),
            ),
            partial(self._product, "matmul", 0): (torch.matmul, Tensor.matmul, Tensor.__matmul__),
            partial(self._product, "bmm", 0): (torch.bmm, Tensor.bmm, torch.mm, Tensor.mm),
            partial(self._product, "baddbmm", 1): (torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm),
            self._einsum: (torch.einsum,),
            self._convolution: (F.conv1d, torch.conv1d),
            self._pooling: (
                *(F.avg_pool1d, torch.avg_pool1d, F.max_pool1d, torch.max_pool1d, F.adaptive_avg_pool1d),
                *(F.adaptive_max_pool1d, F.interpolate, F.group_norm, F.instance_norm),
            ),
            self._recurrence: (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
            self._positions: (torch.arange,),
            self._even_positions: (torch.linspace,),
            self._padding: (F.pad,),
            self._joining: (torch.cat, torch.concat, torch.concatenate),
            self._neighbours: (Tensor.__getitem__, Tensor.__setitem__),
            self._scattering: (
                *(torch.scatter, Tensor.scatter, Tensor.scatter_, torch.scatter_add, Tensor.scatter_add),
                *(Tensor.scatter_add_, torch.index_add, Tensor.index_add, Tensor.index_add_),
            ),
            self._norm: (F.layer_norm, F.rms_norm),
            _refuse_multi_head_attention: (F.multi_head_attention_forward,),
        }
        self.of |= {function: check for check, functions in by_check.items() for function in functions}

    def _own_attention(self, scores: Tensor, *_: Any, **__: Any) -> None:
        shape = scores.shape
        if len(shape) < 3 or shape[-1] not in self._attention.lengths or shape[-2] != shape[-1]:
            return
        hint = "" if len(shape) > 3 else " Logits of as many classes are taken as rows: logits.flatten(0, 1)."
        raise StepError(
            f"softmax over scores of the shape {tuple(shape)}: the model computes attention by itself, "
            "within this rank's part of a sequence. Under context_parallel call scaled_dot_product_attention (in "
            f'transformers: attn_implementation="sdpa"), or packed_attention.{hint}'
        )

    def _own_log_attention(self, scores: Tensor, *_: Any, **__: Any) -> None:
        if scores.ndim > 3:  # with three they are rather logits: the product with values is looked at, too
            self._own_attention(scores)

    def _product(self, name: str, first: int, *args: Any, **kwargs: Any) -> None:
        """`left[..., m, k] @ right[..., k, n]` sums over k: positions, where `right` holds values at them."""
        left, right = (*args, *kwargs.values())[first : first + 2]
        lengths = self._attention.lengths
        if right.ndim < 2:
            return
        is_of_pairs = min(left.ndim, right.ndim) > 2 and left.shape[-2] in lengths and right.shape[-1] in lengths
        if is_of_pairs and not _is_of_weights(left) and not _is_of_weights(right):
            self._warn_of_pairs(name, left, right, left.shape[-2])
        if left.shape[-1] not in lengths:
            return
        is_of_matrix = right.ndim == 2 and left.ndim > 2  # without a batch: features by weights
        if is_of_matrix or _is_of_weights(right) or right.stride(-1) != 1 == right.stride(-2):
            return  # such as queries by keys: what is summed over lies together, as features do
        self._warn_of_product(name, (left, right), left.shape[-1])

    def _warn_of_pairs(self, name: str, left: Tensor, right: Tensor, length: int) -> None:
        self._warn(
            f"{name} of pairs under context_parallel",
            f"the step calls {name} of {tuple(left.shape)} and {tuple(right.shape)}, whose result has a value for each "
            f"two of {length}, as many as this rank's part of a sequence has. If these are positions, as where "
            "attention multiplies queries with keys, pairs with those of other ranks are missing. Call "
            "scaled_dot_product_attention, or train with context_parallel=1.",
        )

    def _einsum(self, equation: Any, *operands: Any, **_: Any) -> None:
        if not isinstance(equation, str):
            return
        if isinstance(operands[0], Sequence):
            operands = tuple(operands[0])
        inputs, arrow, output = equation.replace(" ", "").partition("->")
        terms = inputs.split(",")
        if not arrow:
            output = "".join(letter for letter in inputs if inputs.count(letter) == 1)
        for one, other in combinations([letter for letter in output if letter != "."], 2):
            self._look_at_einsum_pairs(equation, terms, operands, (one, other))
        for letter in set("".join(terms)) - {*output, ".", ","}:
            holding = [(term, operand) for term, operand in zip(terms, operands, strict=True) if letter in term]
            length = _size_of(letter, *holding[0])
            # What is last holds features; without the batch, which is first, it is a sum of all.
            is_of_features = all(term.endswith(letter) or _is_of_weights(operand) for term, operand in holding)
            is_of_all = any(term[0] != letter and term[0] not in output + "." for term, _ in holding)
            if length in self._attention.lengths and not is_of_features and not is_of_all:
                self._warn_of_product(f"einsum({equation!r})", operands, length)

    def _look_at_einsum_pairs(
        self, equation: str, terms: Sequence[str], operands: Sequence[Tensor], letters: tuple[str, str]
    ) -> None:
        """Of `"bhid,bhjd->bhij"`: two letters that no operand has together."""
        if any(all(letter in term for letter in letters) for term in terms):
            return
        having = [
            next((pair for pair in zip(terms, operands, strict=True) if letter in pair[0]), None) for letter in letters
        ]
        one, other = (pair for pair in having if pair is not None)
        lengths = [_size_of(letter, *pair) for letter, pair in zip(letters, (one, other), strict=True)]
        are_positions = all(length in self._attention.lengths for length in lengths)
        if are_positions and not any(_is_of_weights(operand) for _, operand in (one, other)):
            self._warn_of_pairs(f"einsum({equation!r})", one[1], other[1], lengths[0])

    def _warn_of_product(self, name: str, operands: Sequence[Tensor], length: int) -> None:
        shapes = " and ".join(str(tuple(operand.shape)) for operand in operands)
        self._warn(
            f"{name} under context_parallel",
            f"the step calls {name} of {shapes}, which sums over {length} values, as many as this rank's part of a "
            "sequence has. If these are positions, as where attention multiplies weights with values, the result is of "
            "this part alone, and not what one rank would compute. Call scaled_dot_product_attention, or train with "
            "context_parallel=1.",
        )

    def _convolution(self, values: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(("bias", "stride", "padding", "dilation"), args, strict=False)) | kwargs
        dilation = given.get("dilation", 1)
        reach = (weight.shape[-1] - 1) * (dilation if isinstance(dilation, int) else dilation[0])
        # It may be padded already, in front or on both sides.
        if reach and any(length <= values.shape[-1] <= length + 2 * reach for length in self._attention.lengths):
            raise StepError(
                f"conv1d of width {weight.shape[-1]} over {values.shape[-1]} positions, which are this rank's part of "
                "a sequence: it would mix positions that are no neighbours. Train with context_parallel=1."
            )

    def _recurrence(self, values: Tensor, second: Any, third: Any, fourth: Any, *rest: Any, **_: Any) -> None:
        is_packed = not isinstance(fourth, bool)  # `second` then says how many sequences reach each position
        length = second.shape[0] if is_packed else values.shape[1 if rest[-1] else 0]
        if length in self._attention.lengths:
            raise StepError(
                f"a recurrent layer (nn.LSTM, nn.GRU or nn.RNN) over {length} positions, which are this rank's part of "
                "a sequence: it would begin anew in the middle. Train with context_parallel=1."
            )

    def _pooling(self, values: Tensor, *_: Any, **__: Any) -> None:
        if values.ndim == 3 and values.shape[-1] in self._attention.lengths:
            self._tell("a pooling, norm or interpolation", values, 2, values.shape[-1])

    def _mixing(self, mixing: Callable[..., Any], at: int, values: Tensor, *args: Any, **kwargs: Any) -> None:
        dims = args[at] if len(args) > at else None
        if kwargs:
            dims = next((kwargs[name] for name in _DIMENSIONS if name in kwargs), dims)
        if isinstance(dims, int):
            dims = (dims,)
        elif not isinstance(dims, (tuple, list)):  # none, or the other tensor of a maximum
            return
        shape = values.shape
        for dim in dims:
            if shape[dim] in self._attention.lengths:
                self._warn_of_part(mixing.__name__.removeprefix("linalg_"), values, dim, shape[dim])

    def _padding(self, values: Tensor, pad: Any, *_: Any, **__: Any) -> None:
        for place in range(len(pad) // 2):  # of the last dimension first, on both sides
            if pad[2 * place] or pad[2 * place + 1]:
                self._warn_of_part("pad", values, -1 - place, values.shape[-1 - place])

    def _joining(self, tensors: Any, dim: int = 0, **kwargs: Any) -> None:
        """Of pieces that are joined to a part, and of a part that something is joined to."""
        dim = kwargs.get("axis", dim)
        if len(tensors) > 1 and len({part.ndim for part in tensors}) == 1:
            sizes = [part.shape[dim] for part in tensors]
            joined = next((size for size in (sum(sizes), *sizes) if size in self._attention.lengths), 0)
            self._warn_of_part("cat", tensors[0], dim, joined)

    def _neighbours(self, values: Tensor, index: Any, *_: Any) -> None:
        """Of `x[:, 1:]`, `x[:, :-1]`, `x[:, ::2]` and `x[:, -1]`; pieces such as `x[:, 4:8]` are taken by turns."""
        if type(index) is slice:
            self._beginning(values, 0, index)
        if type(index) is not tuple or not index:
            return
        first = 0
        if index[0] is Ellipsis:
            index = index[1:]
            first = values.ndim - len(index)
        for dim, one in enumerate(index, first):
            if isinstance(one, Tensor) and one.dtype is not torch.bool:
                if dim:  # `x[torch.arange(batch), last]`
                    self._warn_of_part("an index", values, dim, values.shape[dim])
            elif not isinstance(one, (int, slice)):
                return
            elif dim and values.shape[dim] in self._attention.lengths and (isinstance(one, int) or _is_shift(one)):
                self._warn_of_part("a slice", values, dim, values.shape[dim])
            elif isinstance(one, slice) and (dim == 0 or values.shape[:dim].numel() == 1):
                self._beginning(values, dim, one)

    def _beginning(self, values: Tensor, dim: int, one: slice) -> None:
        """Of `table[:length]` and `buffer[:, :length]`, by which models take what they keep for each position."""
        is_first = not one.start and one.step in (None, 1) and isinstance(one.stop, int)
        if is_first and one.stop in self._attention.lengths and values.shape[dim] > one.stop:
            self._warn(
                "the first values under context_parallel",
                f"the step takes the first {one.stop} of {values.shape[dim]} values of {tuple(values.shape)}, as many "
                "as this rank has positions of a sequence. If they are of positions, as those of a table of embeddings "
                "or rotations, they are wrong: the positions of a part are not the first. Take positions from the "
                "batch, cut as its tokens are: table[positions].",
            )

    def _scattering(self, values: Tensor, dim: int, *added: Any, **more: Any) -> None:
        """Of values that are added up, or put, where an index says: from this rank's part, or into it."""
        dim = dim % values.ndim
        for each in (values, *added, *more.values()):
            if isinstance(each, Tensor) and each.ndim == values.ndim and each.shape[dim] in self._attention.lengths:
                self._warn_of_part("an index", each, dim, each.shape[dim])
                return

    def _norm(self, values: Tensor, over: Sequence[int], *_: Any, **__: Any) -> None:
        for dim in range(-len(over), -1):
            self._warn_of_part("a norm", values, dim, values.shape[dim])

    def _warn_of_part(self, name: str, values: Tensor, dim: int, length: int) -> None:
        """Warns that `name` mixes `length` values along a dimension, if they may be this rank's positions."""
        if length not in self._attention.lengths:
            return
        dims, dim = values.ndim, dim % values.ndim
        # The last dimension is that of features, but for tokens, positions and masks; the first of two, of rows.
        is_of_features = dim == dims - 1 and (dims > 2 or values.is_floating_point())
        if not is_of_features and (dims != 2 or dim):
            self._tell(name, values, dim, length)

    def _tell(self, name: str, values: Tensor, dim: int, length: int) -> None:
        self._warn(
            f"{name} under context_parallel",
            f"the step calls {name} along dimension {dim} of {tuple(values.shape)}, over {length} values, as many "
            "as this rank's part of a sequence has. If it is one, the result is of this part alone, and not what "
            "one rank would compute. Compute it in the loader and cut it as the tokens are, or train with "
            "context_parallel=1.",
        )

    def _warn(self, key: str, message: str) -> None:
        if not _is_of_no_model():
            self._told(key, message)

    def _positions(self, *args: Any, **kwargs: Any) -> None:
        names = ("start", "end", "step") if len(args) > 1 else ("end",)
        given = {"start": 0, "step": 1} | dict(zip(names, args, strict=False)) | kwargs
        if given["step"] == 1 and given["start"] in (0, 1):  # from elsewhere, as where a rank counts its own
            count = given.get("end", 0) - given["start"]
            if count in self._attention.lengths:
                _refuse_mask_of_transformers(count)
                self._warn_of_counting("arange", count)

    def _even_positions(self, *args: Any, **kwargs: Any) -> None:
        steps = kwargs.get("steps", args[-1] if len(args) > 2 else 0)
        if steps in self._attention.lengths:
            self._warn_of_counting("linspace", steps)

    def _warn_of_counting(self, name: str, count: int) -> None:
        self._warn(
            f"{name} under context_parallel",
            f"the step calls torch.{name} for {count} numbers, as many as this rank has positions of a sequence. If "
            "these are positions, they are wrong: those of a part are not the first. Give the model positions from "
            "the batch, cut as its tokens are.",
        )


def _size_of(letter: str, term: str, operand: Tensor) -> int:
    """How many values `operand` has along the dimension of a letter of its term in an einsum."""
    at = term.index(letter)
    return operand.shape[at if "." not in term[:at] else at - len(term)]


def _is_of_weights(tensor: Tensor) -> bool:
    return isinstance(viewed(tensor), Parameter)


def _is_shift(one: slice) -> bool:
    if one.step not in (None, 1):
        return True
    if not all(isinstance(end, int) for end in (one.start, one.stop) if end is not None):
        return False
    return (one.stop is None and bool(one.start)) or (not one.start and one.stop is not None and one.stop < 0)


def _is_of_no_model() -> bool:
    """Whether what is looked at is called by code of ours."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and _module_of(frame) in _LOOKING:
        frame = frame.f_back
    if frame is not None and _module_of(frame).startswith("dream_trainer.") and _module_of(frame) != _COMPILING:
        return True
    while frame is not None and _module_of(frame).startswith("dream_trainer."):
        frame = frame.f_back
    while frame is not None and _module_of(frame).startswith(("torch.", _MASKS)):
        if _module_of(frame).startswith(("torch.distributed.", _MASKS)):
            return True
        frame = frame.f_back
    return False


def _refuse_mask_of_transformers(count: int) -> None:
    """Raises StepError where transformers makes a mask, for which it counts a part's positions from 0."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and _module_of(frame) in _LOOKING:
        frame = frame.f_back
    if frame is not None and _module_of(frame) == _MASKS and not frame.f_code.co_name.startswith("_"):
        raise StepError(
            f"a model of transformers makes a mask for {count} positions, which are this rank's part of a sequence, as "
            "if they were the first: it was given attention_mask of two dimensions, or position_ids that jump, as with "
            'attention="gathered". Under context_parallel give it attention="ulysses" and position_ids of the batch '
            "and no attention_mask (for padding at the end labels that do not count are enough), or one of four "
            "dimensions, cut(mask, dim=-2)."
        )


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _refuse_multi_head_attention(*_: Any, **__: Any) -> NoReturn:
    raise StepError(
        "nn.MultiheadAttention, which nn.TransformerEncoderLayer and its like use, attends within this rank's part of "
        "a sequence. Under context_parallel call scaled_dot_product_attention on heads of your own."
    )


_OF_IMAGES = """
adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d_with_indices adaptive_max_pool2d
adaptive_max_pool2d_with_indices adaptive_max_pool3d adaptive_max_pool3d_with_indices affine_grid
affine_grid_generator avg_pool2d avg_pool3d channel_shuffle col2im conv2d conv3d conv_tbc conv_transpose1d
conv_transpose2d conv_transpose3d convolution fold fractional_max_pool2d fractional_max_pool2d_with_indices
fractional_max_pool3d fractional_max_pool3d_with_indices grid_sample grid_sampler grid_sampler_2d grid_sampler_3d
im2col local_response_norm lp_pool1d lp_pool2d lp_pool3d max_pool1d_with_indices max_pool2d max_pool2d_with_indices
max_pool3d max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d miopen_batch_norm miopen_convolution
miopen_convolution_add_relu miopen_convolution_relu miopen_convolution_transpose miopen_depthwise_convolution
native_channel_shuffle pixel_shuffle pixel_unshuffle quantized_batch_norm quantized_max_pool1d quantized_max_pool2d
quantized_max_pool3d unfold
"""
_OF_STATISTICS = """
batch_norm batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats
batch_norm_gather_stats_with_counts batch_norm_stats batch_norm_update_stats bincount corrcoef cov embedding_bag
frobenius_norm hash_tensor histc histogram histogramdd msort native_batch_norm native_group_norm native_norm
nonzero_static norm_except_dim nuclear_norm pca_lowrank return_output searchsorted svd_lowrank trace unique
unique_consecutive unique_impl
"""
_OF_MATRICES = """
addbmm cartesian_prod cdist chain_matmul cholesky cholesky_inverse cholesky_solve combinations ctc_loss
cumulative_trapezoid det geqrf inner inverse kron linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det linalg_eig
linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor
linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve
linalg_matmul linalg_matrix_exp linalg_matrix_norm linalg_matrix_power linalg_matrix_rank linalg_matrix_sqrth
linalg_multi_dot linalg_pinv linalg_polar linalg_qr linalg_slogdet linalg_solve linalg_solve_ex
linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve linalg_vecdot lobpcg logdet lu
lu_solve lu_unpack matrix_exp matrix_power orgqr ormqr pdist pinverse qr rmatmul slogdet spmm svd tensordot trapezoid
triangular_solve
"""
_OF_ORDER = """
dstack fft_fft2 fft_fftn fft_fftshift fft_hfft fft_hfft2 fft_hfftn fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft
fft_ihfft2 fft_ihfftn fft_irfft2 fft_irfftn fft_rfft2 fft_rfftn fliplr flipud gradient hstack index_copy index_fill
index_reduce istft masked_scatter narrow_copy put rot90 scatter_reduce select_copy select_scatter slice_scatter stft
take tile trapz unbind_copy unfold_copy
"""
_NAMES = frozenset(" ".join((_OF_IMAGES, _OF_STATISTICS, _OF_MATRICES, _OF_ORDER)).split())
_KINDS = BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType


def name_in_pytorch(function: Any) -> str:
    """The name of a function of PyTorch's, without underscores around it; nothing for any other."""
    if not isinstance(function, _KINDS):
        return ""
    is_pytorchs = not isinstance(function, FunctionType) or function.__module__.startswith("torch.")
    return function.__name__.strip("_") if is_pytorchs else ""


def is_spanning(name: str) -> bool:
    """Whether a function of PyTorch's of this name may go over positions."""
    return name in _NAMES
