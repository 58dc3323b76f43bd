"""What a trainer promises at its edges: a step that is refused, a save before setup, a closed trainer's files."""

from typing import Any

import pytest
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ReduceLROnPlateau

import dream_trainer as dt
from tests.api import StepError
from tests.trainer.small import Batch, Spread, batches, make_config


class Plateau(Spread, dt.CheckpointMixin):
    """Gives `step` a scheduler that it refuses, in the window after `refused_after` steps."""

    refused_after: int | None = 3
    catches = False

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.backward(mse_loss(self.model(batch[0]), batch[1]))
        is_refused = self.global_step == self.refused_after
        try:
            self.step(self.model, self.optimizer, ReduceLROnPlateau(self.optimizer) if is_refused else None)
        except StepError:
            if not self.catches:
                raise
        return {}


def plateau() -> Plateau:
    return Plateau(make_config(n_epochs=1, checkpoint=dt.CheckpointParameters()), batches(6))


def test_a_step_that_is_refused_is_none_and_the_last_finished_one_is_saved() -> None:
    with plateau() as trainer:
        with pytest.raises(StepError, match="ReduceLROnPlateau needs a metric.*post_val_epoch"):
            trainer.fit()
        assert [checkpoint.step for checkpoint in trainer.checkpoints()] == [3]
        trainer.refused_after = None
        trainer.fit()
        assert trainer.global_step == 6


def test_a_window_whose_only_step_was_refused_is_not_counted() -> None:
    trainer = plateau()
    trainer.catches = True
    with pytest.raises(StepError, match=r"ended with backward\(\) but no step\(\)"):
        trainer.fit()
    assert trainer.global_step == 3
    trainer.close()


def test_a_save_before_setup_is_an_error() -> None:
    with pytest.raises(StepError, match="before the trainer is set up"):
        plateau().save_checkpoint()


def test_a_closed_trainers_files_stay_where_they_are() -> None:
    with plateau() as trainer:
        trainer.refused_after = None
        trainer.fit()
    directory = trainer.run_dir
    trainer.config.experiment = "another"
    assert trainer.run_dir == directory
    assert [checkpoint.step for checkpoint in trainer.checkpoints()] == [6]
