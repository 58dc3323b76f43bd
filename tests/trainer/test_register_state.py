"""`register_state`: what a callback keeps beside the trainer goes on where it was, on other ranks too."""

import pytest
import torch

import dream_trainer as dt
from tests.api import ConfigError, HookError
from tests.trainer.arithmetic import full
from tests.trainer.saves import Saves, fit, make_config
from tests.worlds import run_world


class Sums(dt.Callback):
    """Sums over the steps: of numbers equal on all ranks, of each rank's own, and of weights, sharded as they are."""

    def post_setup(self, trainer: Saves) -> None:
        self.steps, self.of_rank = 0, 0
        self.weights = {name: torch.zeros_like(p) for name, p in trainer.model.named_parameters()}
        self.loaded: list[str] = []
        trainer.register_state("steps", lambda: self.steps, self.load_steps)
        trainer.register_state("of rank", lambda: {"sum": self.of_rank}, self.load_of_rank, scope="rank")
        trainer.register_state("weights", lambda: self.weights, self.load_weights, scope="tensors")

    def load_steps(self, saved: int) -> None:
        self.steps = saved
        self.loaded.append("steps")

    def load_of_rank(self, saved: dict[str, int]) -> None:
        self.of_rank = saved["sum"]
        self.loaded.append("of rank")

    def load_weights(self, saved: dict[str, torch.Tensor]) -> None:
        assert saved is self.weights
        self.loaded.append("weights")

    def post_train_step(self, trainer: Saves) -> None:
        self.steps += trainer.global_step
        self.of_rank += 10**trainer.world.rank
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                self.weights[name] += parameter


def sums(experiment: str, max_steps: int, batch_size: int = 2) -> tuple[int, int, list[str], dict[str, torch.Tensor]]:
    callback = Sums()
    config = make_config(experiment=experiment, callbacks=[callback], training={"max_steps": max_steps})
    with Saves(config, batch_size=batch_size) as trainer:
        trainer.fit()
        return callback.steps, callback.of_rank, callback.loaded, {n: full(t) for n, t in callback.weights.items()}


def test_registered_state_goes_on_where_it_was_on_as_many_ranks_and_on_others() -> None:
    straight = run_world(sums, 2, "straight", 6)
    run_world(sums, 2, "stopped", 4)
    again = run_world(sums, 2, "stopped", 6)
    assert [(one[0], one[1]) for one in straight] == [(21, 6), (21, 60)]
    for one, other in zip(straight, again, strict=True):
        assert one[:2] == other[:2]
        assert all(torch.equal(one[3][name], other[3][name]) for name in one[3])
    assert [one[2] for one in again] == [["steps", "weights", "of rank"]] * 2

    run_world(sums, 2, "two and one", 4)
    alone = sums("two and one", 6, batch_size=4)
    assert alone[:3] == (21, 2, ["steps", "weights"])  # what each of two ranks had is nobody's on one
    torch.testing.assert_close(alone[3], straight[0][3])


def test_without_it_in_the_checkpoint_nothing_is_loaded() -> None:
    fit(Saves(make_config(experiment="later", training={"max_steps": 2})))
    assert sums("later", 4)[:3] == (7, 2, [])


def test_mistakes_are_told() -> None:
    with Saves(make_config(training={"max_steps": 1})) as trainer:
        with pytest.raises(ConfigError, match=r"scope='all' is not known. Use 'shared', 'rank' or 'tensors'"):
            trainer.register_state("x", int, print, scope="all")  # type: ignore[arg-type]
        trainer.fit()
        with pytest.raises(HookError, match=r"register_state\('x'\) was called after the checkpoint was loaded"):
            trainer.register_state("x", int, print)
