"""Configs from files: merged in order, flags last; what is wrong is named with its place, file and the nearest name."""

import json
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import dream_trainer as dt
from dream_trainer.config import load_config, parse, to_dict
from dream_trainer.config.config_files import read_plain
from dream_trainer.errors import ConfigError
from dream_trainer.events.callback import Callback

COSINE = dt.ScheduleParameters(name="cosine")


@dataclass
class FileConfig(dt.DreamTrainerConfig):
    learning_rate: float = 0.1
    schedule: dt.ScheduleParameters = COSINE
    weights: Mapping[str, float] = field(default_factory=lambda: {"a": 1.0})


NAMES = {"project": "p", "group": "g", "experiment": "e"}


def given() -> FileConfig:
    return FileConfig(**NAMES, callbacks=[Callback()])  # type: ignore[arg-type]


def write(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


def files() -> list[str]:
    return [
        write("base.yaml", "learning_rate: 1e-3\ntraining_parameters:\n  n_epochs: 3\n  max_time: 90\n"),
        write("more.toml", "weights = { b = 2.0 }\n[training_parameters]\ntrain_batch_size = 8\n"),
        write("last.json", '{"schedule": {"warmup_steps": 5}, "training_parameters": {"n_epochs": 7}}'),
    ]


def test_files_are_merged_in_order_field_by_field_and_the_last_word_counts() -> None:
    before = given()
    config = load_config(before, *files())
    assert (config.learning_rate, config.weights) == (1e-3, {"b": 2.0})
    assert config.schedule == dt.ScheduleParameters(name="cosine", warmup_steps=5)
    training = config.training_parameters
    assert (training.n_epochs, training.train_batch_size, training.max_time) == (7, 8, timedelta(seconds=90))
    assert config.callbacks is before.callbacks
    assert before.learning_rate == 0.1
    assert load_config(before, write("empty.yaml", "")).learning_rate == 0.1


@pytest.mark.parametrize("form", ["--config {}", "--config={}"])
def test_on_the_command_line_flags_count_over_files_wherever_they_stand(form: str) -> None:
    words = " ".join(form.format(file) for file in files()).split()
    config = parse(given(), ["--learning-rate", "0.5", *words, "--training-parameters.n-epochs", "9"])
    assert (config.learning_rate, config.training_parameters.n_epochs) == (0.5, 9)
    assert config.training_parameters.train_batch_size == 8
    config = parse(FileConfig, [*words, "--project", "a", "--group", "b", "--experiment", "c"])
    assert (config.project, config.learning_rate) == ("a", 1e-3)
    assert parse(FileConfig, ["--config", write("names.json", json.dumps(NAMES))]).experiment == "e"


def test_a_run_starts_from_another_one_s_config_under_its_own_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="dream_trainer")
    theirs = FileConfig(
        project="theirs",
        group="old",
        experiment="first",
        learning_rate=0.7,
        runs_dir="there",
        callbacks=[Callback()],
        checkpoint_parameters=dt.CheckpointParameters(resume=4, keep_last=2),
    )
    theirs.run_dir.mkdir(parents=True)
    write(str(theirs.run_dir / "config.json"), json.dumps(to_dict(theirs)))
    write(str(theirs.run_dir / "run.json"), "{}")
    for path in (theirs.run_dir, theirs.run_dir / "config.json"):
        config = load_config(given(), path, write("names.yaml", "experiment: second"))
        assert (config.project, config.experiment, config.runs_dir) == ("p", "second", None)
        assert (config.learning_rate, config.checkpoint_parameters.keep_last) == (0.7, 2)
        assert config.checkpoint_parameters.resume == "auto"
    assert "left out: project, group, experiment, runs_dir, callbacks, checkpoint_parameters.resume" in caplog.text


@dataclass(frozen=True)
class Inner:
    a: int = 1
    b: tuple[int, ...] = (1, 2)


@dataclass
class NestedConfig(dt.DreamTrainerConfig):
    optimizer: dt.OptimizerParameters = field(default_factory=lambda: dt.OptimizerParameters(lr=3e-4))
    maybe: Inner | None = None
    inner: Inner = field(default_factory=Inner)
    activation: Callable[..., Any] = abs


def nested(**values: Any) -> NestedConfig:
    return NestedConfig(**NAMES, **values)  # type: ignore[arg-type]


def test_what_a_file_does_not_name_in_a_section_stays_as_the_default_or_the_instance_has_it() -> None:
    names, decay = write("names.json", json.dumps(NAMES)), write("decay.yaml", "optimizer: {weight_decay: 0.1}")
    lr = write("lr.yaml", "optimizer: {lr: 0.9}")
    assert load_config(NestedConfig, names, decay).optimizer == dt.OptimizerParameters(lr=3e-4, weight_decay=0.1)
    assert load_config(NestedConfig, names, lr, decay).optimizer == dt.OptimizerParameters(lr=0.9, weight_decay=0.1)
    chosen = nested(optimizer=dt.OptimizerParameters(lr=0.5))
    assert load_config(chosen, decay).optimizer == dt.OptimizerParameters(lr=0.5, weight_decay=0.1)


def test_a_section_that_may_be_none_is_changed_field_by_field() -> None:
    a, b = write("a.yaml", "maybe: {a: 4}"), write("b.yaml", "maybe: {b: [7]}")
    assert load_config(nested(), a, b).maybe == Inner(a=4, b=(7,))
    assert load_config(nested(maybe=Inner(a=9, b=(3,))), b).maybe == Inner(a=9, b=(7,))
    assert load_config(nested(maybe=Inner()), write("none.yaml", "maybe:")).maybe is None
    with pytest.raises(ConfigError, match=r"sets maybe\.bb, and Inner has no field bb"):
        load_config(nested(), write("wrong.yaml", "maybe: {bb: 1}"))


@dataclass
class RequiringConfig(dt.DreamTrainerConfig):
    data_parts: int = field(kw_only=True)


def test_what_a_class_has_no_default_for_comes_as_a_flag_in_any_form() -> None:
    file = write("a.yaml", "project: p\ngroup: g\nseed: 3\n")
    for words in (["--experiment=x", "--data-parts=4"], ["--data_parts", "4", "--experiment", "x"]):
        config = parse(RequiringConfig, ["--config", file, *words])
        assert (config.experiment, config.data_parts, config.seed) == ("x", 4, 3)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.yaml",
            "learning_rte: 1",
            r"a\.yaml sets learning_rte, .*no field learning_rte\. Did you mean learning_rate",
        ),
        (
            "a.toml",
            "[training_parameters]\nn_epoch = 3",
            r"a\.toml sets training_parameters\.n_epoch, .*Did you mean training_parameters\.n_epochs\?",
        ),
        ("a.yaml", "schedule: {warmup: 3}", r"Did you mean schedule\.warmup_steps\?"),
        ("a.yaml", "learning_rate: fast", "a.yaml sets learning_rate to 'fast'. It takes float."),
        ("a.yaml", "training_parameters: {max_time: 1:30}", r"max_time to '1:30'. It takes Optional\[datetime"),
        ("a.yaml", "checkpoint: {save_at_end: yes}", "sets checkpoint_parameters.save_at_end to 'yes'. It takes bool."),
        ("a.yaml", "weights: {b: x}", r"It takes collections.abc.Mapping\[str, float\]\. .*weights\['b'\]"),
        ("a.yaml", "logger_parameters: {loggers: csv}", r"It takes tuple\[str, ...\]\. Write \[csv\]\."),
        ("a.yaml", "seed: 1\nschedule: {}\nseed: 2", "a.yaml is not valid: seed is on line 1 and again on line 3."),
        (
            "a.json",
            '{"seed": 1,\n "a\\"{": {"seed": 2},\n "seed": 3}',
            "not valid: seed is on line 1 and again on line 3.",
        ),
        (
            "a.yaml",
            "training_parameters: {train_batch_size: 0}",
            "a.yaml: training_parameters: train_batch_size=0 is too small",
        ),
        ("a.yaml", "callbacks: []", "sets callbacks, which are code"),
        ("a.yaml", "- 1", "holds a list"),
        ("a.json", "{", "a.json is not valid"),
        ("a.txt", "x", "ends in '.txt'. Use .yaml"),
    ],
)
def test_what_is_wrong_in_a_file(name: str, text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(given(), write(name, text))
    with pytest.raises(SystemExit) as raised:
        parse(given(), ["--config", name])
    assert raised.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("arguments", [["--config"], ["--config", "--seed", "3"], ["--config", "none.yaml"]])
def test_a_file_that_is_not_there_is_an_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse(given(), arguments)
    assert raised.value.code == 2
    said = capsys.readouterr().err
    assert "argument --config: expected one argument" in said or "none.yaml cannot be read: No such file" in said


def test_yaml_says_what_its_text_says() -> None:
    """Core rules of YAML 1.2, as JSON reads it; 1.1 has octal, sexagesimal, dates and other booleans."""
    text = """
    integers: [12, -3, +4, 0, 0x1F, 0o17, 1_000, 0123]
    numbers: [1.5, .5, 2., 1e3, -1E-3, 1_000.5, .inf, -.INF]
    not_a_number: .nan
    texts: [1:30, 1:30:00, 2024-01-02, 0b11, y, N, off, Yes, 1.2.3, '0123', "yes", 'None', =, 1e, nan, inf, '~x', _1]
    booleans: [true, True, TRUE, false, False, FALSE]
    nothing: [null, Null, NULL, None, ~, ]
    empty:
    yes: {no: 1, 12: 2}
    base: &base {a: 1}
    merged: {<<: *base, b: 2}
    """
    found = read_plain(Path(write("a.yaml", textwrap.dedent(text))))
    assert math.isnan(found.pop("not_a_number"))
    same = {
        "integers": [12, -3, 4, 0, 31, 15, 1000, 123],
        "numbers": [1.5, 0.5, 2.0, 1000.0, -0.001, 1000.5, math.inf, -math.inf],
        "texts": [*"1:30 1:30:00 2024-01-02 0b11 y N off Yes 1.2.3 0123 yes None = 1e nan inf ~x _1".split()],
        "booleans": [True, True, True, False, False, False],
        "nothing": [None, None, None, None, None],
        "empty": None,
        "yes": {"no": 1, 12: 2},
        "base": {"a": 1},
        "merged": {"a": 1, "b": 2},
    }
    assert repr(found) == repr(same)


def test_errors_in_several_sections_of_a_file_come_as_one(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: x\ntraining: {n_epochs: -1}\nlogger: {log_every_n_steps: 0, strict: false}\n")
    with pytest.raises(ConfigError) as caught:
        dt.load_config(dt.DreamTrainerConfig(experiment="one"), file)
    text = str(caught.value)
    assert text.startswith("3 errors in the config:\n- ")
    for name in ("seed", "n_epochs", "log_every_n_steps"):
        assert name in text
