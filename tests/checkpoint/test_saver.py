"""What is saved when training ends with an exception."""

from __future__ import annotations

import pytest

from tests.trainer.saves import NOTHING, Saves, make_config


class Fails(Saves):
    def post_train_step(self) -> None:
        if self.global_step == 2:
            raise KeyError("on purpose")


@pytest.mark.parametrize("saves", [True, False])
def test_an_exception_saves_unless_the_config_says_no(saves: bool) -> None:
    trainer = Fails(make_config(save_on_exception=saves, **NOTHING))
    with trainer, pytest.raises(KeyError, match="on purpose"):
        trainer.fit()
    assert trainer.saved == ([2] if saves else [])
