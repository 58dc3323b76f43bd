"""Packed rows in a stream: a step's tokens do not depend on ranks, workers or accumulation, nor on where it went on."""

import hashlib
import json

import pytest

from tests.api import DocumentRows, PackedRows, PaddedRows
from tests.data.documents import NumberedDocuments, PackedJob, web_like_lengths
from tests.data.reading import Layout

GLOBAL_BATCH, STEPS = 8, 12
LAYOUTS = [(1, 1, 0), (1, 4, 2), (2, 2, 2), (2, 1, 0), (4, 1, 2), (4, 2, 0)]
"""(ranks, accumulation, workers)"""
LENGTHS = web_like_lengths(400)


def packed(is_endless: bool) -> DocumentRows:
    return PackedRows(NumberedDocuments(LENGTHS, is_endless), 256, block_size=60)


def padded(is_endless: bool) -> DocumentRows:
    return PaddedRows(NumberedDocuments(LENGTHS, is_endless), 256, block_size=60, bucket_size=GLOBAL_BATCH)


KINDS = {"packed": packed, "padded": padded}


class Job(PackedJob):
    """Over rows of a kind, whose digests tell their real tokens and labels."""

    def __init__(self, kind: str, is_endless: bool, layout: Layout, seed: int = 3) -> None:
        super().__init__(lambda: KINDS[kind](is_endless), layout, GLOBAL_BATCH, seed)

    def steps(self, count: int) -> tuple[list[str], list[str]]:
        """Of each step, and what each rank would save then."""
        digests: list[str] = []
        for epoch, batches in self.read(count):
            digest = hashlib.sha256(str(epoch).encode())
            for batch in batches:
                for tokens, labels, documents in zip(batch["tokens"], batch["labels"], batch["documents"], strict=True):
                    real = documents >= 0
                    digest.update(json.dumps([tokens[real].tolist(), labels[real].tolist()]).encode())
            digests.append(digest.hexdigest())
        return digests, self.saved()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_endless", [False, True])
@pytest.mark.parametrize("number", range(0, len(LAYOUTS), 2))
def test_a_run_goes_on_twice_in_other_layouts_with_the_same_tokens(kind: str, is_endless: bool, number: int) -> None:
    expected = Job(kind, is_endless, (1, 1, 0)).steps(STEPS)[0]
    assert len(set(expected)) == STEPS
    found: list[str] = []
    saved = None
    for part, count in enumerate((3, 4, STEPS - 7)):
        job = Job(kind, is_endless, LAYOUTS[(number + 2 * part) % len(LAYOUTS)])
        if saved is not None:
            job.go_on(saved[part % len(saved)])
        digests, saved = job.steps(count)
        job.close()
        found += digests
    assert found == expected
    assert Job(kind, is_endless, (1, 1, 0), seed=4).steps(STEPS)[0] != expected
