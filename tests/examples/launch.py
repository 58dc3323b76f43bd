"""Running the examples as a newcomer does: as scripts, alone or under torchrun."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from tests import worlds
from tests.api import read_jsonl
from tests.programs import run_programs

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"


def run_script(script: Path, *arguments: str, cwd: Path, n_processes: int = 1, timeout: float = 150.0) -> str:
    """Runs `script` in `cwd` and returns what it printed; a failure is shown with its output.

    Args:
        script: The script.
        *arguments: Its arguments.
        cwd: Working directory, to which runs are written.
        n_processes: 1 runs plain Python, more run torchrun; without `--all` both are forked.
        timeout: Seconds after which it is killed.
    """
    # The package need not be installed to be tested. COLUMNS would decide how wide a piped table may be.
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [str(script), *arguments]
    if worlds.start_method == "forkserver":
        code = (
            f"import runpy, sys\nsys.argv = {command!r}\nsys.path.insert(0, {str(script.parent)!r})\n"
            f"runpy.run_path({str(script)!r}, run_name='__main__')"
        )
        ended = run_programs(code, n_processes, cwd, environment, timeout)
        assert {rank.status for rank in ended} == {0}, "\n".join([script.name, *map(str, ended)])
        return "".join(rank.output for rank in ended)
    launcher = (
        [] if n_processes == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_processes}"]
    )
    done = subprocess.run(
        [sys.executable, *launcher, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{script.name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def metric(run: Path, name: str) -> dict[int, float]:
    """What the run in a directory logged under a name, by step."""
    return {line["step"]: line[name] for line in read_jsonl(run / "metrics.jsonl") if name in line}


@contextmanager
def modules_of(*folders: Path) -> Iterator[None]:
    """Inside, an example's modules are imported by their plain names, as its scripts do.

    Other examples have modules of these names too, so all are forgotten at the end.
    """
    path, before = list(sys.path), set(sys.modules)
    sys.path[:0] = map(str, folders)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(EXAMPLES)):
                del sys.modules[name]


@contextmanager
def imported(name: str, *folders: Path) -> Iterator[ModuleType]:
    """Inside, the module `name`, with those of examples that it imports: see `modules_of`."""
    new = {name, "tools.parity"} - set(sys.modules)
    with modules_of(*folders):
        yield importlib.import_module(name)
    for module in new:
        sys.modules.pop(module, None)
