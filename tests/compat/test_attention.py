"""What is used of PyTorch's attention prototypes is there, and computes what it says, as far as a CPU goes.

Block masks are in tests/data/test_attention_mask.py. The kernel for many lengths runs on CUDA only:
tests/gpu/test_packed_attention.py.
"""

import inspect

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.utils.flop_counter import FlopCounterMode

from tests.api import causal_to_the_last_key


def test_the_kernel_for_many_lengths_takes_what_it_is_given() -> None:
    parameters = inspect.signature(varlen_attn).parameters
    assert list(parameters)[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert parameters["window_size"].default == (-1, -1)


def test_a_causal_bias_is_made_under_a_mode_that_sees_operations_and_counts_from_the_last_key() -> None:
    query, key = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 7, 4)
    with FlopCounterMode(display=False):
        found = F.scaled_dot_product_attention(query, key, key, causal_to_the_last_key(3, 7))
    mask = torch.ones(3, 7, dtype=torch.bool).tril(diagonal=4)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(query, key, key, mask))
