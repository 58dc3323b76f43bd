"""Averages of a GPU's weights in the host's memory: the same numbers, less of the device, and no wait within a step."""

import pytest
import torch

import dream_trainer as dt
from tests.gpu.test_training import Strict, config

pytestmark = pytest.mark.gpu


def test_an_average_on_the_host_is_the_devices_and_steps_do_not_wait(device: torch.device) -> None:
    beside, on_host = dt.EMA(0.9), dt.EMA(0.9, device="cpu", validate=False)
    parameters = config(device, steps=12)
    parameters.callbacks = dt.CallbackCollection([beside, on_host])
    with Strict(parameters) as trainer:
        trainer.fit()
        found, expected = on_host.averaged("model"), beside.averaged("model")
        for name, average in expected.items():
            assert found[name].device.type == "cpu"
            torch.testing.assert_close(found[name], average.cpu(), rtol=1e-6, atol=1e-7)
        weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        with on_host.averaged_weights():
            for name, p in trainer.model.named_parameters():
                assert torch.equal(p.detach().cpu(), found[name])
        assert all(torch.equal(p, weights[name]) for name, p in trainer.model.named_parameters())
