"""The pages agree with the repository: file names, the setup order, the names of its interfaces, and what was measured
or worked out: the README's chart, and the sizes by the formulas that tests/examples/test_llama_costs.py counts."""

import math
import re

import pytest

from dream_trainer import DreamTrainer
from tests.api import AXES, CONFIGURE, SETUP, MixinHooks
from tests.docs.pages import ROOT
from tests.examples.launch import imported

ARCHITECTURE = [ROOT / "docs/architecture.md", *(ROOT / "docs/architecture").glob("*.md")]


def test_every_file_that_the_architecture_names_exists() -> None:
    text = "\n".join(page.read_text() for page in ARCHITECTURE)
    files = set(re.findall(r"[a-z_]+(?:/[a-z_]+)+\.py", text))
    folders = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*)/`", text))
    assert len(files) > 20
    missing = [
        found
        for found in sorted(files | folders)
        if not any((ROOT / at / found).exists() for at in ("dream_trainer", ""))
    ]
    assert not missing


def test_every_room_of_the_package_is_in_the_architecture() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    rooms = [path.parent.name for path in (ROOT / "dream_trainer").glob("*/*.py") if path.name != "__init__.py"]
    assert not [room for room in set(rooms) if f"| `{room}/` |" not in text]


def test_the_architecture_shows_the_setup_order_as_it_is() -> None:
    text = (ROOT / "docs/architecture/setup.md").read_text()
    axes = [(axis.name, axis.reason) for axis in AXES if axis.order is not None]
    stages = [*(stage[:2] for stage in CONFIGURE), *axes, *(stage[:2] for stage in SETUP)]
    assert "\n".join(f"| {stage} | {reason} |" for stage, reason in stages) in text


def test_the_api_page_names_everything_public_of_a_trainer() -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    listed = [cls.__doc__.partition("Attributes:")[2] for cls in DreamTrainer.__mro__ if cls.__doc__]
    attributes = {found for block in listed for found in re.findall(r"^ +(\w+): ", block, re.MULTILINE)}
    assert {"world", "global_step", "best"} <= attributes | set(dir(DreamTrainer))
    public = {name for name in dir(DreamTrainer) if not name.startswith("_")} | attributes
    assert not [found for found in sorted(public) if not re.search(rf"`[^`]*\b{found}\b[^`]*`|### {found}\b", text)]


def test_the_page_on_extending_lists_every_hook_that_mixins_share() -> None:
    text = (ROOT / "docs/extend.md").read_text()
    hooks = {name for name, value in vars(MixinHooks).items() if re.match(r"_[a-z]", name) and callable(value)}
    hooks -= {"_media_log"}
    listed = set(re.findall(r"`(_[a-z_]+)\(", text.partition("## The hooks")[2]))
    assert listed == hooks


def test_the_chart_is_drawn_from_the_measured_table() -> None:
    with imported("tools.overhead_chart") as tool:
        assert tool.CHART.read_text() == tool.chart(), "run tools/overhead_chart.py"
        table = tool.TABLE.read_text()
    shown = re.findall(r">(\d\.\d\d)<", tool.CHART.read_text())
    rows = [line for line in table.splitlines() if line.startswith(("| bare, map", "| everyday, map"))]
    expected = [sorted(re.findall(r"(\d\.\d\d) \(", row)) for row in rows]
    assert len(shown) == 10
    assert [shown[:5], shown[5:]] == expected


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
