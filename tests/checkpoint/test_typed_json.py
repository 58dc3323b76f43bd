"""Typed JSON gives back the types and bits that it was given, refuses the rest by name, and runs nothing."""

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dream_trainer.checkpoint import typed_json

PLAIN_VALUES = [
    None,
    True,
    -(10**40),
    0.1,
    -0.0,
    math.inf,
    -math.inf,
    "naïve\n",
    b"\x00\xff",
    2 + 3j,
    [1, [2]],
    (),
    {1, 2},
    {1: "a", 2.5: "b", None: "c", (1, 2): "e", "1": "f"},
    {"$tuple": [1], "plain": 2},
    {},
    Counter({3: 2}),
    OrderedDict([("b", 1), ("a", 2)]),
    Path("/a/b"),
    datetime(2026, 11, 21, 4, 5, 6, 7),
    torch.bfloat16,
    torch.device("cuda", 3),
    np.float64(0.1),
    np.int8(-3),
    np.bool_(True),
    np.datetime64("2026-01-01"),
]


@pytest.mark.parametrize("value", PLAIN_VALUES, ids=repr)
def test_a_value_comes_back_equal_and_of_its_own_type(value: Any) -> None:
    text = typed_json.dumps(value)
    json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    back = typed_json.loads(text)
    assert back == value
    assert repr(back) == repr(value)
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (2, 0), (2, 3)])
def test_a_tensor_keeps_shape_dtype_and_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = (torch.randn(shape) * 3).to(dtype)
    back = typed_json.loads(typed_json.dumps(value))
    assert back.dtype == dtype
    assert back.shape == value.shape
    assert torch.equal(back, value)


def test_a_nan_with_a_payload_keeps_its_bits_in_tensors_and_arrays() -> None:
    bits = struct.pack("<I", 0x7FC12345)
    array = np.frombuffer(bits, np.float32)
    assert typed_json.loads(typed_json.dumps(array)).tobytes() == bits
    assert typed_json.loads(typed_json.dumps(torch.tensor(array.copy()))).numpy().tobytes() == bits


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        torch.nn.Linear(1, 1),
        torch.nn.Parameter(torch.zeros(1)),
        lambda: 1,
        Point(1, 2),
        np.array([object()]),
        np.zeros(1, dtype=[("a", "i4")]),
        torch.zeros(1, device="meta"),
        torch.zeros(2).to_sparse(),
        defaultdict(lambda: 1),
        int,
        torch.zeros(typed_json.MAX_ARRAY_BYTES // 4 + 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_type_that_cannot_be_kept_is_an_error_naming_its_place(value: Any) -> None:
    with pytest.raises(TypeError, match=r"callbacks\.ema\[0\]\[3\]\.model"):
        typed_json.dumps({"ema": [{3: {"model": value}}]}, name="callbacks")


def test_equal_sets_give_equal_text() -> None:
    one = typed_json.dumps({str(number) for number in range(50)})
    assert typed_json.dumps({str(number) for number in reversed(range(50))}) == one


@pytest.mark.pitfall(43)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "NaN",
        '{"$eval": "1"}',
        '{"$dtype": "torch.load"}',
        '{"$defaultdict": {"factory": "eval", "items": []}}',
        '{"$ndarray": {"dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="}}',
        '{"$ndarray": {"dtype": "<f4", "shape": [2], "data": "AAAA"}}',
        '{"$tensor": {"dtype": "torch.float32", "shape": [7], "data": "AAAAAA=="}}',
        "[" * 100_000,
    ],
)
def test_text_of_another_making_is_a_value_error_and_runs_nothing(text: str) -> None:
    with pytest.raises(ValueError):
        typed_json.loads(text)
