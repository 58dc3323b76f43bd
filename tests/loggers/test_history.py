"""The lines that a trainer keeps: a list that forgets its oldest."""

from tests.api import History


def line(step: int) -> dict[str, float]:
    return {"step": step, "loss": 1 / step}


def test_it_keeps_the_newest() -> None:
    history = History(2)
    for step in (1, 2, 3, 4):
        history.append(line(step))
    assert history == [line(3), line(4)]
    history.replace(line(step) for step in (5, 6, 7))
    assert history == [line(6), line(7)]
