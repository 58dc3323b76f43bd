"""Tokens per second, MFU and peak memory of the llama example beside a plain PyTorch loop of the same model.

    python tools/bench/llama.py         # on CUDA: the 1b preset, bf16, compiled
    python tools/bench/llama.py --model tiny --batch 2 --seq-len 64 --precision fp32 --no-compile --steps 5

Both sides run alone in a process of their own, one after the other, `--pairs` times: the same weights' shapes, kernels,
precision, fused AdamW, clipping and batches; in half precision on CUDA attention is the flash kernel or an error. The
loop's rates are taken between two synchronisations, after `--warm-up`
steps. The framework's side runs with `torch.cuda.set_sync_debug_mode("error")` once warm, so a step that waits for the
device ends the bench with an error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples" / "llama"))

import torch
import torch.nn.functional as F
from model import PRESETS, Llama
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import dream_trainer as dt
from dream_trainer.callbacks.throughput import peak_flops

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Meter:
    """Seconds of the steps after warm-up, measured between two synchronisations."""

    def __init__(self, warm_up: int, steps: int, device: torch.device) -> None:
        self.first, self.last, self.device = warm_up, warm_up + steps, device
        self.started = self.seconds = 0.0

    def finished(self, step: int) -> None:
        """Takes note that so many steps are done."""
        if step in (self.first, self.last):
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.seconds, self.started = now - self.started, now


def batches(arguments: argparse.Namespace, device: torch.device) -> Iterator[Tensor]:
    """Random tokens that lie on the device already, so that loading does not count."""
    generator = torch.Generator(device).manual_seed(0)
    vocabulary = PRESETS[arguments.model].vocab_size
    shape = (arguments.batch, arguments.seq_len + 1)
    ready = [torch.randint(vocabulary, shape, device=device, generator=generator) for _ in range(4)]
    return (ready[index % 4] for index in range(arguments.warm_up + arguments.steps))


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """Mean nats per token, the logits in float32 as cross_entropy under autocast has them."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def plain(arguments: argparse.Namespace, device: torch.device) -> float:
    """Seconds of a loop as one writes it by hand."""
    with device:
        model = Llama(config_of(arguments))
    model.init_weights()
    if arguments.compile:
        for layer in model.layers:
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    if arguments.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    half = DTYPES.get(arguments.precision)
    context: Any = contextlib.nullcontext() if half is None else torch.autocast(device.type, half, cache_enabled=False)
    meter = Meter(arguments.warm_up, arguments.steps, device)
    for step, tokens in enumerate(batches(arguments, device), start=1):
        with context:
            loss = loss_of(model, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.finished(step)
    return meter.seconds


class Framework(dt.BaseTrainer, dt.SetupMixin, dt.CompileMixin):
    """The same with Dream Trainer."""

    def __init__(self, config: Any, arguments: argparse.Namespace) -> None:
        super().__init__(config)
        self.arguments = arguments

    def configure_models(self) -> None:
        self.model = Llama(config_of(self.arguments))

    def init_weights(self) -> None:
        self.model.init_weights()

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def configure_dataloaders(self) -> tuple[Any, None]:
        self.meter = Meter(self.arguments.warm_up, self.arguments.steps, self.world.device)
        return list(batches(self.arguments, self.world.device)), None

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        loss = loss_of(self.model, batch)
        self.backward(loss)
        self.step(self.model, self.optimizer)
        return {"loss": loss}

    def post_train_step(self) -> None:
        is_cuda = self.world.device.type == "cuda"
        if is_cuda:
            torch.cuda.set_sync_debug_mode("default")
        self.meter.finished(self.global_step)
        if is_cuda and self.meter.first <= self.global_step < self.meter.last:
            torch.cuda.set_sync_debug_mode("error")


@dataclass
class FrameworkConfig(dt.BaseTrainerConfig, dt.SetupConfigMixin, dt.CompileConfigMixin):
    """What the bench sets."""


def framework(arguments: argparse.Namespace, device: torch.device) -> float:
    """Seconds of the same loop as a trainer."""
    config = FrameworkConfig(
        project="bench",
        group="llama",
        experiment=arguments.model,
        device_parameters=dt.DeviceParameters(
            device=device.type, precision=arguments.precision, compile=arguments.compile
        ),
        training_parameters=dt.TrainingParameters(
            n_epochs=1, train_batch_size=arguments.batch, gradient_clip_norm=1.0, on_nonfinite="raise"
        ),
    )
    with Framework(config, arguments) as trainer:
        trainer.fit()
        return trainer.meter.seconds


def config_of(arguments: argparse.Namespace) -> Any:
    """The preset, with tables as long as the samples."""
    return replace(PRESETS[arguments.model], max_seq_len=arguments.seq_len)


def attention(arguments: argparse.Namespace, device: torch.device) -> Any:
    """A context in which attention is the flash kernel, where there is one."""
    if device.type == "cuda" and arguments.precision in DTYPES:
        return sdpa_kernel(SDPBackend.FLASH_ATTENTION)
    return contextlib.nullcontext()


def measure(side: str, arguments: argparse.Namespace) -> None:
    """Prints one side's figures as JSON; in a process of its own."""
    device = torch.device(arguments.device)
    with attention(arguments, device):
        seconds = {"plain": plain, "framework": framework}[side](arguments, device)
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    print(json.dumps({"seconds": seconds, "memory": memory}))


def run(side: str, arguments: list[str]) -> dict[str, float]:
    """One side's figures, from a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), *arguments, "--side", side]
        finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ)
    if finished.returncode != 0:
        raise SystemExit(f"{side} failed:\n{finished.stderr[-3000:]}")
    found: dict[str, float] = json.loads(finished.stdout.strip().splitlines()[-1])
    return found


def report(arguments: argparse.Namespace) -> None:
    """Runs both sides in turn and prints the medians."""
    device = torch.device(arguments.device)
    config = config_of(arguments)
    tokens = arguments.batch * arguments.seq_len * arguments.steps
    pairs = [(run("plain", sys.argv[1:]), run("framework", sys.argv[1:])) for _ in range(arguments.pairs)]
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    peak = peak_flops(name, DTYPES.get(arguments.precision, torch.float32), tf32=arguments.precision == "tf32")
    print(f"{name}, torch {torch.__version__}, {arguments.model}, {arguments.precision}, "
          f"batch {arguments.batch} x {arguments.seq_len} tokens, compile={arguments.compile}")  # fmt: skip
    figures: dict[str, Any] = {"device": name, "model": arguments.model, "precision": arguments.precision}
    for index, side in enumerate(("plain", "framework")):
        rates = [tokens / pair[index]["seconds"] for pair in pairs]
        rate, gib = statistics.median(rates), pairs[0][index]["memory"] / 2**30
        mfu = None if peak is None else rate * config.flops_per_token(arguments.seq_len) / peak
        figures[side] = {"tokens_per_second": rates, "mfu": mfu, "peak_memory_gib": gib}
        used = "" if mfu is None else f"{mfu:7.1%} MFU"
        print(f"{side:10}{rate:12.0f} tokens/s ({min(rates):.0f}..{max(rates):.0f}) {used} {gib:8.2f} GiB")
    speed = statistics.median(plain["seconds"] / ours["seconds"] for plain, ours in pairs)
    memory = pairs[0][1]["memory"] / max(1, pairs[0][0]["memory"])
    figures |= {"speed": speed, "memory": memory}
    print(f"framework / plain: {speed:.3f} of the speed, {memory:.3f} of the memory ({len(pairs)} pairs)")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures))


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of a bench of this model."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    is_cuda = torch.cuda.is_available()
    parser.add_argument("--model", choices=list(PRESETS), default="1b" if is_cuda else "tiny")
    parser.add_argument("--device", default="cuda" if is_cuda else "cpu")
    parser.add_argument("--precision", choices=["fp32", "tf32", "bf16", "fp16"], default="bf16" if is_cuda else "fp32")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=is_cuda)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=2048 if is_cuda else 128)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    return parser


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--side", choices=["plain", "framework"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is None:
        report(arguments)
    else:
        measure(arguments.side, arguments)


if __name__ == "__main__":
    main()
