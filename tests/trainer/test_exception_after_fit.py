"""An exception in a trainer's `with`, outside of fit, that the program catches and goes on."""

from pathlib import Path

import pytest

from tests.trainer.small import run_ranks

PROGRAM = """
import os
from dream_trainer.data.loader import DistributedDataLoader
from tests.trainer.small import Samples, Spread, make_config

def train(breaks):
    try:
        with Spread(make_config(n_epochs=1), DistributedDataLoader(Samples(8), 2)) as trainer:
            trainer.fit()
            if breaks:
                raise KeyError("the report's column")
    except KeyError:
        print("caught")

train(breaks=os.environ["RANK"] == "0")
train(breaks=False)
"""


@pytest.mark.pitfall(82)
def test_an_exception_on_one_rank_after_fit_ends_the_job_and_names_the_cause(tmp_path: Path) -> None:
    (code, text), (other, consequence) = run_ranks(PROGRAM, 2, tmp_path)
    assert code == 1
    assert other != 0
    assert "[rank 1] stops because of rank 0." in consequence
    assert "Traceback" not in consequence
    assert "the report's column" in text
