"""Several trained models in one pipeline: those with blocks in stages of their own, small ones whole on each
rank, where their losses change what a loop by hand does."""

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, TensorDataset

import dream_trainer as dt
from dream_trainer.parallel.pipeline_stages import keep_only, number_lists
from tests.api import EMA, ConfigError, NumberedAsWhole, StepError, even_stages, mesh_lines, stages_of_models
from tests.trainer.arithmetic import full
from tests.trainer.small import fit, run_config, train_by_hand, weights
from tests.trainer.stages import (
    BATCH,
    BLOCKS,
    STEPS,
    VOCABULARY,
    WIDTH,
    Block,
    Case as OneModel,
    Model,
    Rows,
    Trained,
    config_of,
    count,
    mean_loss,
    united,
)
from tests.worlds import run_each, run_world


@dataclass(frozen=True)
class Case(OneModel):
    joint: bool = True
    """Whether the reader's loss trains the critic, too."""
    layers: int = 4
    """Blocks of the reader."""
    twice: bool = False
    """Whether the reader has two losses of each batch, and the critic has no part in them."""


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))


class Reader(nn.Module):
    """Reads scores; of fewer blocks than the model, and tied in its own way."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.enter, self.first = nn.Linear(VOCABULARY, WIDTH), Gain()
        self.layers = nn.ModuleList(Block(case) for _ in range(case.layers))
        self.last, self.head = Gain(), nn.Linear(WIDTH, VOCABULARY)
        if case.tied:
            self.last.weight = self.first.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.enter is not None:
            x = self.enter(x) * self.first.weight
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x * self.last.weight)


class Models(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model, self.reader = Model(case), Reader(case)
        self.critic = nn.Sequential(nn.Linear(VOCABULARY, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.teacher = Model(replace(case, tied=False)).requires_grad_(False)


def judged(critic: nn.Module, scores: Tensor, labels: Tensor) -> Tensor:
    return mean_loss(scores, labels) + (critic(scores.softmax(-1)) - 1)[labels != -100].square().mean()


def read(critic: nn.Module, scores: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), wanted.flatten(0, 1)) + critic(scores).square().mean()


def squared(values: Tensor, wanted: Tensor) -> Tensor:
    return (values - wanted).square().mean()


class Several(Trained):
    def configure_models(self) -> None:
        models = Models(self.config.case)
        self.model, self.reader, self.critic, self.teacher = models.children()

    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        self.reader_optimizer = torch.optim.SGD(self.reader.parameters(), lr=0.05, momentum=0.5)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=1e-2)
        self.initial = weights_of(self)

    def learn(self, batch: tuple[Tensor, Tensor]) -> None:
        tokens, labels = batch
        with torch.no_grad():
            wanted, scores = self.teacher(tokens).softmax(-1), self.model(tokens)
        with self.frozen(self.critic):
            of_model = self.forward_backward(self.model, (tokens,), labels, partial(judged, self.critic), weight=count)
        with self.frozen(*([] if self.config.case.joint else [self.critic])):
            losses = [
                self.forward_backward(self.reader, (part,), wanted, partial(read, self.critic), weight=len)
                for part in ([scores, scores / 2] if self.config.case.twice else [scores])
            ]
        of_reader = torch.stack(losses).mean()
        ones = torch.ones(len(tokens), 1, dtype=torch.float64)
        of_critic = self.forward_backward(self.critic, (scores[:, 0],), ones, squared, weight=len)
        for name, loss in {"model": of_model, "reader": of_reader, "critic": of_critic}.items():
            weight = count(labels) if name == "model" else len(tokens)
            self.log(f"{name} in {'training' if self.training else 'validation'}", loss, weight=weight)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        self.learn(batch)
        if not self.is_accumulating_gradients:
            turns = [(self.reader, self.reader_optimizer), (self.critic, self.critic_optimizer)]
            self.norms += [float(self.step(*turn)) for turn in [*turns, (self.model, self.optimizer)]]
        return {}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.learn(batch)
        return {}


def weights_of(trainer: Several) -> dict[str, Tensor]:
    return {f"{n}.{k}": value for n, model in trainer.named_models().items() for k, value in weights(model).items()}


def state_of(trainer: Several) -> dict[str, Tensor]:
    state = weights_of(trainer)
    names = {p: f"{n}.{k}" for n, model in trainer.named_models().items() for k, p in model.named_parameters()}
    for optimizer in (trainer.optimizer, trainer.reader_optimizer, trainer.critic_optimizer):
        for p, kept in optimizer.state.items():
            state |= {f"{k} of {names[p]}": full(v).clone() for k, v in kept.items() if isinstance(v, Tensor)}
    return state


def train(case: Case) -> dict[str, Any]:
    with Several(config_of(case)) as trainer:
        trainer.fit()
        found = {"norms": trainer.norms, "start": trainer.initial, "weights": weights_of(trainer)}
        return found | {"logged": trainer.logged, "described": mesh_lines(trainer._runtime)}


def by_hand(case: Case, start: dict[str, Tensor]) -> dict[str, Any]:
    """The same in one process: three losses of the whole batch, cut as ranks and micro-batches do, and three steps."""
    models = Models(case)
    models.load_state_dict(start, strict=False)
    model, reader, critic = models.model, models.reader, models.critic
    optimizers = [
        torch.optim.SGD(reader.parameters(), lr=0.05, momentum=0.5),
        torch.optim.Adam(critic.parameters(), lr=1e-2),
        torch.optim.AdamW(model.parameters(), lr=1e-2),
    ]
    data, parts = Rows(BATCH * STEPS), case.dp * case.accumulation * (case.microbatches or 2 * case.pp)
    losses, norms = [], []
    for first in range(0, len(data), BATCH):
        tokens, labels = data.tokens[first : first + BATCH], data.labels[first : first + BATCH]
        with torch.no_grad():
            wanted, scores = models.teacher(tokens).softmax(-1), model(tokens)
        chunks = list(zip(tokens.chunk(parts), labels.chunk(parts), strict=True))
        critic.requires_grad_(False)
        of_model = sum(judged(critic, model(a), b) * count(b) for a, b in chunks) / count(labels)
        of_model.backward()
        critic.requires_grad_(case.joint)
        inputs = [scores, scores / 2] if case.twice else [scores]
        of_reader = sum(read(critic, reader(part), wanted) for part in inputs) / len(inputs)
        of_reader.backward()
        critic.requires_grad_(True)
        of_critic = squared(critic(scores[:, 0]), torch.ones(BATCH, 1, dtype=torch.float64))
        of_critic.backward()
        losses.append([of_model.item(), of_reader.item(), of_critic.item()])
        for optimizer in optimizers:
            parameters = optimizer.param_groups[0]["params"]
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, case.clip or torch.inf).item())
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": weights(models)}


WORLD_2 = [
    Case(2, tied=True, joint=False, twice=True),
    Case(2, schedule="ZBVZeroBubble", accumulation=2, microbatches=2),
]
MORE_2 = [
    Case(2, schedule="GPipe", accumulation=2, microbatches=4),
    Case(2, schedule="DualPipeV", tied=True),
    Case(2, schedule="InterleavedZeroBubble", layers=2),
    Case(2, schedule="Interleaved1F1B", layers=2),  # too few for stages
    Case(2, compile=True),
]
WORLD_4 = [
    Case(2, dp=2, shard="auto", joint=False, accumulation=2, microbatches=2, twice=True),
    Case(2, dp=2, tied=True),
    Case(4, microbatches=4, layers=3),
    Case(2, dp=2, shard="auto", schedule="GPipe"),
    Case(2, dp=2, accumulation=2, microbatches=4, clip=None),
]


def check(case: Case, ranks: tuple[dict[str, Any], ...]) -> None:
    expected = by_hand(case, united([rank["start"] for rank in ranks]))
    for rank in ranks:
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-10), case
        names = [f"{name} in training" for name in ("model", "reader", "critic")]
        found = [[rank["logged"][step][name] for name in names] for step in range(1, STEPS + 1)]
        assert found == [pytest.approx(losses, rel=1e-10) for losses in expected["losses"]], case
    for name, value in united([rank["weights"] for rank in ranks]).items():
        whole = {"model.head.weight": "model.embedding.weight", "reader.last.weight": "reader.first.weight"}
        wanted = expected["weights"][whole.get(name, name) if case.tied else name]
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-10, msg=f"{case}: {name}")
    assert "| critic | - | each | all |" in ranks[0]["described"]
    assert ("| reader | - | each | all |" in ranks[0]["described"]) is (case.layers < 4)


def hop(case: Case, experiment: str, max_steps: int) -> dict[str, Any]:
    with Several(config_of(case, experiment, saves=True, callbacks=[EMA(decay=0.5)], max_steps=max_steps)) as trainer:
        trainer.fit()
        averages = {name: full(value) for name, value in trainer.get_callback(EMA).checkpoint_tensors().items()}
        for name in ("reader", "critic"):
            trainer.export(f"{experiment}-{name}-{max_steps}.safetensors", model=name)
        validated = {key: value for key, value in trainer.logged[max_steps].items() if "validation" in key}
        return {"state": state_of(trainer), "averages": averages, "norms": trainer.norms, "validated": validated}


class Careless(Several):
    """Calls a model in stages where another one's loss is, and hands gradients from model to model."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        tokens, labels = batch
        self.told: dict[str, str] = {}

        def through_the_reader(scores: Tensor, labels: Tensor) -> Tensor:
            with pytest.raises(StepError) as called:
                self.reader(scores)
            with pytest.raises(StepError) as without_gradients, torch.no_grad():
                self.reader(scores)
            with pytest.raises(StepError) as trained:
                self.forward_backward(self.reader, (scores,), labels, mean_loss, weight=count)
            named = {"called": called, "without gradients": without_gradients, "trained": trained}
            self.told |= {name: str(raised.value) for name, raised in named.items()}
            return mean_loss(scores, labels)

        scores = self.critic[0].weight.sum() * torch.ones(len(tokens), 6, VOCABULARY, dtype=torch.float64)
        for name, inputs, targets in (("inputs", scores, labels), ("targets", scores.detach(), scores)):
            with pytest.raises(StepError) as raised:
                self.forward_backward(self.reader, (inputs,), targets, mean_loss, weight=count)
            self.told[name] = str(raised.value)
        self.forward_backward(self.model, (tokens,), labels, through_the_reader, weight=count)
        self.step(self.model, self.optimizer)
        return {}


def be_careless() -> dict[str, str]:
    return fit(Careless(config_of(Case(2, clip=None), max_steps=1, val_every_n_epochs=None))).told


def test_losses_through_two_models_in_stages_are_refused() -> None:
    ranks = run_world(be_careless, 2)
    for told in ranks:
        for name in ("inputs", "targets"):
            assert "of self.reader was given inputs or targets that need gradients, as another model" in told[name]
    for name in ("called", "without gradients", "trained"):
        said = "self.reader, which is cut into stages by pipeline_parallel=2, was called in a loss or layer of self.mod"
        assert said in ranks[1][name]


def test_models_that_cannot_be_cut_are_named_with_what_to_do() -> None:
    models = Models(Case())
    named = dict(models.named_children())
    blocks: dict[nn.Module, Any] = {models.model: list(models.model.blocks), models.reader: list(models.reader.layers)}

    def stages_of(model: nn.Module, n_stages: int) -> Any:
        of = blocks.get(model, [])
        return even_stages(model, of, n_stages) if len(of) >= n_stages else None

    def cut(n_stages: int, stages_of: Any = stages_of) -> Any:
        return stages_of_models(named, stages_of, lambda model: blocks.get(model, []), n_stages)

    assert list(cut(4)) == [models.model, models.reader]
    assert list(cut(5)) == [models.model]
    with pytest.raises(ConfigError, match=f"Model has {BLOCKS} repeated blocks, .* Use at most {BLOCKS} stages"):
        cut(6)
    with pytest.raises(ConfigError, match=r"are self.model, self.reader, self.critic, and pipeline_stages returns N"):
        cut(2, lambda model, n_stages: None)
    models.critic[2].weight = models.reader.head.weight
    with pytest.raises(ConfigError, match=r"self.reader.head.weight and self.critic.2.weight are one parameter of two"):
        cut(2)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(WORLD_2, id="2 ranks"),
        pytest.param(MORE_2, id="2 ranks, further schedules", marks=pytest.mark.slow),
        pytest.param(WORLD_4, id="4 ranks", marks=pytest.mark.slow),
    ],
)
def test_several_models_are_trained_and_kept_as_in_one_process(cases: list[Case]) -> None:
    for case, ranks in run_each(train, cases[0].world_size, cases):
        check(case, ranks)
    first = hop(Case(tied=True), "hops", 2)
    hops = run_world(hop, cases[0].world_size, Case(2, cases[0].dp, cases[0].shard, tied=True), "hops", 3)
    last, unbroken = (hop(Case(tied=True), experiment, 4) for experiment in ("hops", "unbroken"))
    assert [*first["norms"], *hops[0]["norms"], *last["norms"]] == pytest.approx(unbroken["norms"], rel=1e-10)
    assert last["validated"] == pytest.approx(unbroken["validated"], rel=1e-10)
    assert len(last["validated"]) == 3
    for kind in ("state", "averages"):
        torch.testing.assert_close(last[kind], unbroken[kind], rtol=1e-9, atol=1e-9)
    state = united([hopped["state"] for hopped in hops])
    for name in ("reader", "critic"):
        for key, value in load_file(f"hops-{name}-3.safetensors").items():
            assert torch.equal(value, state[f"{name}.{key}"])


ROUNDS, SIZE, PARTS = 3, 8, 4
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
    return torch.randn(ROUNDS * SIZE, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


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


def train_adversaries() -> dict[str, tuple[list[float], tuple[State, State], tuple[State, State]]]:
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


def adversaries_by_hand(kind: str, of_critic: State, of_generator: State) -> tuple[list[float], State, State]:
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
    ranks = run_world(train_adversaries, 2)
    for kind in CRITICS:
        of_ranks = [of_rank[kind] for of_rank in ranks]
        whole = {name: value for _, (_, generator), _ in of_ranks for name, value in generator.items()}
        expected_norms, expected_critic, expected_generator = adversaries_by_hand(kind, of_ranks[0][1][0], whole)
        for norms, _, (critic, generator) in of_ranks:
            assert norms == pytest.approx(expected_norms, rel=1e-9), kind
            expected_part = {name: expected_generator[name] for name in generator}
            for found, expected in ((dict(critic), dict(expected_critic)), (dict(generator), expected_part)):
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=f"{kind}: {{}}".format)


def test_a_list_of_which_others_hold_layers_keeps_its_numbers_and_its_length() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    model.others = nn.ModuleList([nn.Linear(2, 2)])
    last, new = model.blocks[3], nn.Linear(2, 2)
    number_lists(model, [["others.0", "blocks.0", "blocks.1"], ["blocks.2", "blocks.3"]])
    keep_only(model, ["blocks.2", "blocks.3"])
    assert isinstance(model.blocks, NumberedAsWhole)
    assert len(model.others) == 0
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
