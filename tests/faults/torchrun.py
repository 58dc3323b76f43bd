"""Starting the job under a real torchrun."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.job import Job
from tests.trainer.small import ROOT


@contextmanager
def torchrun(job: Job, directory: Path, max_restarts: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """The agent of the job's ranks; all its processes are gone afterwards. It writes to `torchrun.err`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.ranks}"]
    command += [f"--max-restarts={max_restarts}", "--monitor-interval=0.1", "-m", "tests.faults.job", job.to_json()]
    with (directory / "torchrun.err").open("w") as file:
        agent = subprocess.Popen(
            command,
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield agent
    finally:
        # Each worker has a session of its own.
        for path in sorted(directory.glob("attempts/*/rank_*.pid")) if agent.poll() is None else []:
            _kill_group(int(path.read_text()))
        _kill_group(agent.pid)
        agent.wait()


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def report(directory: Path) -> str:
    return (directory / "torchrun.err").read_text()[-6000:]
