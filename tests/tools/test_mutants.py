"""The faults that `tools/mutants.sh` makes are still to be made: each changes one place that is there."""

from tests.conftest import CI_ONLY
from tests.examples.launch import ROOT, imported


def test_each_fault_changes_one_place_and_has_tests() -> None:
    with imported("tools.mutants") as mutants:
        faults = mutants.MUTANTS
    assert len({fault.name for fault in faults}) == len(faults)
    assert not [fault.name for fault in faults if (ROOT / fault.file).read_text().count(fault.old) != 1]
    files = {word for fault in faults for word in fault.tests.split() if word.startswith("tests")}
    assert not [file for file in sorted(files) if not (ROOT / file).exists()]


def test_each_test_that_only_ci_runs_is_there() -> None:
    for start in CI_ONLY:
        file, _, test = start.partition("::")
        assert (ROOT / file).exists(), start
        assert not test or f"def {test.partition('[')[0]}" in (ROOT / file).read_text(), start
