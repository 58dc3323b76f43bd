"""PyTorch's functions that go over more than one position and are looked at by their name alone.

What is common is told by the dimension that it goes along (`position_checks.py`). Of these one cannot say, or hardly
anyone calls them in a model of sequences. `tests/modules/test_spanning_functions.py` knows all functions of PyTorch.
"""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

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
