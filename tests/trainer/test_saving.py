"""How a run is saved: what a checkpoint holds while training goes on, what a busy or a broken writer does, and that
`register_state` goes on where it was, on other ranks too."""

import errno
import os
import threading
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import dream_trainer as dt
from dream_trainer.checkpoint import saver, store
from tests.api import CheckpointError, ConfigError, HookError, Snapshot, read_manifest, read_rank, read_shared
from tests.trainer import resumable, saves
from tests.trainer.arithmetic import full
from tests.trainer.small import Batch, run_ranks
from tests.worlds import run_world

# -- the checkpoint is of the moment of the request


class Remembers(dt.Callback):
    """Copies everything at the end of one step, and opens a gate some steps later."""

    order = 1000

    def __init__(self, gate: saves.Gate, at: int, open_at: int) -> None:
        self._gate, self._at, self._open_at = gate, at, open_at
        self._tensors: dict[str, Tensor] = {}
        self._shared: dict[str, Any] = {}

    def post_train_step(self, trainer: Any) -> None:
        if trainer.global_step == self._at:
            self._tensors = tensors_of(trainer)
            self._shared = {"schedulers": {"scheduler": trainer.scheduler.state_dict()}, "user": trainer.state_dict()}
        if trainer.global_step == self._open_at:
            self._gate.open()


def tensors_of(trainer: resumable.Resumable) -> dict[str, Tensor]:
    fqns: dict[Tensor, str] = {parameter: name for name, parameter in trainer.model.named_parameters()}
    found = {f"models.model.{name}": tensor for name, tensor in trainer.model.state_dict().items()}
    for parameter, state in trainer.optimizer.state.items():
        found |= {f"optimizers.optimizer.model.{fqns[parameter]}.{key}": value for key, value in state.items()}
    averages = trainer.get_callback(dt.EMA).averaged("model")
    found |= {f"callbacks.EMA.0.model.{name}": tensor for name, tensor in averages.items()}
    return {name: full(tensor).detach().clone() for name, tensor in found.items()}


def save_while_training(directory: str) -> dict[str, Any]:
    """Saves steps 4, 8 and 12; the writer of step 4 is held until step 7 is trained."""
    os.chdir(directory)
    gate = saves.Gate()
    remembers = Remembers(gate, at=4, open_at=7)
    config = resumable.make_config(
        "held",
        callbacks=[dt.EMA(0.9), remembers],
        checkpoint=dt.CheckpointParameters(save_every_n_steps=4, save_every_n_epochs=None),
        own={"workers": 0, "samples": 92, "drop_last": True},
    )
    trainer = resumable.Resumable(config)
    with saves.before_writing(lambda snapshot: gate.wait() if snapshot.step == 4 else None), trainer:
        trainer.fit()
        later = tensors_of(trainer)
    path = trainer.checkpoint_dir / "step_00000004"
    return {
        "expected": remembers._tensors,
        "later": later,
        "found": saves.all_tensors(path),
        "own": read_rank(path, trainer.world.rank)[1],
        "expected shared": remembers._shared,
        "shared": read_shared(path),
        "validations": dict(trainer.get_callback(resumable.History).state_dict()["validations"]),
        "metrics": {m.step: m.metrics for m in trainer.checkpoints()},
    }


def assert_of_its_moment(found: dict[str, Any]) -> None:
    held, expected = found["found"] | {n: t for n, t in found["own"].items() if n in found["found"]}, found["expected"]
    assert held.keys() == expected.keys()
    assert {name.split(".")[0] for name in held} == {"models", "optimizers", "callbacks"}
    assert {name.rsplit(".", 1)[1] for name in held} >= {"running_mean", "num_batches_tracked", "exp_avg_sq", "step"}
    assert [name for name in expected if not torch.equal(held[name], expected[name])] == []
    assert [name for name in expected if torch.equal(found["later"][name], expected[name])] == []
    for name, value in found["expected shared"].items():
        assert found["shared"][name] == value
    assert {4, 8} <= found["metrics"].keys() & found["validations"].keys()
    assert found["metrics"] == {step: found["validations"].get(step, {}) for step in found["metrics"]}


@pytest.mark.pitfall(31, 35)
def test_a_checkpoint_is_of_the_moment_it_was_asked_for_though_training_goes_on(tmp_path: Path) -> None:
    found = save_while_training(str(tmp_path))
    assert found["own"].keys().isdisjoint(found["found"])
    assert_of_its_moment(found)


def test_a_save_waits_for_the_one_before_it() -> None:
    running: set[int] = set()
    most: list[int] = []
    write = saver.write_checkpoint

    def slow(root: Path, snapshot: Snapshot, **options: Any) -> Path:
        running.add(snapshot.step)
        time.sleep(0.1)  # about the time of the whole epoch
        most.append(len(running))
        path = write(root, snapshot, **options)
        running.remove(snapshot.step)
        return path

    with mock.patch.object(saver, "write_checkpoint", slow):
        trainer = saves.run(save_every_n_steps=1)
    assert trainer.saved == saves.steps_of(trainer) == list(range(1, saves.STEPS + 1))
    assert most == [1] * saves.STEPS


class Opens(saves.Saves):
    """Opens a gate while it trains step 5; remembers when it was told of a checkpoint."""

    def __init__(self, config: saves.Config, gate: saves.Gate, **options: Any) -> None:
        super().__init__(config, **options)
        self.gate = gate
        self.told_at: list[tuple[int, int]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if self.global_step == 4:
            self.gate.open()
        return super().training_step(batch, batch_idx)

    def on_save(self, path: Path) -> None:
        super().on_save(path)
        self.told_at.append((self.global_step, self.saved[-1]))
        assert read_manifest(path).step == self.saved[-1]


def test_a_synchronous_save_is_on_the_disk_before_training_goes_on() -> None:
    trainer = saves.fit(Opens(saves.make_config(save_every_n_steps=2, async_save=False), saves.Gate()))
    assert trainer.told_at == [(2, 2), (4, 4), (6, 6)]


def test_save_checkpoint_replaces_that_of_the_step_by_the_run_as_it_is_now() -> None:
    class Shrinks(saves.Saves):
        def post_fit(self) -> None:
            self.fill(3.0)
            self.save_checkpoint()

        def fill(self, value: float) -> None:
            with torch.no_grad(), self.changing_weights():
                for parameter in self.model.parameters():
                    parameter.fill_(value)

        def of_the_checkpoint(self) -> set[float]:
            (manifest,) = self.checkpoints()
            assert manifest.metrics.keys() == {"val/loss"}  # of the validation of this step
            tensors = saves.all_tensors(manifest.path)
            return {float(value) for name in names for value in tensors[f"models.model.{name}"].view(-1)}

    with Shrinks(saves.make_config()) as trainer:
        trainer.fit()
        names = dict(trainer.model.named_parameters()).keys()
        assert trainer.saved == [saves.STEPS, saves.STEPS]
        assert trainer.of_the_checkpoint() == {3.0}
        trainer.fill(7.0)
        path = trainer.save_checkpoint()
        assert trainer.of_the_checkpoint() == {7.0}
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.pitfall(31)
def test_closing_waits_for_what_is_in_flight() -> None:
    class Broken(saves.Saves):
        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            if self.global_step == 3:
                raise KeyboardInterrupt  # a second Ctrl-C
            return super().training_step(batch, batch_idx)

    trainer = Broken(saves.make_config(save_every_n_steps=3))
    with saves.before_writing(lambda _: time.sleep(0.5)), pytest.raises(KeyboardInterrupt), trainer:
        trainer.fit()
    assert trainer.saved == saves.steps_of(trainer) == [3]


def disk_is_gone(path: Path, content: bytes) -> Any:
    raise OSError(errno.EIO, "Input/output error", str(path))


class Waits(saves.Saves):
    """Trains a step only when nothing is being written, so that what the writer did is heard right after it."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        saves.wait_for_writer()
        return super().training_step(batch, batch_idx)


@pytest.mark.pitfall(31)
def test_an_error_of_the_writer_is_raised_at_the_next_step_with_its_traceback() -> None:
    trainer = Waits(saves.make_config(save_every_n_steps=2, save_every_n_epochs=None))
    with (
        mock.patch.object(store, "write_file", disk_is_gone),
        pytest.raises(CheckpointError, match="of step 2") as info,
    ):
        saves.fit(trainer)
    assert len(trainer.losses) in (2, 3)  # the writer may fail before the next window begins
    text = "".join(traceback.format_exception(info.value))
    assert "in disk_is_gone" in text
    assert "Input/output error" in text
    assert trainer.saved == []
    assert saves.run().saved == [saves.STEPS]


def fail_on_rank_1() -> None:
    trainer = Waits(saves.make_config(save_every_n_steps=2), length=4 * saves.STEPS)
    broken = disk_is_gone if os.environ["RANK"] == "1" else store.write_file
    with mock.patch.object(store, "write_file", broken), trainer:
        trainer.fit()


@pytest.mark.pitfall(31)
def test_every_rank_raises_what_the_writer_of_one_did(tmp_path: Path) -> None:
    ranks = run_ranks("from tests.trainer.test_saving import fail_on_rank_1\nfail_on_rank_1()\n", 2, tmp_path)
    for status, text in ranks:
        assert status == 1
        assert "CheckpointError: Could not write the checkpoint of step 2" in text
        assert "rank 1: OSError: [Errno 5] Input/output error" in text
    assert any("in disk_is_gone" in text for _, text in ranks)  # one rank prints the traceback


def at_two(directory: str) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {"held": save_while_training(directory)}
    os.chdir(directory)

    def train(experiment: str, **checkpoint: Any) -> dict[str, Any]:
        gate, write = saves.Gate(), saver.write_checkpoint

        def write_and_wait(root: Path, snapshot: Snapshot, **options: Any) -> Path:
            path = write(root, snapshot, **options)
            if rank == 1 and (experiment, snapshot.step) == ("skip", 1):
                gate.wait()  # with nothing that holds rank 0's writer
            return path

        config = saves.make_config(experiment=experiment, training={"n_epochs": 2}, **checkpoint)
        trainer = Opens(config, gate, length=4 * saves.STEPS)
        with mock.patch.object(saver, "write_checkpoint", write_and_wait):
            saves.fit(trainer)
        return {"told": trainer.told_at, "saved": trainer.saved, "there": saves.steps_of(trainer), "seen": trainer.seen}

    found["skip"] = train("skip", save_every_n_steps=1, save_every_n_epochs=None, when_busy="skip")
    broken = threading.Event()

    def fail_once(path: Path, content: bytes) -> Any:
        if rank == 1 and not broken.is_set():
            broken.set()
            return disk_is_gone(path, content)
        return write(path, content)

    write = store.write_file
    with mock.patch.object(store, "write_file", fail_once):
        found["failing"] = train("failing", save_every_n_steps=4, save_every_n_epochs=None, on_save_error="warn")
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(at_two, 2, str(tmp_path_factory.mktemp("two")))


@pytest.mark.pitfall(31)
def test_each_rank_saves_its_shards_and_statistics_of_that_moment(two_ranks: list[dict[str, Any]]) -> None:
    one, two = (rank["held"] for rank in two_ranks)
    for found in (one, two):
        assert_of_its_moment(found)
    # The same on all ranks after a window, so none has its own.
    assert "models.model.batch_norm.running_mean" not in two["own"]
    name = "models.model.batch_norm.running_mean"
    assert torch.equal(one["found"][name], two["found"][name])


def test_ranks_skip_the_same_saves_while_the_writer_of_one_is_slow(two_ranks: list[dict[str, Any]]) -> None:
    one, two = (rank["skip"] for rank in two_ranks)
    assert one["saved"] == two["saved"] == one["there"]
    assert one["told"] == two["told"]
    assert one["saved"][0] == 1
    assert {2, 3, 4, 5}.isdisjoint(one["saved"])
    assert one["saved"][-1] == 2 * saves.STEPS
    assert len(set(one["saved"])) == len(one["saved"])


def test_a_save_that_failed_on_one_rank_is_passed_over_by_all(two_ranks: list[dict[str, Any]]) -> None:
    one, two = (rank["failing"] for rank in two_ranks)
    assert one["saved"] == two["saved"] == one["there"] == [8, 12]
    assert len(one["seen"]) == len(two["seen"]) == 2 * saves.STEPS


class Sums(dt.Callback):
    """Sums over the steps: of numbers equal on all ranks, of each rank's own, and of weights, sharded as they are."""

    def post_setup(self, trainer: saves.Saves) -> None:
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

    def post_train_step(self, trainer: saves.Saves) -> None:
        self.steps += trainer.global_step
        self.of_rank += 10**trainer.world.rank
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                self.weights[name] += parameter


def sums(experiment: str, max_steps: int, batch_size: int = 2) -> tuple[int, int, list[str], dict[str, torch.Tensor]]:
    callback = Sums()
    config = saves.make_config(experiment=experiment, callbacks=[callback], training={"max_steps": max_steps})
    with saves.Saves(config, batch_size=batch_size) as trainer:
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
    saves.fit(saves.Saves(saves.make_config(experiment="later", training={"max_steps": 2})))
    assert sums("later", 4)[:3] == (7, 2, [])


def test_mistakes_are_told() -> None:
    with saves.Saves(saves.make_config(training={"max_steps": 1})) as trainer:
        with pytest.raises(ConfigError, match=r"scope='all' is not known. Use 'shared', 'rank' or 'tensors'"):
            trainer.register_state("x", int, print, scope="all")  # type: ignore[arg-type]
        trainer.fit()
        with pytest.raises(HookError, match=r"register_state\('x'\) was called after the checkpoint was loaded"):
            trainer.register_state("x", int, print)
