"""Memory: numbers of the system itself, and what is left behind when there is none."""

from typing import Any

import psutil
import pytest
import torch

from tests.api import GIB, Memory, memory_numbers
from tests.callbacks.recording import Logged, names, record
from tests.trainer.small import Batch, batches, fit, make_config


def test_host_memory_is_what_the_system_says() -> None:
    found, system = memory_numbers(torch.device("cpu")), psutil.Process().memory_info().rss / GIB
    assert found["resident"] == pytest.approx(system, rel=0.05)
    assert found["peak_resident"] >= 0.95 * found["resident"]


def test_it_logs_at_its_interval() -> None:
    recorder = record(Logged, batches(7), Memory(3))
    assert names(recorder, "memory") == ["memory/peak_resident", "memory/resident"]
    assert list(recorder.values("memory/resident")) == [3, 6]


def runs_out() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def asks_for_too_much() -> None:
    torch.empty(1 << 60)


@pytest.mark.parametrize("cause", [runs_out, asks_for_too_much])
def test_out_of_memory_leaves_a_snapshot(cause: Any, capsys: pytest.CaptureFixture[str]) -> None:
    class Greedy(Logged):
        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            if batch_idx == 2:
                cause()
            return super().training_step(batch, batch_idx)

    trainer = Greedy(make_config(callbacks=[Memory()], n_epochs=1), batches(4))
    with pytest.raises(RuntimeError):
        trainer.fit()
    path = trainer.run_dir / "memory" / "step_00000002_rank_0.txt"
    assert path.read_text().startswith("resident: ")
    assert f"[rank 0] out of memory: see {path}" in capsys.readouterr().err


def test_after_two_steps_it_prints_the_bytes_of_each_part(capsys: pytest.CaptureFixture[str]) -> None:
    class Averaged(Logged):
        def setup(self) -> None:
            self.model = torch.nn.Linear(3, 1).double()
            self.optimizer = torch.optim.AdamW(self.model.parameters())

    fit(Averaged(make_config(callbacks=[Memory()], max_steps=3), batches(3)))
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "float" in line]
    assert rows == [
        ["parameters", "32", "B", "float64"],
        ["gradients", "32", "B", "float64"],
        ["optimizer", "state", "64", "B", "float64,", "8", "B", "float32"],
    ]
