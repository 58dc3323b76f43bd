"""In which order the micro-batches of a window get to the device; that they arrive whole is in tests/gpu."""

from typing import Any, Self

import pytest
import torch

from tests.api import on_device

CPU = torch.device("cpu")


class Told:
    """A stream that writes down who waits for it."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def wait_stream(self, other: "Told") -> None:
        self.events.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> Self:
        self.events.append(f"on {self.name}")
        return self

    def __exit__(self, *raised: object) -> None:
        self.events.append(f"off {self.name}")


def trained(aside: Any, events: list[str], count: int) -> list[str]:
    def move(batch: int, device: torch.device) -> int:
        assert device == CPU
        events.append(f"move {batch}")
        return batch

    for batch in on_device(range(count), move, CPU, aside):
        events.append(f"train {batch}")
    return events


def test_without_a_stream_each_is_moved_when_its_turn_comes() -> None:
    assert trained(None, [], 3) == ["move 0", "train 0", "move 1", "train 1", "move 2", "train 2"]


def test_the_next_is_moved_before_one_is_trained_and_streams_wait_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Told("main", events))

    def ahead(number: int) -> list[str]:
        return ["aside waits for main", "on aside", f"move {number}", "off aside"]

    assert trained(Told("aside", events), events, 3) == [
        "move 0",
        *ahead(1),
        "train 0",
        "main waits for aside",
        *ahead(2),
        "train 1",
        "main waits for aside",
        "train 2",
    ]
    events.clear()
    assert trained(Told("aside", events), events, 1) == ["move 0", "train 0"]
