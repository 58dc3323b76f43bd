"""What the callback Memory says on a CUDA device, and the peak rate that utilisation is measured by."""

import pickle
import re

import pytest
import torch
import torch.nn as nn

import dream_trainer as dt
from tests.api import GIB, Memory, format_bytes, peak_flops
from tests.callbacks.recording import Logged, Recorder
from tests.trainer.small import Alone, batches, make_config

pytestmark = pytest.mark.gpu
CUDA = dt.DeviceParameters(device="cuda")


def test_it_tells_peaks_and_leaves_a_snapshot_of_the_allocations(cuda: torch.device) -> None:
    recorder, memory = Recorder(), Memory(1, history=1000)
    config = make_config(callbacks=[memory, recorder], log_every=1, n_epochs=1, devices=CUDA)
    with Logged(config, batches(2)) as trainer:
        trainer.fit()
        found = recorder.steps[2]
        assert found["memory/peak_allocated"] == pytest.approx(torch.cuda.max_memory_allocated() / GIB, rel=0.01)
        assert found["memory/peak_reserved"] >= found["memory/peak_allocated"]
        assert 0 <= found["memory/fragmentation"] <= 1
        with memory.snapshot().with_suffix(".pickle").open("rb") as file:
            assert pickle.load(file)["device_traces"][0]


def test_what_is_left_of_the_peak_is_all_else(cuda: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    class Wide(Alone):
        def setup(self) -> None:
            self.model = nn.Sequential(nn.Linear(3, 4096), nn.Linear(4096, 1)).double()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    torch.cuda.reset_peak_memory_stats()
    with Wide(make_config(max_steps=2, callbacks=[Memory()], devices=CUDA), batches(2, 32)) as trainer:
        trainer.fit()
    last = re.split(r"  +", capsys.readouterr().out.splitlines()[-1].strip())
    known = 4 * (3 * 4096 + 4096 + 4096 + 1) * 8 + 4 * 4
    peak = torch.cuda.max_memory_allocated()
    assert peak - known >= 32 * 4096 * 8  # the hidden layer's output
    assert last == ["all else at the peak", format_bytes(peak - known)]


def test_the_devices_peak_rate_is_known(cuda: torch.device) -> None:
    name = torch.cuda.get_device_name(cuda)
    assert peak_flops(name, torch.bfloat16), f"{name!r} is not in the table of peak_flops.py"
