"""SWA against the mean of the weights that a loop by hand had at its times."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from tests.api import SWA
from tests.callbacks.averages import Poisoned, Validated, Windows, averaged, in_windows, loss_with, weights_by_hand
from tests.trainer import small


def mean_by_hand(windows: Windows, taken: Sequence[int], **options: Any) -> dict[str, Tensor]:
    """The mean of the weights after the steps `taken`, which count from 1; of none, the last weights."""
    weights = weights_by_hand(windows, **options)
    return {name: torch.stack([weights[step][name] for step in taken or (-1,)]).mean(0) for name in weights[0]}


@pytest.mark.parametrize(
    ("swa", "taken"),
    [
        (SWA(2, every=3, unit="steps"), (2, 5, 8, 11)),
        (SWA(2, unit="epochs"), (8, 12)),
        (SWA(1, every=2), (4, 12)),
        (SWA(13, unit="steps"), ()),
    ],
    ids=["from step 2 every 3", "from epoch 2", "every other epoch", "not yet"],
)
def test_the_average_is_the_mean_of_the_weights_at_its_times_and_validations_see_it(
    swa: SWA, taken: Sequence[int]
) -> None:
    truth = mean_by_hand(in_windows(small.batches(4) * 3), taken)
    config = small.make_config(n_epochs=3, callbacks=[swa])
    with Validated(config, small.batches(4), small.batches(2)) as trainer:
        trainer.fit()
        small.assert_same_weights(averaged(swa), truth)
        assert trainer.evaluate()["val/loss"] == pytest.approx(loss_with(truth, 4), rel=1e-12)


@pytest.mark.usefixtures("late_norms")
@pytest.mark.parametrize(
    "make_optimizer", [small.sgd, small.fused_adamw], ids=["skipped by the host", "skipped on the device"]
)
def test_weights_are_taken_only_where_the_model_has_changed_since(make_optimizer: Any) -> None:
    swa = SWA(2, every=2, unit="steps")
    config = small.make_config(n_epochs=1, callbacks=[swa], on_nonfinite="skip")
    trainer = Poisoned(config, small.batches(8), make_optimizer=make_optimizer)
    trainer.poison = skipped = (3, 4, 6)
    small.fit(trainer)
    # Steps 3 and 4 were both skipped; of 5 and 6 only the latter.
    truth = mean_by_hand(in_windows(small.batches(8)), (2, 6, 8), skipped=skipped, make_optimizer=make_optimizer)
    small.assert_same_weights(averaged(swa), truth)


class Normalised(small.Alone):
    make_model = staticmethod(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double())


def test_batch_norm_is_taken_anew_for_the_average_and_given_back() -> None:
    swa, data = SWA(2, unit="steps"), small.batches(6, 4)
    with Normalised(small.make_config(n_epochs=1, callbacks=[swa]), data) as trainer:
        trainer.fit()
        norm = trainer.model[1]
        before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
        with swa.averaged_weights():
            torch.optim.swa_utils.update_bn(data, trainer.model)
            with torch.no_grad():
                hidden = [trainer.model[0](x) for x, *_ in data]
            torch.testing.assert_close(norm.running_mean, torch.stack([h.mean(0) for h in hidden]).mean(0))
            torch.testing.assert_close(norm.running_var, torch.stack([h.var(0) for h in hidden]).mean(0))
            assert trainer.model.training
        assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())
