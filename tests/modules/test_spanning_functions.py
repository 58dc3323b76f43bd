"""Functions of PyTorch's are looked at by steps that have a part of a sequence, or act at each position by itself."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import get_overridable_functions

from dream_trainer.modules.attention_takeover import _ATTENDS
from dream_trainer.modules.context_attention import GatheredAttention
from dream_trainer.modules.position_checks import PositionChecks, is_spanning, name_in_pytorch
from dream_trainer.modules.sequence_parts import SequenceParts

OF_EACH_POSITION = """
abs absolute acos acosh add addcdiv addcmul addmv addr adjoint alias_copy align_as align_to allclose alpha_dropout and
angle apply arccos arccosh arcsin arcsinh arctan arctan2 arctanh argwhere array array_wrap as_strided as_strided_copy
as_strided_scatter asin asinh atan atan2 atanh atleast_1d atleast_2d atleast_3d autocast autocast_to_full_precision
autocast_to_reduced_precision backward bernoulli bfloat16 bilinear binary_cross_entropy
binary_cross_entropy_with_logits binomial bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
bitwise_xor block_diag bool broadcast_tensors broadcast_to bucketize byte cauchy ccol_indices ccol_indices_copy
cdouble ceil celu cfloat chalf char choose_qparams_optimized chunk clamp clamp_max clamp_min
clear_non_serializable_cached_data clip clone coalesce coalesced col_indices col_indices_copy column_stack complex
conj conj_physical const_data_ptr constant_pad_nd contains contiguous copy copysign cos cosh cosine_embedding_loss cpu
cross cross_entropy crow_indices crow_indices_copy cuda data_ptr deepcopy deg2rad dense_dim dequantize detach
detach_copy diag diag_embed diagflat diagonal diagonal_copy diagonal_scatter digamma dim dimI dimV dim_order dist div
divide dlpack dlpack_device dot double dropout dropout1d dropout2d dropout3d dsmm dsplit element_size elu embedding
empty_like eq equal erf erfc erfinv exp exp2 expand expand_as expand_copy expm1 exponential
fake_quantize_per_channel_affine fake_quantize_per_tensor_affine fbgemm_linear_fp16_weight
fbgemm_linear_fp16_weight_fp32_activation fbgemm_linear_int8_weight fbgemm_linear_int8_weight_fp32_activation
fbgemm_linear_quantize_weight fbgemm_pack_gemm_matrix_fp16 fbgemm_pack_quantized_matrix feature_alpha_dropout
feature_dropout fill fill_diagonal fix float float_power floor floor_divide floordiv fmax fmin fmod format frac frexp
full_like fused_moving_avg_obs_fake_quant gaussian_nll_loss gcd ge gelu geometric ger get get_device greater
greater_equal gru_cell gt half hardshrink hardtanh has_names heaviside hinge_embedding_loss hsmm hsplit hspmm
huber_loss hypot i0 iadd iand idiv ifloordiv igamma igammac ilshift imag imod imul index index_put indices
indices_copy int int_repr invert ior ipu irshift is_coalesced is_complex is_conj is_contiguous is_distributed
is_floating_point is_inference is_neg is_nonzero is_pinned is_same_size is_set_to is_shared is_signed is_view isclose
isfinite isin isinf isnan isneginf isposinf isreal isub item ixor kl_div l1_loss lcm ldexp le leaky_relu len lerp less
less_equal lgamma linalg_cross linalg_diagonal linalg_vander linear linear_cross_entropy log log10 log1p log2
log_normal log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit long lshift lstm_cell
lt map map2 margin_ranking_loss masked_fill masked_select maximum meshgrid minimum miopen_rnn mish mod module_load
moveaxis movedim mse_loss mtia mul multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss multinomial
multiply mv mvlgamma nan_to_num native_dropout native_layer_norm ndimension ne neg negative nelement
nested_tensor_size nested_tensor_storage_offsets nested_tensor_strides nextafter nll_loss nnz nonzero normal not_equal
numel numpy one_hot ones_like or outer pairwise_distance permute permute_copy pin_memory poisson poisson_nll_loss
polar polygamma positive pow prelu q_per_channel_axis q_per_channel_scales q_per_channel_zero_points q_scale
q_zero_point qscheme quantize_per_channel quantize_per_tensor quantize_per_tensor_dynamic quantized_gru_cell
quantized_lstm_cell quantized_rnn_relu_cell quantized_rnn_tanh_cell rad2deg radd rand random ravel rdiv real
reciprocal record_stream reduce_ex refine_names register_hook register_post_accumulate_grad_hook relu relu6 remainder
rename repeat repeat_interleave repr requires_grad reshape reshape_as resize resize_as resize_as_sparse resolve_conj
resolve_neg retain_grad reversed rfloordiv rlshift rmod rmul rnn_relu_cell rnn_tanh_cell ror round row_indices
row_indices_copy row_stack rpow rrelu rrshift rshift rsqrt rsub rxor saddmm selu set setstate sgn share_memory short
sigmoid sign signbit silu sin sinc sinh size slice_copy slice_inverse smm smooth_l1_loss soft_margin_loss softplus
softshrink softsign sparse_dim sparse_mask sparse_mask_projection sparse_resize sparse_resize_and_clear
special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t
special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_digamma
special_entr special_erf special_erfc special_erfcx special_erfinv special_exp2 special_expit special_expm1
special_gammainc special_gammaincc special_gammaln special_hermite_polynomial_h special_hermite_polynomial_he
special_i0 special_i0e special_i1 special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p
special_log1p special_log_ndtr special_logit special_modified_bessel_i0 special_modified_bessel_i1
special_modified_bessel_k0 special_modified_bessel_k1 special_multigammaln special_ndtr special_ndtri
special_polygamma special_psi special_round special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
special_shifted_chebyshev_polynomial_w special_sinc special_spherical_bessel_j0 special_xlog1py special_xlogy
special_zeta split split_copy split_with_sizes split_with_sizes_copy sqrt square squeeze squeeze_copy sspaddmm stack
storage storage_offset storage_type sub subtract sum_to_size swapaxes swapdims sym_float sym_int sym_ite sym_max
sym_min sym_not sym_sqrt sym_sum t t_copy tan tanh tanhshrink tensor_split threshold to to_dense to_mkldnn to_sparse
tolist transpose transpose_copy tril triplet_margin_loss triplet_margin_with_distance_loss triu true_divide truediv
trunc type type_as uniform unravel_index unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze unsqueeze_copy
untyped_storage update_names values values_copy vdot view view_as view_as_complex view_as_complex_copy view_as_real
view_as_real_copy view_copy vsplit vstack where xlogy xor xpu zero zeros_like
"""
"""Of one position, of none, or of pieces that are taken by turns; judged one by one when a PyTorch brought them."""


@pytest.mark.filterwarnings("ignore")
def test_no_function_is_unknown() -> None:
    attention = GatheredAttention(SequenceParts(0, 2, None, is_balanced=True))
    checked = {function.__name__.strip("_") for function in PositionChecks(attention, lambda *_: None).of}
    known = {*checked, *OF_EACH_POSITION.split()}
    named = {function.__name__.strip("_") for among in get_overridable_functions().values() for function in among}
    assert [name for name in sorted(named - known) if not is_spanning(name) and not _ATTENDS.search(name)] == []


def test_functions_are_told_by_their_name() -> None:
    assert name_in_pytorch(torch.conv2d) == "conv2d"
    assert name_in_pytorch(torch.Tensor.inverse) == name_in_pytorch(torch.inverse) == "inverse"
    assert is_spanning("conv2d")
    assert not is_spanning("relu")


def test_a_function_of_anybody_else_is_not_ours_to_judge() -> None:
    def unfold() -> None: ...

    assert name_in_pytorch(unfold) == ""
