"""A trainer that an exception or Ctrl-C interrupted, in a program that goes on: a notebook, a prompt, a script that
catches it. And signal handlers of the user's own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import dream_trainer as dt
from tests.api import CheckpointError, NonFiniteError, StepError
from tests.trainer import small


class Evaluates(small.Validates, small.Spread, dt.EvalMixin, dt.CheckpointMixin, dt.LoggerMixin):
    fails_in = "nothing"
    fails_at = 2

    def fail(self, place: str) -> None:
        if place == self.fails_in and self.global_step == self.fails_at:
            self.fails_in = "nothing"
            raise KeyError("the cause")

    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        self.fail("step")
        result = super().training_step(batch, batch_idx)
        self.fail("end of step")
        return result

    def post_train_step(self) -> None:
        self.fail("event")

    def validation_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        self.fail("validation")
        return super().validation_step(batch, batch_idx)


@pytest.mark.pitfall(87)
@pytest.mark.parametrize(("place", "at", "accumulation"), [("step", 2, 2), ("event", 3, 1), ("validation", 4, 1)])
def test_after_an_exception_evaluate_works_and_fit_goes_on(place: str, at: int, accumulation: int) -> None:
    config = small.make_config(n_epochs=2, gradient_accumulation_steps=accumulation)
    data = torch.utils.data.DataLoader(small.Samples(8), batch_size=2)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with Evaluates(config, data, small.batches(1)) as trainer:
        trainer.fails_in, trainer.fails_at = place, at
        with pytest.raises(KeyError, match="the cause"):
            trainer.fit()
        assert torch.is_grad_enabled()
        assert all(module.training for module in (trainer, *trainer.model.modules()))
        if place == "step":
            before = small.weights(trainer.model)
            assert trainer.evaluate().keys() == {"val/loss"}
            small.assert_same_weights(small.weights(trainer.model), before)
        trainer.fit()
        assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        assert trainer.current_epoch == 2
        windows = [small.batches(4)[i : i + accumulation] for i in range(0, 4, accumulation)] * 2
        small.assert_same_weights(small.weights(trainer.model), small.by_hand(windows))
        assert len(trainer.history_of("val/loss")) == 2


@pytest.mark.pitfall(87)
def test_after_an_exception_between_a_step_and_its_count_fit_says_what_to_do_and_evaluate_works() -> None:
    trainer = Evaluates(small.make_config(n_epochs=1), small.batches(4), small.batches(1))
    trainer.fails_in = "end of step"
    with pytest.raises(KeyError):
        trainer.fit()
    assert trainer.evaluate().keys() == {"val/loss"}
    for call in (trainer.fit, trainer.save_checkpoint):
        with pytest.raises(StepError, match="in the middle of a step|inside an accumulation window"):
            call()
    trainer.close()


def test_after_gradients_that_were_not_finite_fit_does_not_go_on() -> None:
    train = small.batches(4)
    train[1][0].fill_(float("nan"))
    with Evaluates(small.make_config(n_epochs=1), train, small.batches(1)) as trainer:
        with pytest.raises(NonFiniteError):
            trainer.fit()
        trainer.evaluate()
        with pytest.raises(StepError, match="gradients that were not finite"):
            trainer.fit()


def test_of_two_trainers_of_one_run_the_one_that_another_has_trained_past_writes_nothing() -> None:

    def built(n_epochs: int) -> Evaluates:
        config = small.make_config(n_epochs=n_epochs, checkpoint=dt.CheckpointParameters(save_at_end=True))
        return Evaluates(config, small.batches(4), small.batches(1))

    def files() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}

    with built(1) as first, built(3) as second:
        first.fit()
        second.evaluate()  # resumes, and trains nothing
        first.set_limits(n_epochs=2)
        first.fit()
        with pytest.raises(CheckpointError, match="another trainer of this process has trained .* this one again"):
            second.fit()
        small.fit(built(3))
        written, message = files(), "has trained runs/.* since this one did, whose state is older"
        first.set_limits(n_epochs=4)
        for call in (first.save_checkpoint, first.fit):
            with pytest.raises(CheckpointError, match=message):
                call()
        assert first.evaluate().keys() == {"val/loss"}
        assert files() == written
        first.load_checkpoint(first.checkpoints()[-1].path)
        first.fit()
        small.assert_same_weights(
            small.weights(first.model), small.by_hand([[batch] for batch in small.batches(4)] * 4)
        )


PROMPT = """
import os, signal, sys
from tests.trainer.small import *
from tests.trainer.test_notebook import *
class Presses(Evaluates):
    def training_step(self, batch, batch_idx):
        if self.global_step == 2 and not {waits}: os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch, batch_idx)

class Waits(Samples):
    def __getitem__(self, index):
        if index == 5 and {waits} and not os.path.exists("waited"):
            open("waited", "w").close(); os.kill(os.getpid(), signal.SIGINT)
        return super().__getitem__(index)

config = make_config(n_epochs=2, checkpoint=dt.CheckpointParameters(save_every_n_epochs=None))
trainer = Presses(config, torch.utils.data.DataLoader(Waits(8), batch_size=2), batches(1))
trainer.fit()
print("returned at", trainer.global_step, sorted(trainer.evaluate()))
print("saved", [found.step for found in trainer.checkpoints()])
trainer.fit()
print("ended at", trainer.global_step, trainer.history_of("val/loss")[-1][0])
assert_same_weights(weights(trainer.model), by_hand([[batch] for batch in batches(4)] * 2))
print("as by hand")
trainer.close()
"""


@pytest.mark.pitfall(87)
@pytest.mark.parametrize("waits", [False, True])
def test_ctrl_c_at_a_prompt_returns_from_fit_with_everything_saved_and_fit_goes_on(waits: bool, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-i", "-c", ""],
        input=PROMPT.format(waits=waits),
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(small.ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    step = 2 if waits else 3
    assert f"returned at {step} ['val/loss']" in done.stdout, done.stderr
    assert f"saved [{step}]" in done.stdout
    assert "ended at 8 8" in done.stdout, done.stderr
    assert "as by hand" in done.stdout, done.stderr
    assert "fit() continues" in done.stderr


@pytest.mark.pitfall(87)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_handler_of_the_users_that_was_there_before_fit_is_called_too(number: signal.Signals) -> None:
    called: list[int] = []
    before = signal.signal(number, lambda received, frame: called.append(received))

    class Signalled(small.Alone):
        def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
            if self.global_step == 1:
                os.kill(os.getpid(), number)
                time.sleep(0.01)
            return super().training_step(batch, batch_idx)

    trainer = Signalled(small.make_config(n_epochs=1), small.batches(3))
    try:
        if number == signal.SIGTERM:
            with pytest.raises(SystemExit) as ended:
                trainer.fit()
            assert ended.value.code == 128 + number
        else:
            trainer.fit()
    finally:
        signal.signal(number, before)
        trainer.close()
    assert called == [number]
    assert trainer.global_step == (2 if number == signal.SIGTERM else 3)


@pytest.mark.pitfall(87)
def test_a_step_that_was_written_anew_is_the_one_that_runs() -> None:
    class Mended(Evaluates):
        pass

    trainer = Mended(small.make_config(n_epochs=1), small.batches(4), small.batches(1))
    trainer.fails_in = "step"
    with pytest.raises(KeyError):
        trainer.fit()
    calls: list[str] = []

    def anew(self: Any, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        calls.append("step")
        return Evaluates.training_step(self, batch, batch_idx)

    def looks_anew(self: Any, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        calls.append("validation")
        return Evaluates.validation_step(self, batch, batch_idx)

    Mended.training_step = anew  # type: ignore[method-assign]
    trainer.validation_step = looks_anew.__get__(trainer)  # type: ignore[method-assign]
    with trainer:
        trainer.fit()
    assert calls == ["step", "step", "validation"]
