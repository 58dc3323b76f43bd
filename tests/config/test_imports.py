"""What importing configs costs: nothing that is not used."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dream_trainer


def run(program: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, **options)


PROGRAM = (
    "from dream_trainer.config.trainer_config import BaseTrainerConfig, check_config\n"
    "check_config(BaseTrainerConfig(project='p', group='g', experiment='e'))\n"
    "from dream_trainer import LoggerMixin, callbacks, loggers\n"
    "[getattr(package, name) for package in (callbacks, loggers) for name in package.__all__]\n"
)


@pytest.mark.pitfall(51)
def test_no_optional_package_is_imported_before_it_is_used() -> None:
    result = run(
        f"import sys\n{PROGRAM}"
        "optional = {'tyro', 'cattrs', 'rich', 'wandb', 'tensorboard', 'torchmetrics', 'matplotlib', 'PIL', 'psutil'}\n"
        "print(sorted(optional & set(sys.modules)))\n"
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.pitfall(51)
def test_importing_the_trainer_imports_nothing_but_torch_and_checksums() -> None:
    result = run(
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "from dream_trainer import DreamTrainer\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names\n"
        "print(sorted(new - {'dream_trainer'}))\n"
    )
    assert result.stdout.strip() == "['xxhash']"


def test_a_run_imports_no_room_that_its_config_does_not_name(tmp_path: Path) -> None:
    result = run(
        "import sys, torch\n"
        "from dream_trainer import simple\n"
        "data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.zeros(8, 2))\n"
        "model, loss = torch.nn.Linear(4, 2), torch.nn.functional.mse_loss\n"
        "simple.Trainer(model, loss=loss, train=data, batch_size=4, epochs=1).fit()\n"
        "rooms = {'checkpoint.remote_run', 'checkpoint.local_checkpoints', 'distributed.heartbeat', "
        "'trainer.mixins.local_sgd', 'stores.ownership', 'parallel.pipeline'}\n"
        "print('dream_trainer.checkpoint.saver' in sys.modules)\n"
        "print(sorted({'dream_trainer.' + room for room in rooms} & set(sys.modules)))\n",
        cwd=tmp_path,
    )
    assert result.stdout.splitlines()[-2:] == ["True", "[]"]


def test_windows_is_told_what_works_there_in_one_sentence_each() -> None:
    result = run("import sys; sys.platform = 'win32'\nimport dream_trainer")
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert "Windows" in last
    assert "WSL" in last


def test_the_public_packages_are_attributes_that_load_on_first_use() -> None:
    result = run(
        "import sys\n"
        "import dream_trainer as dt\n"
        "print(sorted(name for name in sys.modules if name.startswith('dream_trainer.')), 'torch' in sys.modules)\n"
        "for name in ('callbacks', 'config', 'data', 'errors', 'loggers', 'optim', 'simple'):\n"
        "    assert getattr(dt, name) is sys.modules[f'dream_trainer.{name}']\n"
        "print(dt.callbacks.EMA.__name__, dt.simple.Trainer.__name__, dt.errors.ConfigError.__name__)\n"
    )
    assert result.stdout.splitlines() == [
        "['dream_trainer.lazy_names', 'dream_trainer.version'] False",
        "EMA Trainer ConfigError",
    ]


def test_a_name_that_lies_deeper_or_is_misspelt_is_told_where_it_is() -> None:
    with pytest.raises(
        AttributeError, match=r"no attribute 'LearningRate'\. It is dream_trainer\.callbacks\.LearningRate"
    ):
        dream_trainer.LearningRate  # type: ignore[attr-defined]
    result = run("import dream_trainer as dt\ndt.DreamTrainr")
    assert result.stderr.rstrip().endswith("Did you mean: 'DreamTrainer'?")
