"""Packed rows in a stream: a step's tokens do not depend on ranks, workers or accumulation, nor on where it went on."""

import hashlib
import json
from functools import partial
from typing import Any

import pytest

from tests.api import PackedRows, PaddedRows
from tests.data import reading
from tests.data.documents import NumberedDocuments, web_like_lengths
from tests.data.reading import Layout, open_ranks, read_in_parts

GLOBAL_BATCH, STEPS = 8, 12
LAYOUTS = [(1, 1, 0), (1, 4, 2), (2, 2, 2), (2, 1, 0), (4, 1, 2), (4, 2, 0)]
"""(ranks, accumulation, workers)"""
LENGTHS = web_like_lengths(400)


def packed(is_endless: bool) -> PackedRows:
    return PackedRows(NumberedDocuments(LENGTHS, is_endless), 256, block_size=60)


def padded(is_endless: bool) -> PaddedRows:
    return PaddedRows(NumberedDocuments(LENGTHS, is_endless), 256, block_size=60, bucket_size=GLOBAL_BATCH)


KINDS: dict[str, Any] = {"packed": packed, "padded": padded}


class Job(reading.Job):
    """Over rows of a kind."""

    def __init__(self, kind: str, is_endless: bool, layout: Layout, seed: int = 3) -> None:
        make = partial(KINDS[kind], is_endless)
        options = {"collate_fn": make().collate} if kind == "padded" else {}
        super().__init__(open_ranks(make, layout, GLOBAL_BATCH, seed=seed, **options))

    def steps(self, count: int) -> list[str]:
        """A digest of each step's real tokens and labels."""
        digests: list[str] = []
        for batches in self.read(count):
            digest = hashlib.sha256(str(self.position.epoch).encode())
            for batch in batches:
                for tokens, labels, documents in zip(batch["tokens"], batch["labels"], batch["documents"], strict=True):
                    real = documents >= 0
                    digest.update(json.dumps([tokens[real].tolist(), labels[real].tolist()]).encode())
            digests.append(digest.hexdigest())
        return digests


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_endless", [False, True])
@pytest.mark.parametrize("number", range(0, len(LAYOUTS), 2))
def test_a_run_goes_on_twice_in_other_layouts_with_the_same_tokens(kind: str, is_endless: bool, number: int) -> None:
    expected = Job(kind, is_endless, (1, 1, 0)).steps(STEPS)
    assert len(set(expected)) == STEPS
    layouts = [LAYOUTS[(number + 2 * part) % len(LAYOUTS)] for part in range(3)]
    parts = list(zip(layouts, (3, 4, STEPS - 7), strict=True))
    assert read_in_parts(partial(Job, kind, is_endless), parts) == expected
    assert Job(kind, is_endless, (1, 1, 0), seed=4).steps(STEPS) != expected
