"""Profiler: which steps are in the trace files, read as any viewer would."""

import gzip
import json
from typing import Any

import pytest

import dream_trainer as dt
from tests.api import ConfigError, Profiler
from tests.trainer.small import Alone, Batch, batches, fit, make_config

# PyTorch says so where no step is left to warm up in.
pytestmark = pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")


def traces(trainer: Any) -> dict[str, list[str]]:
    """Names of all events of each trace file."""
    found = {}
    for path in sorted((trainer.run_dir / "profiles").glob("*")):
        with gzip.open(path, "rt") as file:
            found[path.name] = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    return found


def steps_in(events: list[str]) -> int:
    """Backward passes, one for each step of these tests; each is an operation of its own in the trace."""
    return events.count("autograd::engine::evaluate_function: MseLossBackward0")


def run(*profilers: Profiler) -> Alone:
    return fit(Alone(make_config(callbacks=profilers, n_epochs=1), batches(8)))


@pytest.mark.parametrize(
    "options", [{}, {"warm_up_steps": 0}, {"profile_memory": True, "record_shapes": True}], ids=str
)
def test_the_chosen_steps_are_in_the_trace(options: dict[str, Any]) -> None:
    ((name, events),) = traces(run(Profiler(3, 4, **options))).items()
    assert name == "step_00000003_rank_0.json.gz"
    assert steps_in(events) == 4
    assert ("[memory]" in events) == bool(options.get("profile_memory"))


def test_several_profilers_record_one_after_the_other() -> None:
    found = traces(run(Profiler(2, 1), Profiler(5, 2)))
    assert {name: steps_in(events) for name, events in found.items()} == {
        "step_00000002_rank_0.json.gz": 1,
        "step_00000005_rank_0.json.gz": 2,
    }


def test_two_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="two Profilers record steps 2 and 4 at once"):
        run(Profiler(2, 3), Profiler(4, 1))


def test_a_run_that_fails_writes_what_it_has_and_ends_the_profile() -> None:
    class Fails(Alone):
        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            if batch_idx == 4:
                raise RuntimeError("on purpose")
            return super().training_step(batch, batch_idx)

    trainer = Fails(make_config(callbacks=[Profiler(3, 100)], n_epochs=1), batches(8))
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit()
    ((_, events),) = traces(trainer).items()
    assert steps_in(events) == 2
    run(Profiler(1, 1))  # which a profile left running would not let start


class Saves(Alone, dt.CheckpointMixin):
    """Goes on where its last run ended."""


def run_until(step: int, profiler: Profiler) -> Saves:
    saves = dt.CheckpointParameters(async_save=False)
    return fit(Saves(make_config(callbacks=[profiler], max_steps=step, checkpoint=saves), batches(8)))


@pytest.mark.parametrize("done", [3, 4], ids=["in the warm-up", "right before the first step"])
def test_a_run_that_resumes_before_the_chosen_steps_records_them(done: int) -> None:
    assert run_until(done, Profiler(100)).global_step == done
    ((name, events),) = traces(run_until(8, Profiler(5, 2, warm_up_steps=3))).items()
    assert name == "step_00000005_rank_0.json.gz"
    assert steps_in(events) == 2
