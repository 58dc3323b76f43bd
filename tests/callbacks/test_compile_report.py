"""CompileReport: what it prints of runs whose blocks break in places that are known."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss

import dream_trainer as dt
from dream_trainer.callbacks import CompileReport
from dream_trainer.callbacks.compile_report import Finding, graph_break

Batch = tuple[Tensor, Tensor]


class Reads(nn.Module):
    """A block that asks the host for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:  # line: begin
        self.linear(x).sum().item()  # line: read
        return x + self.linear(x)


class Branches(Reads):
    """A block of which nothing can be compiled: it breaks in a loop."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            if x.sum() > 0:  # line: branch
                x = self.linear(x)
        return x


class Counts(Reads):
    """A block that is compiled anew at each call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:  # line: count
        self.calls += 1
        return x * self.calls + self.linear(x)


def line(mark: str) -> str:
    """Where in this file a line is marked."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(i for i, text in enumerate(lines, start=1) if text.endswith(f'# line: {mark}'))}"


class Run(dt.BaseTrainer, dt.SetupMixin, dt.CompileMixin):
    block: type[nn.Module] = Reads
    sizes = (4, 4, 4)

    def configure_models(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 3), nn.ModuleList(self.block() for _ in range(2)))

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return [(torch.ones(size, 3), torch.ones(size, 3)) for size in self.sizes], [(torch.ones(4, 3),) * 2]

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

    def loss(self, batch: Batch) -> Tensor:
        first, blocks = self.model
        x = first(batch[0])
        for block in blocks:
            x = block(x)
        return mse_loss(x, batch[1])

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.backward(self.loss(batch))
        self.step(self.model, self.optimizer)
        return {}

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.loss(batch)}


def printed(cls: type[Run], *, compile: bool = True) -> str:
    torch._dynamo.reset()
    file = io.StringIO()
    config = dt.DreamTrainerConfig(
        project="tests",
        group="compile",
        experiment="report",
        callbacks=dt.CallbackCollection([CompileReport(file=file)]),
        device_parameters=dt.DeviceParameters(device="cpu", compile=compile),
        training_parameters=dt.TrainingParameters(n_epochs=1, val_every_n_steps=2),
        compile_parameters=dt.CompileParameters(backend="eager"),
    )
    with cls(config) as trainer:
        trainer.fit()
    return file.getvalue()


def rows(text: str) -> list[list[str]]:
    """Titles and lines of the tables, without their headers, cell by cell."""
    cells = [re.split(r"  +", text_line.strip()) for text_line in text.splitlines()]
    return [row for row in cells if row[0] != "what"]


def test_graphs_and_breaks_are_told_after_the_first_step_that_compiles_nothing_and_then_what_is_new(
    capfd: pytest.CaptureFixture[str],
) -> None:
    first, broken, second, broken_again, *again = rows(printed(Run))
    assert first == ["compiled until step 2: 2 graphs, 1 graph break, 0 recompilations"]
    assert broken[:3] == ["graph break", "1x", line("read")]
    assert "item()" in broken[3]
    # The validation after step 2 runs without gradients.
    assert second == ["more compiled until step 3: 2 graphs, 1 graph break, 2 recompilations"]
    assert broken_again == broken
    assert again == [["recompilation", "1x", line(at), "GLOBAL_STATE changed: grad_mode"] for at in ("begin", "read")]
    assert "Graph break in user code" not in capfd.readouterr().err


def test_a_function_that_is_not_compiled_at_all_is_told_as_such() -> None:
    class Eager(Run):
        block = Branches

    title, broken, *_ = rows(printed(Eager))
    assert title == ["compiled until step 2: 0 graphs, 1 graph break, 0 recompilations"]
    assert broken[:3] == ["graph break", "1x", line("branch")]
    assert re.match(r"Data-dependent branching: .*\(the function runs eagerly\)$", broken[3])


def test_a_function_that_is_given_up_is_told_and_what_is_left_at_the_end() -> None:
    class Again(Run):
        block = Counts
        sizes = (4, 4)

    with torch._dynamo.config.patch(recompile_limit=1):
        title, *again = rows(printed(Again))
    assert title == ["compiled until step 2: 1 graph, 0 graph breaks, 1 recompilation"]
    assert [row[2] for row in again] == [line("count")]
    assert re.search(r"calls.*\(the function runs eagerly\)$", again[0][3])


def test_a_run_without_compilation_says_so_in_one_line() -> None:
    text = printed(Run, compile=False)
    assert text == "nothing was compiled. device_parameters.compile=True compiles the blocks of the models\n"


SKIPPED = """Graph break: torch.compile cannot properly resume from this graph break, which results in a skip.
torch.compile will skip tracing the frame f (m.py line 3) and fall back to eager.
The graph break occurred in the following user code:
  File "a.py", line 1, in f
    g()
  File "b.py", line 2, in g
    h()
Bad thing
  Explanation: Not done.
  Hint: Leave it.
"""


@pytest.mark.parametrize(
    ("text", "where", "why"),
    [
        ("Graph break in user code at m.py:7\nGraph Break Reason: Odd.\nUser code traceback:\n", "m.py:7", "Odd."),
        (SKIPPED, "b.py:2", "Bad thing: Not done. (the function runs eagerly)"),
        ("Something else", "unknown", ""),
    ],
)
def test_other_forms_of_pytorchs_message_are_read_too(text: str, where: str, why: str) -> None:
    assert graph_break(text) == Finding("graph break", where, why)
