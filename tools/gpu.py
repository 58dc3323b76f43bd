"""What `tools/gpu.sh` runs: tests, then benches, each with a time limit of its own, and one report of them all.

    tools/gpu.sh [--dry] [--out FOLDER] [--only NAME]

The report is written anew after each part, so that nothing is lost with what comes later. The exit status is 1 if any
part failed or ran out of time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
SECONDS = 540
"""Seconds for everything."""


@dataclass(frozen=True)
class Part:
    """One program.

    Attributes:
        name: For the report and `--only`.
        arguments: Of python; `{json}` becomes the path of the file in which figures are to be.
        seconds: Its time limit.
    """

    name: str
    arguments: Sequence[str]
    seconds: float


@dataclass
class Outcome:
    """What came of a part.

    Attributes:
        name: The part's.
        failure: Why it failed; None if it did not.
        seconds: Wall time.
        figures: What it wrote; None if nothing.
        text: The end of what it printed.
    """

    name: str
    failure: str | None
    seconds: float
    figures: Any = field(repr=False)
    text: str = field(repr=False)


def parts(is_dry: bool) -> list[Part]:
    """All parts, with the same options in a rehearsal and other sizes."""
    device = "cpu" if is_dry else "cuda"
    sizes = (
        "--model tiny --batch 2 --seq-len 64 --no-compile"
        if is_dry
        else "--model 1b --batch 4 --seq-len 2048 --compile"
    )
    llama = f"--device {device} --precision bf16 {sizes} --json {{json}}"
    steps = "--steps 3 --warm-up 1 --pairs 1" if is_dry else "--steps 20 --warm-up 5 --pairs 2"
    repeats = f"--batches {500 if is_dry else 1500} --repeat {1 if is_dry else 2} --json {{json}}"
    rows = "ready bare,ready accumulation,ready everyday"  # "full" needs packages that such a machine may lack
    tests = "-m pytest -o addopts=-ra -p no:cacheprovider -q -m gpu tests/gpu" + (" --on-cpu" if is_dry else "")
    return [
        Part("tests", tests.split(), 200),
        Part("llama", f"tools/bench/llama.py {llama} {steps}".split(), 150),
        Part("saves", f"tools/bench/llama_save.py {llama}".split(), 120),
        Part("small models", [*f"tools/bench/overhead.py --device {device} {repeats} --only".split(), rows], 70),
    ]


def run(part: Part, seconds: float) -> Outcome:
    """Runs a part for at most so long; ends all its processes."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        figures, output = Path(folder, "figures.json"), Path(folder, "output")
        command = [sys.executable, *(argument.replace("{json}", str(figures)) for argument in part.arguments)]
        with output.open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"TMPDIR": folder},
            )
            try:
                status = process.wait(timeout=seconds)
                failure = None if status == 0 else f"exit status {status}"
            except subprocess.TimeoutExpired:
                failure = f"not done after {seconds:.0f} s"
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found = json.loads(figures.read_text()) if figures.exists() else None
        text = output.read_text(errors="replace")[-6000:]
    return Outcome(part.name, failure, time.monotonic() - started, found, text)


def machine() -> dict[str, str]:
    """What was measured on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    return {
        "date": str(date.today()),
        "device": device,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
    }


def write_report(folder: Path, outcomes: Sequence[Outcome], *, is_dry: bool) -> None:
    """Writes the page and its JSON into `folder`."""
    about = machine()
    found = {**about, "is_rehearsal": is_dry, "parts": [asdict(outcome) for outcome in outcomes]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / "gpu.md").write_text("\n".join(markdown(about, outcomes, is_dry=is_dry)) + "\n")


def markdown(about: dict[str, str], outcomes: Sequence[Outcome], *, is_dry: bool) -> Iterable[str]:
    yield "# A rehearsal without a GPU" if is_dry else "# On a GPU"
    yield ""
    yield f"`tools/gpu.sh` on {about['date']}: {about['device']}, torch {about['torch']}, Python {about['python']}."
    yield ""
    yield "| part | | seconds |"
    yield "| --- | --- | --- |"
    for outcome in outcomes:
        yield f"| {outcome.name} | {outcome.failure or 'done'} | {outcome.seconds:.0f} |"
    for outcome in outcomes:
        yield from ("", f"## {outcome.name}", "", "```text", outcome.text.strip().replace("```", "'''"), "```")


def run_all(chosen: Sequence[Part], folder: Path, *, is_dry: bool, seconds: float = SECONDS) -> int:
    """Runs the parts in turn while there is time; returns the number that failed."""
    ends = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    for part in chosen:
        limit = min(part.seconds, ends - time.monotonic())
        outcome = run(part, limit) if limit > 1 else Outcome(part.name, "no time was left", 0.0, None, "")
        outcomes.append(outcome)
        write_report(folder, outcomes, is_dry=is_dry)
        print(f"{part.name}: {outcome.failure or 'done'} ({outcome.seconds:.0f} s)\n{outcome.text}", flush=True)
    return sum(outcome.failure is not None for outcome in outcomes)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="rehearse on the CPU, with small sizes")
    parser.add_argument("--out", type=Path, help="folder of the report; docs/measurements, or runs/gpu with --dry")
    parser.add_argument("--only", default="", help="only parts whose name contains this")
    options = parser.parse_args(arguments)
    if not options.dry and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --dry rehearses without one")
    folder = options.out or (ROOT / "runs/gpu" if options.dry else ROOT / "docs/measurements")
    every = parts(options.dry)
    chosen = [part for part in every if options.only in part.name]
    if not chosen:
        parser.error(f"--only {options.only}: no part has that in its name. Parts: {', '.join(p.name for p in every)}")
    return 1 if run_all(chosen, folder, is_dry=options.dry) else 0


if __name__ == "__main__":
    sys.exit(main())
