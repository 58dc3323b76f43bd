"""A critic that each rank of a pipeline has whole: what its losses change is as in a loop written by hand."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, TensorDataset

import dream_trainer as dt
from tests.api import NumberedAsWhole, StepError
from tests.trainer.small import run_config, train_by_hand
from tests.worlds import run_world

STEPS, SIZE, PARTS = 3, 8, 4
CRITICS = {
    "plain": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)),
    "spectral norm": lambda: nn.Sequential(spectral_norm(nn.Linear(4, 8)), nn.ReLU(), spectral_norm(nn.Linear(8, 1))),
}
State = dict[str, Tensor]


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def models(kind: str) -> tuple[nn.Module, nn.Module]:
    return Generator().double(), CRITICS[kind]().double()


def data() -> Tensor:
    return torch.randn(STEPS * SIZE, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def fooled(given: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(given, torch.ones_like(given))


class Adversaries(dt.DreamTrainer):
    """The critic is stepped before the loss of the generator, which runs it once more."""

    kind: str

    def configure_models(self) -> None:
        self.generator, self.critic = models(self.kind)

    def configure_dataloaders(self) -> tuple[Any, None]:
        return DataLoader(TensorDataset(data()), SIZE), None

    def configure_optimizers(self) -> None:
        self.generator_optimizer = torch.optim.SGD(self.generator.parameters(), lr=0.1)
        self.critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.1)
        self.norms: list[float] = []
        self.initial = deepcopy((self.critic.state_dict(), self.generator.state_dict()))

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> dict[str, Any]:
        (noise,) = batch
        loss = fooled(self.critic(noise))
        # Autograd's own is no way that docs show, and what is there is taken once.
        loss.backward() if self.kind == "plain" else self.backward(loss)  # type: ignore[no-untyped-call]
        self.norms.append(float(self.step(self.critic, self.critic_optimizer)))
        with self.frozen(self.critic):
            self.forward_backward(self.generator, (noise,), noise, lambda made, _: fooled(self.critic(made)))
        self.norms.append(float(self.step(self.generator, self.generator_optimizer)))
        return {}


def train() -> dict[str, tuple[list[float], tuple[State, State], tuple[State, State]]]:
    results = {}
    for kind in CRITICS:
        config = run_config(
            kind,
            device_parameters=dt.DeviceParameters(device="cpu", pipeline_parallel=2),
            pipeline_parallel_parameters=dt.PipelineParallelParameters(microbatches=PARTS),
            training_parameters=dt.TrainingParameters(n_epochs=1, gradient_clip_norm=None),
        )
        with type(kind, (Adversaries,), {"kind": kind})(config) as trainer:
            trainer.fit()
            end = deepcopy((trainer.critic.state_dict(), trainer.generator.state_dict()))
            results[kind] = trainer.norms, trainer.initial, end
    return results


def by_hand(kind: str, of_critic: State, of_generator: State) -> tuple[list[float], State, State]:
    generator, critic = models(kind)
    critic.load_state_dict(of_critic)
    generator.load_state_dict(of_generator)
    step_generator, step_critic = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic))
    norms = []
    for noise in data().split(SIZE):
        norms += train_by_hand(critic, step_critic, [[noise]], lambda model, part: fooled(model(part)))
        critic.requires_grad_(False)
        parts = noise.chunk(PARTS)
        norms += train_by_hand(generator, step_generator, [parts], lambda model, part: fooled(critic(model(part))))
        critic.requires_grad_(True)
    return norms, critic.state_dict(), generator.state_dict()


def test_a_critic_is_that_of_a_loop_by_hand_on_all_ranks() -> None:
    ranks = run_world(train, 2)
    for kind in CRITICS:
        of_ranks = [of_rank[kind] for of_rank in ranks]
        whole = {name: value for _, (_, generator), _ in of_ranks for name, value in generator.items()}
        expected_norms, expected_critic, expected_generator = by_hand(kind, of_ranks[0][1][0], whole)
        for norms, _, (critic, generator) in of_ranks:
            assert norms == pytest.approx(expected_norms, rel=1e-9), kind
            expected_part = {name: expected_generator[name] for name in generator}
            for found, expected in ((dict(critic), dict(expected_critic)), (dict(generator), expected_part)):
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=f"{kind}: {{}}".format)


def test_a_list_of_which_others_hold_layers_keeps_its_numbers_and_its_length() -> None:
    from dream_trainer.parallel.pipeline_stages import keep_only, number_lists

    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    last, new = model.blocks[3], nn.Linear(2, 2)
    number_lists(model, [["blocks.0", "blocks.1"], ["blocks.2", "blocks.3"]])
    keep_only(model, ["blocks.2", "blocks.3"])
    assert isinstance(model.blocks, NumberedAsWhole)
    model.blocks[2] = new
    assert list(model.blocks) == [new, last]
    assert list(reversed(model.blocks)) == [last, new]
    assert list(dict(model.named_parameters())) == [f"blocks.{n}.{kind}" for n in (2, 3) for kind in ("weight", "bias")]
    with pytest.raises(IndexError, match=r"blocks\[0\] is in stage 0"):
        model.blocks[0] = new
    for change in (
        lambda: model.blocks.append(new),
        lambda: model.blocks.extend([new]),
        lambda: model.blocks.insert(0, new),
        lambda: model.blocks.pop(2),
    ):
        with pytest.raises(StepError, match="none can be added or removed"):
            change()
    assert list(model.blocks) == [new, last]
