"""Configs on the command line."""

import sys
from dataclasses import dataclass, field
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import dream_trainer as dt
from dream_trainer.config import BaseTrainerConfig, TrainingParameters
from dream_trainer.config.command_line import parse
from dream_trainer.errors import ConfigError
from dream_trainer.events.callback import Callback


@dataclass
class LineConfig(BaseTrainerConfig):
    learning_rate: float = 1e-3
    """Peak learning rate."""
    lora: dict[str, Any] | None = None  # of which tyro can make no flags


def given() -> LineConfig:
    return LineConfig(
        project="p",
        group="g",
        experiment="e",
        training_parameters=TrainingParameters(n_epochs=2, train_batch_size=8),
        callbacks=[Callback()],
    )


def test_arguments_change_what_they_name_and_leave_the_rest_as_given() -> None:
    config = given()
    parsed = parse(config, ["--training-parameters.n-epochs", "3", "--learning-rate", "0.1", "--seed", "0"])
    assert isinstance(parsed, LineConfig)
    assert (parsed.training_parameters.n_epochs, parsed.training_parameters.train_batch_size) == (3, 8)
    assert (parsed.learning_rate, parsed.seed, parsed.project) == (0.1, 0, "p")
    assert parsed.callbacks is config.callbacks
    assert config.training_parameters.n_epochs == 2


def test_sections_and_fields_have_other_names_that_mean_the_same() -> None:
    parsed = parse(given(), "--training.max-epochs 3 --device.dp_shard=4 --training-parameters.nonfinite skip".split())
    assert (parsed.training_parameters.n_epochs, parsed.training_parameters.on_nonfinite) == (3, "skip")
    assert parsed.device_parameters.dp_shard == 4

    @dataclass
    class Own(LineConfig):
        training: str = "long"

    assert parse(Own(experiment="e"), ["--training", "short"]).training == "short"


def test_in_a_notebook_the_kernels_arguments_are_not_the_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "/tmp/kernel.json"])
    for shell, is_kernel in (({"IPKernelApp": {}}, True), ({"TerminalIPythonApp": {}}, False)):
        ipython = ModuleType("IPython")  # not installed here
        vars(ipython).update(get_ipython=lambda shell=shell: SimpleNamespace(config=shell))
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        if is_kernel:
            assert parse(given()).training_parameters.n_epochs == 2
        else:
            with pytest.raises(SystemExit):
                parse(given())
    assert parse(given(), ["--seed", "3"]).seed == 3


def test_a_class_requires_what_has_no_default() -> None:
    parsed = parse(LineConfig, ["--project", "a", "--experiment", "c"])
    assert (parsed.project, parsed.group, parsed.learning_rate, len(parsed.callbacks)) == ("a", "default", 1e-3, 0)
    with pytest.raises(SystemExit) as raised:
        parse(LineConfig, ["--project", "a"])
    assert raised.value.code == 2


def test_sizes_flags_durations_and_none_have_a_text_form() -> None:
    parsed = parse(
        given(),
        "--device-parameters.dp-shard 4 --training-parameters.fast-dev-run --training-parameters.max-time 90 "
        "--training-parameters.n-epochs None".split(),
    )
    assert (parsed.device_parameters.dp_shard, parsed.device_parameters.dp_replicate) == (4, "auto")
    assert parsed.training_parameters.fast_dev_run is True
    assert parsed.training_parameters.max_time == timedelta(seconds=90)
    assert parsed.training_parameters.n_epochs is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--training-parameters.n-epochs", "three"], "Error parsing --training-parameters.n-epochs: "),
        (["--device.precision", "bf17"], "'bf17' for argument '--device-parameters.precision'. Expected one of"),
        (["--training.n-epochs=-1"], "n_epochs=-1 is too small. Use an integer of at least 0."),
        (["--training-parameters.n_epochs", "--seed", "3"], "for argument '--training-parameters.n-epochs'"),
        (["--learning-rate"], "for argument '--learning-rate'. Expected 1"),
        (["--project", "a/b"], "project='a/b'"),
        (["--callbacks", "x"], "Unrecognized options: --callbacks, x"),
        (["--foo.bar", "3"], "Unrecognized options: --foo.bar, 3"),
        (["extra"], "Unrecognized options: extra"),
        (["--training-parameters.fast-dev-run", "true"], "Unrecognized options: true"),
    ],
)
def test_a_wrong_argument_is_code_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse(given(), arguments)
    assert raised.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


MEANT = {
    "--training.n-epoch 3": "--training-parameters.n-epochs",
    "--batch-size 3": "--training-parameters.train-batch-size",
    "--learning-rte 3": "--learning-rate",
    "--training.no-fast-dev-runs": "--training-parameters.no-fast-dev-run",
}


@pytest.mark.parametrize("arguments", MEANT)
def test_an_unknown_flag_is_answered_with_the_nearest(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    for start in (given(), LineConfig):
        required = ["--project", "p", *REST] if start is LineConfig else []
        with pytest.raises(SystemExit) as raised:
            parse(start, [*required, *arguments.split()])
        assert raised.value.code == 2
        said = capsys.readouterr().err
        assert "Perhaps you meant:" in said
        assert MEANT[arguments] in said


@dataclass
class DictConfig(BaseTrainerConfig):
    extra_rates: dict[str, float] = field(default_factory=lambda: {"k": 1.0, "q": 2.0})


def test_a_dict_that_has_keys_is_set_key_by_key(capsys: pytest.CaptureFixture[str]) -> None:
    start = DictConfig(project="p", group="g", experiment="e")
    assert parse(start, ["--extra-rates.k", "4"]).extra_rates == {"k": 4.0, "q": 2.0}
    with pytest.raises(SystemExit):
        parse(start, ["--extra_rates", "k", "4"])
    assert "--extra-rates.k" in capsys.readouterr().err


def helped(flag: str, config: Any, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as raised:
        parse(config, [flag])
    assert raised.value.code == 0
    return capsys.readouterr().out


def test_help_lists_every_flag_and_verbose_help_has_each_fields_own_line(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--help", "-h"):
        text = " ".join(helped(flag, given(), capsys).replace("│", " ").split())
        assert "--learning-rate FLOAT (default: 0.001)" in text
        assert "--training-parameters.train-batch-size INT (default: 8)" in text
        assert "Optimizer steps over the whole run." not in text
        assert "--callbacks" not in text
    text = " ".join(helped("--help-verbose", given(), capsys).replace("│", " ").split())
    assert "Peak learning rate." in text
    assert "Optimizer steps over the whole run. None sets no limit." in text
    assert "(required)" in helped("--help", LineConfig, capsys)


@dataclass(frozen=True)
class Part:
    size: int = 1
    names: tuple[str, ...] = ()


@dataclass
class PartsConfig(dt.DreamTrainerConfig):
    project: str = "mine"
    training_parameters: TrainingParameters = field(default_factory=lambda: TrainingParameters(n_epochs=5))
    optional: Part | None = None
    part: Part = field(default_factory=lambda: Part(size=3))
    """What is nested."""


REST = ["--group", "g", "--experiment", "e"]


@pytest.mark.parametrize("of_class", [False, True])
def test_a_flag_into_a_section_that_is_none_builds_it(of_class: bool) -> None:
    def parsed(*arguments: str, **values: Any) -> PartsConfig:
        start = PartsConfig if of_class and not values else PartsConfig(group="g", experiment="e", **values)
        return parse(start, [*arguments, *(REST if of_class else ())])

    assert parsed().optional is None
    assert parsed("--optional.size", "4").optional == Part(size=4)
    config = parsed("--optional.names", "a", "b", "--seed", "3", "--optional.size=2")
    assert (config.optional, config.seed) == (Part(2, ("a", "b")), 3)
    assert parsed("--optional.size", "4", optional=Part(1, ("x",))).optional == Part(4, ("x",))
    assert parsed("--optional", "None", optional=Part()).optional is None


@dataclass
class WholeConfig(dt.DreamTrainerConfig):
    width: int = 3


class FromLine(dt.DreamTrainer):
    config: WholeConfig

    def configure_models(self) -> None: ...

    def configure_optimizers(self) -> None: ...

    def configure_dataloaders(self) -> tuple[None, None]:
        return None, None

    def training_step(self, batch: Any, batch_idx: int) -> None: ...


def test_a_trainer_is_built_from_the_command_line() -> None:
    words = ["--experiment", "e", "--width", "5", "--training.max-steps", "3"]
    for start in (None, WholeConfig(experiment="other", width=1), WholeConfig):
        trainer = FromLine.from_cli(start, words)
        assert (trainer.config.width, trainer.config.training_parameters.max_steps) == (5, 3)
        assert trainer.config.experiment == "e"
    with pytest.raises(ConfigError, match=r"BaseTrainer.from_cli\(\) does not know which config to build. Write"):
        dt.BaseTrainer.from_cli(args=words)
