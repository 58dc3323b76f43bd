"""The sizes of docs/memory-and-traffic.md follow its formulas, which tests/examples/test_llama_costs.py counts."""

import math
import re

import pytest

from tests.docs.pages import ROOT

SHAPES = {  # vocabulary, width, blocks, heads, heads of keys, hidden, tables of the vocabulary
    "1b": (128_256, 2048, 16, 32, 8, 8192, 1),
    "8b": (128_256, 4096, 32, 32, 8, 14_336, 2),
    "70b": (128_256, 8192, 80, 64, 8, 28_672, 2),
}
ROW = re.compile(
    r"^\| (\d+b) \| (\d+) \| (.+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.-]+) \| ([\d.]+) \|$",
    re.MULTILINE,
)


def test_the_sizes_worked_out_are_those_of_the_formulas() -> None:
    rows = ROW.findall((ROOT / "docs/memory-and-traffic.md").read_text())
    assert {row[0] for row in rows} == SHAPES.keys()
    for model, devices, mesh, positions, *said in rows:
        vocabulary, d, blocks, heads, key_heads, hidden, tables = SHAPES[model]
        n_b = 2 * d * d // heads * (heads + key_heads) + 3 * d * hidden + 2 * d
        n = blocks * n_b + tables * vocabulary * d + d
        sizes = {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", mesh)}
        assert math.prod(sizes.values()) == int(devices)
        c, t, p = (sizes.get(name, 1) for name in ("context_parallel", "tensor_parallel", "pipeline_parallel"))
        shards = sizes.get("dp_shard", 1) * c
        gathered = 0 if shards == 1 else 2 * (n / p if p > 1 else 2 * n_b) / t
        positions_of_blocks = 2 * blocks * int(positions) / c / t  # of a pipeline: of as many micro-batches as stages
        selective = 5 * d + 2 * key_heads * d // heads + 2 * hidden
        kept = [16 * n / (shards * t * p), gathered, positions_of_blocks * d, positions_of_blocks * selective]
        kept += [0 if shards == 1 else 4 * n / (t * p)]
        assert (said[3] == "-") == (c * t > 1)  # of what is gathered too there is no formula
        said[3] = said[3].replace("-", str(kept[3] / 2**30))
        assert [float(number) for number in said] == [pytest.approx(size / 2**30, abs=0.051) for size in kept], mesh
