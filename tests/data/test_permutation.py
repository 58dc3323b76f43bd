"""An order that is computed place by place is one: every sample once."""

import numpy as np
import pytest

from tests.api import IndexPermutation


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 16, 17, 99, 100, 101, 1024, 4097])
def test_every_epoch_has_each_sample_once(length: int) -> None:
    order = IndexPermutation(length, seed=5)
    found = order(np.tile(np.arange(length), 4), np.repeat(np.arange(4), length)).reshape(4, length)
    assert (np.sort(found, axis=1) == np.arange(length)).all()


def test_places_do_not_tell_samples() -> None:
    """Ranks are uncorrelated with places and with those of the place before, and each place gets all samples."""
    found = IndexPermutation(10_000, seed=1)(np.arange(10_000), np.zeros(10_000, dtype=int))
    assert abs(np.corrcoef(found, np.arange(10_000))[0, 1]) < 0.05
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.05
    firsts = IndexPermutation(10, seed=1)(np.zeros(5000, dtype=int), np.arange(5000))
    assert np.bincount(firsts, minlength=10).min() > 350


def test_any_length_costs_the_same() -> None:
    order = IndexPermutation(2**62, seed=2)
    found = order(np.array([0, 1, 2**62 - 1]), np.zeros(3, dtype=int))
    assert len(set(found.tolist())) == 3
    assert found.min() >= 0
    assert found.max() < 2**62
