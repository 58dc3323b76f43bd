"""Is the trainer the same on several ranks, after a stop and after a kill? Takes about a minute."""

from pathlib import Path

from dream_trainer.testing import check_trainer


def test_trainer() -> None:
    check_trainer(str(Path(__file__).parent / "train.py"), quick=True)
