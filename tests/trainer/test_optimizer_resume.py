"""Optimizers resume with all that they keep, wherever they keep it, as a loop by hand goes on."""

import os
from collections.abc import Iterator, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import dream_trainer as dt
from tests.api import CheckpointError, DistributedDataLoader
from tests.trainer import small
from tests.trainer.arithmetic import same_bits
from tests.trainer.optimizers_with_state import EXACT, OF_EACH_RANK, Build
from tests.trainer.saves import make_config
from tests.trainer.small import Samples, batches, by_hand, weights
from tests.worlds import run_world

GLOBAL_BATCH, STOP, LAST = 4, 3, 6
ALL = EXACT | OF_EACH_RANK
ON_REPLICAS = ["lookahead", "of each rank"]
ON_SHARDS = ["lookahead", "nested", "of each rank"]
ON_OTHER_RANKS = ["lookahead", "nested"]
Weights = dict[str, Tensor]


class Sharded(small.Sharded, dt.CheckpointMixin):
    """On one process, or on shards."""


class Replicated(small.Spread, dt.CheckpointMixin):
    """On replicas."""


def train(kind: type[Any], build: Build, experiment: str, steps: int, **checkpoint: Any) -> Weights:
    config = make_config(
        experiment=experiment, training={"max_steps": steps}, **{"save_every_n_epochs": None} | checkpoint
    )
    batch = GLOBAL_BATCH // int(os.environ.get("WORLD_SIZE", "1"))
    with kind(config, DistributedDataLoader(Samples(GLOBAL_BATCH * LAST), batch), make_optimizer=build) as trainer:
        trainer.fit()
        return weights(trainer.model)


def expected(build: Build) -> Weights:
    return weights(by_hand([[batch] for batch in batches(LAST, GLOBAL_BATCH)], make_optimizer=build))


def assert_close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def resume(kind: type[Any], name: str, experiment: str) -> Weights:
    return train(kind, ALL[name], experiment, LAST, resume="latest")


def straight_and_resumed(kind: type[Any], name: str) -> tuple[Weights, Weights]:
    experiment = f"{name} {kind.__name__}"
    straight = train(kind, ALL[name], f"{experiment} straight", LAST)
    train(kind, ALL[name], experiment, STOP)
    return straight, resume(kind, name, experiment)


@pytest.mark.pitfall(96)
@pytest.mark.parametrize("name", ALL)
def test_one_process_goes_on_with_all_that_its_optimizer_keeps(name: str) -> None:
    straight, resumed = straight_and_resumed(Sharded, name)
    assert_close(straight, expected(ALL[name]))
    assert same_bits(resumed, straight)


class TwoRanks(NamedTuple):
    straight: dict[str, dict[str, Weights]]
    resumed: dict[str, dict[str, Weights]]
    from_one: dict[str, Weights]


def train_on_two(directory: str) -> TwoRanks:
    os.chdir(directory)
    found = TwoRanks({}, {}, {})
    for kind, names in ((Sharded, ON_SHARDS), (Replicated, ON_REPLICAS)):
        pairs = {name: straight_and_resumed(kind, name) for name in names}
        found.straight[kind.__name__] = {name: straight for name, (straight, _) in pairs.items()}
        found.resumed[kind.__name__] = {name: resumed for name, (_, resumed) in pairs.items()}
    for name in ON_SHARDS:
        train(Sharded, ALL[name], f"{name} to one", STOP)
    for name in ON_OTHER_RANKS:
        found.from_one[name] = resume(Sharded, name, f"{name} from one")
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with chdir(place := tmp_path_factory.mktemp("runs")):
        yield place


@pytest.fixture(scope="module")
def two_ranks(directory: Path) -> list[TwoRanks]:
    for name in ON_OTHER_RANKS:
        train(Sharded, ALL[name], f"{name} from one", STOP)
    return run_world(train_on_two, 2, str(directory))


@pytest.mark.pitfall(63, 96)
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "Sharded") for name in ON_SHARDS), *((name, "Replicated") for name in ON_REPLICAS)]
)
def test_two_ranks_go_on_with_all_that_their_optimizer_keeps(two_ranks: list[TwoRanks], name: str, kind: str) -> None:
    for rank in two_ranks:
        assert same_bits(rank.resumed[kind][name], rank.straight[kind][name])
        if name in EXACT or kind == "Replicated":
            assert_close(rank.straight[kind][name], expected(ALL[name]))


def test_ranks_that_keep_state_of_their_own_differ_from_one_process(two_ranks: list[TwoRanks]) -> None:
    """Otherwise the tests above would not notice one rank's state on both."""
    found, alone = two_ranks[0].straight["Sharded"]["of each rank"], expected(ALL["of each rank"])
    assert max(float((found[name] - value).abs().max()) for name, value in alone.items()) > 1e-4


@pytest.mark.pitfall(96)
@pytest.mark.parametrize("name", ON_OTHER_RANKS)
def test_another_number_of_ranks_goes_on_where_state_can_be_divided(
    two_ranks: list[TwoRanks], directory: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    assert_close(resume(Sharded, name, f"{name} to one"), expected(ALL[name]))
    for rank in two_ranks:
        assert_close(rank.from_one[name], expected(ALL[name]))


@pytest.mark.pitfall(63)
@pytest.mark.usefixtures("two_ranks")
def test_state_of_each_rank_is_refused_on_another_mesh(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    name = "of each rank"
    with pytest.raises(
        CheckpointError,
        match=r"each rank has separate state in optimizer 'optimizer' \(model\.0\.0\.0\..*optimizer=\"new\"",
    ):
        resume(Sharded, name, f"{name} to one")


class Unsavable(torch.optim.SGD):
    """Keeps something that no checkpoint holds, from the first step on or from the beginning."""

    def __init__(self, parameters: Any, *, at_once: bool) -> None:
        super().__init__(parameters, lr=0.1)
        self.keeps = object()
        if at_once:
            self._keep()

    def step(self, closure: Any = None) -> None:
        self._keep()
        super().step()

    def _keep(self) -> None:
        self.state[self.param_groups[0]["params"][0]]["list"] = [{"deep": self.keeps}]


@pytest.mark.parametrize(("at_once", "steps"), [(True, 0), (False, 1)])
def test_state_that_cannot_be_saved_is_found_when_it_is_there(at_once: bool, steps: int) -> None:
    config = make_config(training={"max_steps": LAST})
    data = DistributedDataLoader(Samples(GLOBAL_BATCH * LAST), GLOBAL_BATCH)
    trainer = Sharded(config, data, make_optimizer=lambda model: Unsavable(model.parameters(), at_once=at_once))
    with (
        trainer,
        pytest.raises(CheckpointError, match=r"state\.model\.0\.0\.0\.weight\.values\.list\[0\]\.deep: <class"),
    ):
        trainer.fit()
    assert len(trainer.losses) == steps
