"""Replay: trains recorded steps of a run again from its checkpoint, and compares what comes out with the record. Each
rank is `python -m dream_trainer.testing.replay JOB`: the user's program, whose run is in a scratch directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from dream_trainer.checks import refuse
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.errors import CheckpointError, ConfigError
from dream_trainer.events.callback import Callback
from dream_trainer.loggers.line_files import read_jsonl
from dream_trainer.testing.program import Program, move
from dream_trainer.trainer.base import BaseTrainer

NAMES = ("project", "group", "experiment")


def replay(run: Path, start: int | None = None, end: int | None = None, program: str = "") -> tuple[bool, list[str]]:
    """Trains steps again, by default from the second newest checkpoint on; returns if all is equal, and a report."""
    from dream_trainer.checkpoint.manifest import checkpoints_root, list_checkpoints
    from dream_trainer.trainer.run_record import LOG_NAME, read_config, read_record
    from dream_trainer.weights.export import StoredTensors, difference_of_tensors

    saved = {manifest.step: manifest for manifest in list_checkpoints(checkpoints_root(run))}
    steps, record, config = sorted(saved), read_record(run), read_config(run)
    if record is None or not record.argv:
        raise ConfigError(f"{run} does not say how it was started. Give the directory of a run of this version.")
    start = steps[-2] if start is None and len(steps) > 1 else start
    if start not in saved:
        asked = "two whole checkpoints to replay between" if start is None else f"whole checkpoint of step {start}"
        raise CheckpointError(f"{run} has no {asked}. There are steps {steps}.")
    end = next((step for step in steps if step > start), record.step) if end is None else end
    last = max(record.step, steps[-1])
    refuse(not start < end <= last, f"--to {end} is not among the steps {start + 1} to {last} that were trained.")
    between = [step for step in steps if start < step <= end]
    words = [program or record.argv[0], *record.argv[1:]]
    Program(path=words[0]).script()
    before = _values(run / LOG_NAME, start, end)
    nothing = f"steps {start + 1} to {end} have no checkpoint and no logged value: there is nothing to compare"
    refuse(not between and not before, f"{nothing}. There are checkpoints of steps {steps}.")
    ranks, names = saved[start].world_size, [config[name] for name in NAMES]
    with tempfile.TemporaryDirectory(prefix="dream-trainer-replay-") as scratch:
        again = Path(scratch, *names)
        (again / "checkpoints").mkdir(parents=True)
        (again / "checkpoints" / saved[start].path.name).symlink_to(saved[start].path.resolve())
        job = Path(scratch, "job.json")
        job.write_text(json.dumps({"words": words, "names": names, "saves": between, "end": end, "runs_dir": scratch}))
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        began = time.monotonic()
        ended = subprocess.run([sys.executable, *torchrun, "-m", __spec__.name, str(job)], stdout=2)
        new = read_record(again)
        if ended.returncode or new is None or new.step < end:
            reached = "trained nothing of it" if new is None else f"reached step {new.step} of {end}"
            code = ended.returncode
            raise ConfigError(f"{' '.join(words)} {reached} (exit code {code}); see above. Is it the program?")
        after = _values(again / LOG_NAME, start, end)
        unequal = [key for key in before if key in after and repr(before[key]) != repr(after[key])]
        n_values, where = len(before.keys() & after.keys()), f"on {ranks} ranks" if ranks > 1 else "in one process"
        told = [f"replayed steps {start + 1} to {end} of {run} {where}, in {time.monotonic() - began:.0f} s"]
        told.append(f"logged values: {n_values - len(unequal)} of {n_values} are equal")
        for key in unequal[:1]:
            told.append(f"  step {key[0]}: {key[1]} was {before[key]!r} and is {after[key]!r}; the first that differs")
        is_equal = not unequal
        for step in between:
            path = saved[step].path
            replayed = StoredTensors(again / "checkpoints" / path.name)
            found = difference_of_tensors(StoredTensors(path), replayed, values=True)
            told.append(f"step {step}: {found['equal']} of {found['same_kind']} tensors are equal bit for bit")
            distances, kinds = found["max_difference"].items(), [*found["other_kind"].items()]
            weights_first = sorted(distances, key=lambda item: (item[0][:7] != "models.", -item[1]))
            told += [f"  {name} by up to {distance:.3g}" for name, distance in weights_first[:3]]
            told += [f"  {name} is in one of them" for name in (*found["only_in_a"], *found["only_in_b"])[:3]]
            told += [f"  {name} is {of_one} and {of_other}" for name, (of_one, of_other) in kinds[:3]]
            is_equal &= not any([distances, kinds, found["only_in_a"], found["only_in_b"]])
        changes = [f"{n} {v} -> {new.versions.get(n)}" for n, v in record.versions.items() if new.versions.get(n) != v]
        changes += [file for file, digest in record.code.items() if new.code.get(file, digest) != digest]
        told += [f"changed since: {change}" for change in changes]
        return is_equal, [*told, "all is as recorded" if is_equal else "FAIL: not all is as recorded"]


def _values(log: Path, start: int, end: int) -> dict[tuple[int, str], float]:
    """Values of training and validation that were logged at these steps, in order."""
    found: dict[tuple[int, str], float] = {}
    for line in read_jsonl(log, end) if log.exists() else ():
        if line["step"] > start:
            names = [name for name in line if name.startswith(("train/", "val/"))]
            found |= {(int(line["step"]), name): line[name] for name in names}
    return found


# -- in the processes of the ranks


class _Interval(Callback):
    def __init__(self, saves: list[int], end: int) -> None:
        self._saves, self._end = saves, end

    @override
    def post_train_step(self, trainer: Any) -> None:
        if trainer.global_step in self._saves:
            trainer.request_save()
        if trainer.global_step == self._end:
            trainer.request_stop("replayed")


class _ReplayedTrainer(BaseTrainer):
    """Stands before the class of the program's trainers; the run is redirected, and ends with its `fit`."""

    _job: ClassVar[dict[str, Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for config in (*args, *kwargs.values()):
            if isinstance(config, BaseTrainerConfig) and [getattr(config, n) for n in NAMES] == self._job["names"]:
                interval = _Interval(self._job["saves"], self._job["end"])
                move(config, self._job["runs_dir"], interval, {"resume": "latest"})
        super().__init__(*args, **kwargs)

    @override
    def fit(self) -> None:
        super().fit()
        if self.config.callbacks.get(_Interval) is not None:
            self.close()
            sys.stdout.flush()
            os._exit(0)  # use of the trained model is not replayed


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    path, *arguments = job["words"]
    Program(path=path, arguments=tuple(arguments)).run(_ReplayedTrainer, _job=job)
