"""Checks find the mistakes of small trainers, name their places, and accuse no right one."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dream_trainer.testing import ProgramError, TrainerCheckError, check_deterministic, check_parity, check_resume
from tests.api import CHECKS, ConfigError, Program, TrainerChecks, differences, findings, main
from tests.testing.programs import right, wrong

PROGRAMS = Path(__file__).parent / "programs"
RIGHT = [
    *("Plain", "Dropout", "BatchNorm", "SavedState", "WeightedTokens", "Adversaries", "GatheredContrast", "everyday"),
    *("Caches", "Denoiser", "Plateau", "ThawOnce", "Experts", "PaddedByBatch"),
]
# The check that finds a mistake, and what its message names. Two more have tests of their own below.
WRONG = {
    "wrong.py:HistoryOnTrainer": ("resume", r"`self\.losses` changes in .*HistoryOnTrainer\.post_train_batch"),
    "wrong.py:AverageByHand": ("resume", r"`self\.shadow` changes in AverageByHand\.post_train_step"),
    "wrong.py:FreezesByOwnCount": ("resume", r"`self\.passes` changes in FreezesByOwnCount\.pre_epoch"),
    "wrong.py:OptimizerWithOwnState": ("resume", r"`self\.optimizer\.slow` changes"),
    "wrong.py:callback_without_state": ("resume", r"`Warmup\.count` changes"),
    "wrong.py:CurriculumInDataset": ("resume", r"`self\.levels\.level` changes in CurriculumInDataset\.post_"),
    "wrong.py:OwnGenerator": ("resume", r"`self\.generator` changes in OwnGenerator\.training_step"),
    "wrong.py:CountInModule": ("resume", r"`self\.model\.calls` changes"),
    "wrong.py:CountInClass": ("resume", r"`CountInClass\.seen` changes"),
    "counted.py:CountInModuleOfPython": ("resume", r"`counted\.py \(global\): counts` changes"),
    "wrong.py:OwnLogOpenedAnew": ("resume", r"log_0\.txt"),
    "wrong.py:DatasetByRank": ("parity", r"sample 0 of the dataset of training \(TensorDataset\)"),
    "wrong.py:CodebookPerRank": ("parity", r"model\.codebook"),
    "wrong.py:LocalMetric": ("validation", r"val/accuracy.*\n.*LocalMetric\.post_val_epoch"),
    "wrong.py:DropLastByRanks": ("parity", r"drop_last|samples|steps"),
    "wrong.py:RateByRank": ("parity", r"optimizer 'optimizer', group 0.*lr"),
    "wrong.py:RateByWorld": ("parity", r"learning rates, of RateByWorld\.configure_optimizers"),
    "wrong.py:LossByWorld": ("parity", r"LossByWorld\.training_step"),
    "wrong.py:NoiseOnWeights": ("parity", r"model\.0\.weight.*\n.*NoiseOnWeights\.post_train_step"),
    "wrong.py:ReadsGradient": ("parity", r"learning rates, of ReadsGradient|ReadsGradient\.training_step"),
    "wrong.py:CollectiveOnMain": ("parity", r"wrong\.py:\d+"),
    "wrong.py:MeanOfRank": ("parity", r"`self\.mean` changes in MeanOfRank\.training_step"),
    "wrong.py:LocalContrast": ("parity", r"LocalContrast\.training_step.*\n.*all_gather_with_gradient"),
    "wrong.py:ScheduleByMicroBatch": ("schedules", r"self\.scheduler makes"),
    "wrong.py:ModulesFromSet": ("order", r"order of modules, of ModulesFromSet\.configure_models"),
    "wrong.py:AugmentedByTime": ("deterministic", r"samples, of Clocked"),
    "wrong.py:GeneratorInDataset": ("resume", r"`Drawing\.rng` changes"),
    "wrong.py:UnseededWeights": ("deterministic", r"initial weights, of .*UnseededWeights\.init_weights"),
    "wrong.py:ValidationTrainsStatistics": ("validation", r"running_mean changes in ValidationTrainsStatistics\.val"),
    "shuffled.py:ShuffledAtImport": ("deterministic", r"`shuffled\.py \(global\): ORDER`"),
}


def program(target: str) -> Program:
    return Program.of(str(PROGRAMS / target))


def test_a_run_that_was_stopped_before_a_validation_begins_with_it() -> None:
    trained = {(step, "samples", "micro-batch 0"): (str(step),) for step in (1, 2, 3)}
    validated = {(2, "logged", "val/loss"): 0.5}
    resumed = {(3, "samples", "micro-batch 0"): ("3",), **validated}
    assert list(differences(trained | validated, resumed)) == []
    other = {(3, "samples", "micro-batch 0"): ("4",), (2, "logged", "val/loss"): 0.25}
    assert [found.step for found in differences(trained | validated, other)] == [2, 3]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_trainer_is_not_accused(name: str) -> None:
    found = list(findings(program(f"right.py:{name}")))
    assert [str(each) for each in found if each.holds is False] == []
    assert len(found) > 8
    exported = [str(each) for each in found if each.check == "validation of what is exported" and not each.holds]
    assert bool(exported) is (name == "SavedState"), exported  # it validates with a mean that no export has
    assert all("val/scaled" in each for each in exported)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", WRONG)
def test_a_mistake_is_found_and_its_place_named(target: str) -> None:
    check, place = WRONG[target]
    checks = ("parity", "validation") if check == "validation" else (check,)
    failed = "\n".join(str(f) for f in findings(program(target), checks=checks, quick=True) if f.holds is False)
    assert re.search(place, failed), failed


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", CHECKS)
def test_each_check_runs_alone(check: str) -> None:
    failed = [str(each) for each in findings(program("right.py:Plain"), checks=[check]) if each.holds is False]
    assert failed == []


@pytest.mark.slow
@pytest.mark.parametrize(("main", "holds"), [("if __name__ == '__main__':", False), ("if True:", None)])
def test_a_spawned_worker_lacks_what_the_program_sets_and_does_not_train(
    main: str, holds: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ["from tests.testing.programs import right", main, "    right.SCALE = 0.2"]
    lines += ["    with right.Denoiser(right.default_config()) as trainer:", "        trainer.fit()"]
    Path("script.py").write_text("\n".join(lines))
    *_, found = findings(Program.of("script.py"), checks=("order",))
    assert (found.check, found.holds) == ("workers, spawned", holds)
    assert ("not checked" if holds is None else "differs in the samples, of Noisy") in str(found)
    assert os.listdir() == ["script.py"]


def make_forgetful() -> wrong.MeanOnTrainer:
    return wrong.MeanOnTrainer(wrong.default_config())


def make_unweighted() -> wrong.UnweightedTokens:
    return wrong.UnweightedTokens(wrong.default_config())


def make_failing() -> right.Plain:
    raise ValueError("no such data")


def test_what_is_not_saved_is_named() -> None:
    with pytest.raises(TrainerCheckError, match=r"`self\.mean` changes in MeanOnTrainer\.training_step \(wrong\.py:\d"):
        check_resume(make_forgetful, quick=True)


def test_a_weight_that_is_missing_is_named() -> None:
    with pytest.raises(TrainerCheckError, match=r"UnweightedTokens\.training_step \(wrong\.py:\d+\)") as raised:
        check_parity(make_unweighted, meshes=["replicas"])
    assert "self.backward(loss, weight=...)" in str(raised.value)


def test_a_mesh_that_the_trainer_has_not_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\['tensor', 'other'\].*'replicas', 'shards'"):
        check_parity(make_unweighted, meshes=["replicas", "tensor", "other"])


def test_an_error_of_the_program_is_its_own() -> None:
    with pytest.raises(ProgramError, match="ValueError: no such data") as raised:
        check_deterministic(make_failing)
    assert "testing/checked_runs.py" not in str(raised.value)


@pytest.mark.parametrize("target", ["nothing.py", f"{PROGRAMS / 'right.py'}:Nobody"])
def test_a_program_that_is_not_there_is_a_wrong_argument(target: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", target]) == 2
    assert capfd.readouterr().err.startswith(f"error: {'there is no program' if ':' not in target else repr(target)}")


def test_arguments_that_a_script_does_not_read_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from tests.testing.programs.right import Plain, default_config\n\n"
        "with Plain(default_config()) as trainer:\n    trainer.fit()\n"
    )
    assert main(["check", str(script), "--quick", "--only", "cost", "--training.max-steps", "5"]) == 0
    assert "-    arguments: --training.max-steps 5 changed no config" in capfd.readouterr().out


def test_a_function_inside_of_another_is_refused() -> None:
    with pytest.raises(Exception, match="Use a function of a module"):
        check_deterministic(lambda: None)


def test_the_command_reports_what_holds(capfd: pytest.CaptureFixture[str]) -> None:
    target = f"{PROGRAMS / 'right.py'}:Plain"
    assert main(["check", target, "--quick", "--only", "order", "--seed", "7", "--training.max-steps", "6"]) == 0
    said = "ok   hash: 6 steps with PYTHONHASHSEED=1, bit for bit\nall that was checked holds"
    assert said in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "of_the_program"),
    [
        ("check train.py:Fit --quick --only resume --training.max_steps 8", "--training.max_steps 8"),
        (
            "check train.py:Fit --training.max-steps 8 --only resume more --x=1 --quick",
            "--training.max-steps 8 more --x=1",
        ),
        ("check --quick --only=resume train.py:Fit --seed 3 -- --quick --json -- -x", "--seed 3 --quick --json -- -x"),
    ],
)
def test_the_commands_own_flags_may_stand_anywhere(
    words: str, of_the_program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []

    def note(program: Program, checks: Sequence[str], *, quick: bool, as_json: bool) -> int:
        ran.extend([program, *checks, quick, as_json])
        return 0

    monkeypatch.setattr("dream_trainer.testing.suite.report", note)
    assert main(words.split()) == 0
    program = Program(path="train.py", name="Fit", config="default_config", arguments=tuple(of_the_program.split()))
    assert ran == [program, "resume", True, False]


def test_every_check_has_a_method() -> None:
    assert all(callable(vars(TrainerChecks)[name]) for name in CHECKS)
