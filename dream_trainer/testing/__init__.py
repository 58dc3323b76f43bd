"""Checks of a trainer: is it the same on ranks, after a resume, after a kill? `dream-trainer check` runs them too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from dream_trainer.testing.suite import (
        Finding as Finding,
        ProgramError as ProgramError,
        TrainerCheckError as TrainerCheckError,
        check_deterministic as check_deterministic,
        check_kill as check_kill,
        check_order as check_order,
        check_parity as check_parity,
        check_resume as check_resume,
        check_trainer as check_trainer,
        check_validation as check_validation,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
