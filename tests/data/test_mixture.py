"""Mixtures: their weights in the long run, their epochs, and their closed form against counting one by one."""

from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests.api import BLOCK, ENDLESS, ConfigError, DataError, Mixture, Stage, weights_by_position
from tests.data.reading import Job, open_ranks


class Numbered:
    """Sample i of a source is (its name, i); `lengths` are tokens."""

    def __init__(self, name: str, length: int, tokens: int = 1) -> None:
        self.name, self.length, self.tokens = name, length, tokens

    def __len__(self) -> int:
        return self.length

    @property
    def lengths(self) -> np.ndarray:
        return np.full(self.length, self.tokens) + np.arange(self.length) % 2

    def __getitem__(self, index: int) -> tuple[str, int]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return self.name, index


def three(**options: Any) -> Mixture:
    sources = {"a": Numbered("a", 700), "b": Numbered("b", 4000), "c": Numbered("c", 90)}
    options.setdefault("weights", {"a": 5, "b": 2, "c": 1})
    return Mixture(sources, **options)


def begun(mixture: Mixture, seed: int = 3, state: dict[str, Any] | None = None, epoch: int = 0) -> Mixture:
    mixture.begin(seed, state)
    mixture.set_epoch(epoch)
    return mixture


def samples(mixture: Mixture, first: int, last: int) -> list[Any]:
    return [mixture[position] for position in range(first, last)]


def test_each_block_and_the_long_run_have_the_weights() -> None:
    mixture = begun(three(weights={"a": 1 / 3, "b": 0.6, "c": 0.07}))
    total = 1 / 3 + 0.6 + 0.07
    shares = {"a": 1 / 3 / total, "b": 0.6 / total, "c": 0.07 / total}
    counts = Counter(name for name, _ in samples(mixture, 0, BLOCK))
    assert all(abs(counts[name] - BLOCK * share) <= 1 for name, share in shares.items())
    for blocks in (1, 7, 1000, 12345, 10**6, 10**9 + 1):
        drawn = mixture.drawn(blocks * BLOCK)
        assert sum(count for count, _ in drawn.values()) == blocks * BLOCK
        for name, share in shares.items():
            exact = Fraction(share).limit_denominator(10**15) * blocks * BLOCK
            assert abs(drawn[name].samples - exact) <= blocks.bit_length() + 1 + 1e-3


def test_every_epoch_of_a_source_is_a_permutation_and_another_one() -> None:
    mixture = begun(three())
    by_source: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for name, index in samples(mixture, 0, 8000):
        by_source[name].append(index)
    for name, length, epochs in (("a", 700, 7), ("b", 4000, 0), ("c", 90, 11)):
        found = by_source[name]
        assert len(found) >= epochs * length
        orders = [found[epoch * length :][:length] for epoch in range(epochs)]
        assert all(sorted(order) == list(range(length)) for order in orders)
        assert len({tuple(order) for order in orders}) == epochs
    assert len(set(by_source["b"])) == len(by_source["b"]) > 1900


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stages": [Stage(at=1500, weights={"b": 1, "c": 1}), Stage(at=4000, weights={"a": 1, "c": 2}, ramp=900)]},
        {"max_epochs": {"a": 2, "c": 1.5}, "stages": [Stage(at=2000, weights={"a": 1, "b": 1, "c": 9})]},
        {"unit": "tokens", "stages": [Stage(at=3000, weights={"b": 1, "c": 1}, ramp=1000)]},
    ],
    ids=["weights", "stages", "limits", "tokens"],
)
def test_counts_by_arithmetic_are_those_of_counting(options: dict[str, Any]) -> None:
    mixture = begun(three(**options))
    counts = Counter[str]()
    for position in range(7000):
        if position % 61 == 0 or position in (1499, 1500, 1501):
            drawn = mixture.drawn(position)
            assert {name: drawn[name].samples for name in drawn} == {name: counts[name] for name in "abc"}
        draw = mixture.locate(position)
        assert draw.epoch == counts[draw.source] // len(mixture.sources[draw.source])
        counts[draw.source] += 1


def test_a_position_is_the_same_whatever_was_read_before() -> None:
    straight = samples(begun(three()), 0, 5000)
    mixture = begun(three())
    for position in (4999, 0, 2048, 2047, 1023, 1024, 3000):
        assert mixture[position] == straight[position]
    assert samples(begun(three(), seed=4), 0, 100) != straight[:100]
    assert samples(begun(three(seed=3), seed=4), 0, 100) == straight[:100]


def test_stages_count_from_their_position_and_ramps_are_linear() -> None:
    mixture = begun(three(stages=[Stage(at=1500, weights={"b": 1}), Stage(at=10_000, weights={"c": 1}, ramp=64_000)]))
    assert {name for name, _ in samples(mixture, 1500, 10_000)} == {"b"}
    assert {name for name, _ in samples(mixture, 74_000, 74_200)} == {"c"}
    for part in (0.25, 0.5, 0.75):
        first = 10_000 + int(64_000 * part) - 2000
        names = [name for name, _ in samples(mixture, first, first + 4000)]
        assert abs(names.count("c") / 4000 - part) < 0.01


def test_weights_by_tokens_give_tokens() -> None:
    sources = {"short": Numbered("short", 1000, 10), "long": Numbered("long", 1000, 500)}
    stages = [Stage(at=10**7, weights={"long": 1})]
    mixture = begun(Mixture(sources, {"short": 1, "long": 3}, unit="tokens", stages=stages))
    tokens = mixture.lengths(0, 50_000)
    names = np.array([mixture.locate(position).source for position in range(50_000)])
    share = tokens[names == "long"].sum() / tokens.sum()
    assert abs(share - 0.75) < 0.001
    # The stage begins where 10**7 tokens were drawn, by the mean.
    _, (at, weights) = weights_by_position({"short": 1.0, "long": 3.0}, stages, [], [10.5, 500.5], 0)
    assert abs(mixture.lengths(0, at).sum() - 10**7) < 10**4
    assert weights[0] == 0
    assert {mixture.locate(position).source for position in range(at, at + 3000)} == {"long"}


def test_a_source_at_its_limit_is_left_out_and_the_mixture_ends_with_the_last() -> None:
    mixture = begun(three(max_epochs={"a": 2, "b": 1, "c": 3}))
    assert len(mixture) == 1400 + 4000 + 270
    counts = Counter(samples(mixture, 0, len(mixture)))
    assert {name: {counts[name, i] for i in range(n)} for name, n in (("a", 700), ("b", 4000), ("c", 90))} == {
        "a": {2},
        "b": {1},
        "c": {3},
    }
    assert mixture.drawn(len(mixture))["c"] == (270, 3.0)
    with pytest.raises(IndexError):
        mixture[len(mixture)]
    assert len(three(max_epochs={"a": 2, "b": 1})) == ENDLESS
    again = begun(mixture, epoch=1)
    assert Counter(samples(again, 0, len(again))) == counts


def test_passes_of_a_length_follow_each_other() -> None:
    whole = samples(begun(three(max_epochs={"a": 1})), 0, 3000)
    mixture = three(max_epochs={"a": 1}, num_samples=1000)
    assert [sample for epoch in range(3) for sample in samples(begun(mixture, epoch=epoch), 0, 1000)] == whole
    limited = three(weights={"c": 1}, max_epochs={"c": 10}, num_samples=600)
    assert [len(begun(limited, epoch=epoch)) for epoch in (0, 1)] == [600, 300]
    with pytest.raises(DataError, match=r"max_epochs=\{'c': 10\} lets 900 samples.*pass 2 \(from 0\)"):
        begun(limited, epoch=2)


def test_weights_that_were_set_count_from_the_position_asked_to_the_next_stage_and_are_in_the_state() -> None:
    stages = [Stage(at=500, weights={"a": 3, "b": 1}, ramp=3000), Stage(at=5000, weights={"a": 1})]
    mixture = begun(three(stages=stages))
    before = samples(mixture, 0, 2100)
    assert not mixture.changes_at(2000)
    mixture.set_weights({"c": 1, "b": 1})
    saved_before = mixture.state_at(2100)
    assert mixture.changes_at(2100)
    assert not mixture.changes_at(2101)
    assert samples(mixture, 0, 2100) == before
    after = samples(mixture, 2100, 6000)
    assert {name for name, _ in after[:2900]} == {"b", "c"}
    assert {name for name, _ in after[2900:]} == {"a"}
    for state in (saved_before, mixture.state_at(2100), mixture.state_at(4000)):
        resumed = begun(three(stages=stages), state=state)
        assert resumed.changes_at(2100) == (state is saved_before)  # asked for, and not yet done
        assert samples(resumed, 2100, 6000) == after


def test_weights_asked_for_when_a_pass_has_ended_are_saved() -> None:
    def job_over(mixture: Mixture) -> Job:
        return Job(open_ranks(lambda: mixture, (1, 1, 0), 100, collate_fn=list))

    for asked_after in range(1, 9):
        mixture = three(num_samples=250)  # 2 steps of 100 in a pass, and 50 that are left out
        job = job_over(mixture)
        job.steps(asked_after)
        mixture.set_weights({"a": 1, "b": 9})
        resumed = job_over(three(num_samples=250))
        resumed.go_on(job.saved())
        assert resumed.steps(5) == job.steps(5), asked_after


def test_another_mixture_is_refused_or_goes_on_from_there_by_name() -> None:
    before = begun(three())
    state = before.state_at(3000)
    with pytest.raises(DataError, match=r"another mixture \(weights was .*'a': 5.*on_change=\"continue\""):
        begun(three(weights={"a": 1}), state=state)
    with pytest.raises(DataError, match="in another order"):
        begun(Mixture({name: before.sources[name] for name in "bac"}, {"b": 2, "a": 5, "c": 1}), state=state)
    with pytest.raises(DataError, match="num_samples was None, and is 9"):
        begun(three(num_samples=9, on_change="continue"), state=state)
    drawn = before.drawn(3000)
    assert 4 < drawn["c"].epochs < 5
    sources = {"new": Numbered("new", 50), "c": Numbered("c", 100), "a": Numbered("a", 700)}
    after = Mixture(sources, {"new": 1, "c": 1, "a": 1}, on_change="continue")
    begun(after, state=state)
    assert after.drawn(3000) == {"new": (0, 0.0), "c": (500, 5.0), "a": drawn["a"]}
    later = samples(after, 3000, 9000)
    expected = samples(before, 3000, 30_000)
    of_a = [index for name, index in later if name == "a"]
    assert of_a == [index for name, index in expected if name == "a"][: len(of_a)]
    resumed = begun(Mixture(sources, {"new": 1, "c": 1, "a": 1}), state=after.state_at(5000))
    assert samples(resumed, 5000, 9000) == later[2000:]


def test_what_cannot_be_mixed_is_named() -> None:
    one = Numbered("a", 3)
    wrong: list[tuple[type[Exception], str, Any]] = [
        (ConfigError, r"weight of source 'a' is -1", lambda: Mixture({"a": one}, {"a": -1})),
        (ConfigError, r"all weights are zero", lambda: Mixture({"a": one}, {"a": 0})),
        (ConfigError, r"weights are given for \['b'\]", lambda: Mixture({"a": one}, {"a": 1, "b": 1})),
        (ConfigError, r"rising order", lambda: Mixture({"a": one}, stages=[Stage(at=3, weights={"a": 1})] * 2)),
        (
            ConfigError,
            "at 500 has a ramp of 301, and the next one begins at 800",
            lambda: three(stages=[Stage(at=500, weights={"a": 1}, ramp=301), Stage(at=800, weights={"b": 1})]),
        ),
        (ConfigError, r"max_epochs has 'b'", lambda: Mixture({"a": one}, max_epochs={"b": 1})),
        (ConfigError, r"unit='words'", lambda: Mixture({"a": one}, unit="words")),  # type: ignore[arg-type]
        (DataError, r"source 'a' \(list\) has 0 samples", lambda: Mixture({"a": []})),
        (DataError, r"source 'a' \(Mixture\) has no samples by number", lambda: Mixture({"a": three()})),
        (
            DataError,
            r"source 'a' \(generator\) has no samples by number",
            lambda: Mixture({"a": (i for i in range(3))}),
        ),
        (
            DataError,
            r"source 'a' \(range\) has no attribute `lengths`",
            lambda: Mixture({"a": range(3)}, unit="tokens"),
        ),
    ]
    for kind, message, make in wrong:
        with pytest.raises(kind, match=message):
            make()
    three(stages=[Stage(at=500, weights={"a": 1}, ramp=300), Stage(at=800, weights={"b": 1})])


def test_a_sample_that_cannot_be_loaded_is_named() -> None:
    class Broken(Numbered):
        def __getitem__(self, index: int) -> tuple[str, int]:
            raise OSError("disk on fire")

    mixture = begun(Mixture({"x": Broken("x", 5)}))
    with pytest.raises(DataError, match=r"sample \d of source 'x' \(Broken\), at position 7 .*OSError: disk on fire"):
        mixture[7]
