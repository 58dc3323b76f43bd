"""ModelSummary and TrainerSummary: two tables about the models and the run, before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, NamedTuple, TextIO

import torch
import torch.nn as nn

from dream_trainer.checks import check_integer, refuse
from dream_trainer.compat.pytorch import local_tensor
from dream_trainer.config.parameter_class import is_ours
from dream_trainer.config.serialize import leaves, to_dict
from dream_trainer.data.loader import loader_batch_size
from dream_trainer.errors import in_a_line
from dream_trainer.events.callback import Callback
from dream_trainer.modules.class_change import own_class
from dream_trainer.nested import map_tensors
from dream_trainer.optim.optimizers import values_in_whole
from dream_trainer.screen import format_bytes, format_count, print_table
from dream_trainer.trainer.abstract import AbstractTrainer


class Size(NamedTuple):
    """Totals of a module's parameters, each counted once, as whole tensors even if sharded."""

    parameters: int
    trainable: int
    num_bytes: int
    local_bytes: int  # bytes of this rank's shards


def size_of(module: nn.Module) -> Size:
    parameters_of_module = list(module.parameters())
    return Size(
        parameters=sum(p.numel() for p in parameters_of_module),
        trainable=sum(p.numel() for p in parameters_of_module if p.requires_grad),
        num_bytes=sum(p.numel() * p.element_size() for p in parameters_of_module),
        local_bytes=sum(local_tensor(p).numel() * p.element_size() for p in parameters_of_module),
    )


class ModelSummary(Callback):
    """Prints the models' modules with their parameters, shapes, dtypes and memory, once they are set up.

    Args:
        depth: Levels of submodules to show; 0 only shows the models.
        inputs: Arguments of a model's forward, by model, to show the FLOPs of a call (a multiply-add is two). Only
            their shapes and types count: nothing is computed.
        file: Output file. None is standard output.

    Raises:
        ConfigError: A value is invalid; at the end of setup, also if `inputs` has an unknown model.
    """

    main_process_only: ClassVar[bool] = True

    def __init__(
        self, depth: int = 2, *, inputs: Mapping[str, Sequence[Any]] | None = None, file: TextIO | None = None
    ) -> None:
        check_integer("depth", depth, minimum=0)
        self.depth = depth
        given: Any = {} if inputs is None else inputs
        are_arguments = isinstance(given, Mapping) and all(isinstance(part, tuple | list) for part in given.values())
        refuse(not are_arguments, f"inputs={inputs!r} are no arguments by model, such as {{'model': (x,)}}.")
        self._inputs = dict(given)
        self._flops: dict[str, str] = {}
        self._file = file

    def post_configure(self, trainer: AbstractTrainer) -> None:
        """Counts FLOPs, as long as no forward would need the other ranks."""
        self._flops = {}  # an earlier trainer's
        self._count_flops(trainer)

    def post_setup(self, trainer: AbstractTrainer) -> None:
        unknown = sorted(self._inputs.keys() - trainer.named_models().keys())
        refuse(unknown, f"inputs has {unknown}, which are not models. There are {list(trainer.named_models())}.")
        self._count_flops(trainer)  # of what `setup` assigned, without SetupMixin
        for name, model in trainer.named_models().items():
            size = size_of(model)
            share = "" if size.local_bytes == size.num_bytes else f", {format_bytes(size.local_bytes)} on this rank"
            if trainer.world.stages > 1:
                share += f", this rank's part of {format_count(values_in_whole(model))} parameters in "
                share += f"{trainer.world.stages} stages"
            title = (
                f"{name}: {format_count(size.parameters)} parameters, {format_count(size.trainable)} trainable, "
                f"{format_bytes(size.num_bytes)}{share}{self._flops.get(name, '')}"
            )
            rows = list(_module_rows(name, model, self.depth))
            print_table(
                title, ("module", "class", "parameters", "trainable", "shape", "dtype", "memory"), rows, self._file
            )

    def _count_flops(self, trainer: AbstractTrainer) -> None:
        for name, model in trainer.named_models().items():
            if name not in self._inputs or name in self._flops:
                continue
            try:
                self._flops[name] = f", {format_count(forward_flops(model, self._inputs[name]))} FLOPs per forward"
            except Exception as exc:  # a summary stops no run
                self._flops[name] = f", FLOPs unknown ({in_a_line(exc)})"


def forward_flops(model: nn.Module, inputs: Sequence[Any]) -> int:
    """FLOPs of `model(*inputs)` on meta copies, a multiply-add counted as two."""
    from torch.func import functional_call
    from torch.utils.flop_counter import FlopCounterMode

    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    on_meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        functional_call(model, on_meta, tuple(map_tensors(lambda tensor: tensor.to("meta"), list(inputs))))
    return int(counter.get_total_flops())


def _module_rows(name: str, module: nn.Module, depth: int, level: int = 0) -> Iterator[tuple[str, ...]]:
    size = size_of(module)
    direct = dict(module.named_parameters(recurse=False))
    shapes = ", ".join(f"{key} {'x'.join(map(str, p.shape)) or 'scalar'}" for key, p in direct.items())
    yield (
        "  " * level + name,
        own_class(module).__name__,
        f"{size.parameters:,}",
        "all" if size.trainable == size.parameters else f"{size.trainable:,}",
        shapes,
        ", ".join(dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in module.parameters())),
        format_bytes(size.num_bytes),
    )
    if level < depth:
        for child_name, child in module.named_children():
            yield from _module_rows(child_name, child, depth, level + 1)


class TrainerSummary(Callback):
    """Prints the plan of the run: mesh, batch arithmetic, steps, limits and cadences, before the first step.

    Args:
        file: Where to; None is standard output.
    """

    main_process_only: ClassVar[bool] = True

    def __init__(self, *, file: TextIO | None = None) -> None:
        self._file = file

    def pre_fit(self, trainer: AbstractTrainer) -> None:
        world, parameters = trainer.world, trainer.config.training_parameters
        mesh = " x ".join(f"{name} {size}" for name, size in world.mesh_shape._asdict().items() if size > 1)
        limits = ("n_epochs", "max_steps", "max_samples", "max_tokens", "max_time")
        set_limits = [f"{name}={value}" for name in limits if (value := getattr(parameters, name)) is not None]
        batch_size, accumulation = loader_batch_size(trainer.train_dataloader), trainer.accumulation_steps
        parts = f"micro-batch x {accumulation} accumulated x {world.dp_size} data-parallel"
        batch = f"unknown {parts}"
        if batch_size is not None:
            batch = f"{batch_size * accumulation * world.dp_size:,} samples = {batch_size} {parts}"
        steps = trainer.steps_per_pass
        rows = [
            ("run directory", str(trainer.run_dir)),
            ("device", f"{world.device.type}, {world.world_size} rank{'s' if world.world_size > 1 else ''}"),
            ("precision", trainer.config.device_parameters.precision),
            ("mesh", mesh or "one rank"),
            ("global batch", batch),
            ("steps per pass over the data", "unknown" if steps is None else f"{steps:,}"),
            ("validation", ", ".join(name or "one loader" for name in trainer.val_dataloaders) or "none"),
            ("limits", ", ".join(set_limits) or "one epoch"),
            ("total steps", "unknown" if trainer.total_steps is None else f"{trainer.total_steps:,}"),
        ]
        if trainer.global_step:
            rows.append(("resumed at", f"step {trainer.global_step:,}, {trainer.samples_seen:,} samples seen"))
        # Of our classes of parameters what differs from their defaults; two of them are shown above.
        for field in fields(trainer.config):
            value = vars(trainer.config)[field.name]
            if is_dataclass(value) and field.name not in ("training_parameters", "device_parameters"):
                kind: Any = type(value)
                usual = dict(leaves(to_dict(kind()))) if is_ours(kind) else {}
                changed = [
                    f"{name}={part!r}" for name, part in leaves(to_dict(value)) if (name, part) not in usual.items()
                ]
                rows += [(field.name.removesuffix("_parameters"), ", ".join(changed))] if changed else []
        print_table(type(trainer).__name__, (), rows, self._file)
