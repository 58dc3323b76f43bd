"""The faults that `tools/mutants.sh` makes are still to be made: each changes one place that is there."""

from __future__ import annotations

from tests.examples.launch import ROOT, imported


def test_each_fault_changes_one_place_and_has_tests() -> None:
    with imported("tools.mutants") as mutants:
        faults = mutants.MUTANTS
    assert len({fault.name for fault in faults}) == len(faults)
    assert not [fault.name for fault in faults if (ROOT / fault.file).read_text().count(fault.old) != 1]
    files = {word for fault in faults for word in fault.tests.split() if word.startswith("tests")}
    assert not [file for file in sorted(files) if not (ROOT / file).exists()]
