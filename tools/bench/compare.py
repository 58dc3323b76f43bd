"""Dream Trainer and other trainers beside the same plain PyTorch loop, on the same models with real DataLoaders.

    OMP_NUM_THREADS=1 python tools/bench/compare.py [--repeat 3] [--batches 2000] [--only "map everyday"] [--markdown]

It runs whatever is installed of Lightning (Trainer and Fabric), Accelerate and transformers' Trainer:
`pip install -e '.[bench]'`. Each trainer does each task in a process of its own, one trainer after the other and
all of them once before any is repeated; inside the process it takes turns with the plain loop (`tasks.py`). A figure is
CPU time over the plain loop's: the median over repeats, with the least and the most. Tasks of one process: an MLP whose
step takes half a millisecond, from a `DataLoader` over ready batches, over samples, over a stream. Tasks of two: a GPT,
replicated, beside DistributedDataParallel.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from peers import PEERS, installed
from tasks import Row, Turns

DREAM = "Dream Trainer"
KINDS = ("bare", "accumulation", "everyday", "full")
ALONE = [(task, kind) for kind in KINDS for task in ("ready", "map", "iterable")]
REPLICATED = [("gpt", "bare"), ("gpt 25M", "bare")]
Figures = dict[str, dict[str, float]]


def measure(name: str, rows: Sequence[Row]) -> Figures:
    """All rows of one trainer, in this process."""
    if name == DREAM:
        from overhead import run
    else:
        _, run = PEERS[name]
    found = {}
    for row in rows:
        if row.kind == "full" and name != DREAM:
            continue
        turns = Turns(row) if int(os.environ.get("WORLD_SIZE", 1)) == 1 else Turns(row, turn=5, block=10)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run(row, turns)
        found[f"{row.task} {row.kind}"] = turns.result()
    return found


def in_processes(name: str, rows: Sequence[Row], ranks: int) -> Figures:
    """The same in a process of its own, or in several."""
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    tasks = json.dumps([[row.task, row.kind, row.batches] for row in rows])
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, *launcher, __file__, "--child", name, "--rows", tasks, "--result", str(result)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            print(f"{name} failed:\n{done.stderr[-1500:]}", file=sys.stderr)
            return {}
        figures: Figures = json.loads(result.read_text())
        return figures


def child(name: str, tasks: str, result: Path) -> None:
    torch.set_num_threads(1)
    figures = measure(name, [Row(*task) for task in json.loads(tasks)])
    if int(os.environ.get("RANK", 0)) == 0:
        result.write_text(json.dumps(figures))


def text(found: Sequence[dict[str, float]], clock: str) -> str:
    if not found:
        return "-"
    values = sorted(figures[clock] for figures in found)
    return f"{statistics.median(values):.2f} ({values[0]:.2f}-{values[-1]:.2f})"


def table(found: dict[str, list[Figures]]) -> list[list[str]]:
    """A line for each task, with a column for each trainer."""
    names = list(found)
    lines = [["", "plain", *names]]
    for task, kind in [*ALONE, *REPLICATED]:
        row = f"{task} {kind}"
        of_trainer = {name: [run[row] for run in runs if row in run] for name, runs in found.items()}
        everything = [figures for runs in of_trainer.values() for figures in runs]
        if not everything:
            continue
        plain = f"{statistics.median(figures['plain_us'] for figures in everything):,.0f} us"
        is_spread = (task, kind) in REPLICATED
        for clock in ("cpu", "wall") if is_spread else ("cpu",):
            label = f"{task}, 2 processes, {clock}" if is_spread else f"{kind}, {task}"
            lines.append([label, plain, *(text(runs, clock) for runs in of_trainer.values())])
    return lines


def show(lines: list[list[str]], markdown: bool) -> None:
    if markdown:
        for number, line in enumerate(lines):
            print("| " + " | ".join(line) + " |")
            if number == 0:
                print("|" + " --- |" * len(line))
        return
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Trainers beside a plain PyTorch loop.")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--only", default="", help="only tasks whose name contains this, e.g. 'gpt'")
    parser.add_argument("--processes", type=int, choices=(1, 2), help="only the tasks of so many processes")
    parser.add_argument("--trainers", nargs="*", help="default: all that are installed")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.rows, options.result)
        return
    names = options.trainers or [DREAM, *installed()]
    alone = [Row(task, kind, options.batches) for task, kind in ALONE if options.only in f"{task} {kind}"]
    spread = [
        Row(task, kind, 40 if "25M" in task else 120) for task, kind in REPLICATED if options.only in f"{task} {kind}"
    ]
    alone, spread = [] if options.processes == 2 else alone, [] if options.processes == 1 else spread
    found: dict[str, list[Figures]] = {name: [] for name in names}
    for _ in range(options.repeat):
        for name, runs in found.items():
            figures = in_processes(name, alone, 1) if alone else {}
            runs.append(figures | (in_processes(name, spread, 2) if spread else {}))
    packages = [name for name in ("torch", "lightning", "accelerate", "transformers") if find_spec(name) is not None]
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    print(f"{date.today()}, {versions}; {options.repeat} repeats; times the plain loop's")
    show(table(found), options.markdown)
    if options.json is not None:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
