"""A rank without the others, whose trainer is set up and trains two windows; tensors have no values. A tracker counts
the bytes that live on it, of what kind and made by which module, and its collectives."""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from typing_extensions import override

from dream_trainer.checks import refuse
from dream_trainer.compat.fully_shard import take_note
from dream_trainer.compat.lone_rank import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    is_traceable_wrapper_subclass_type,
    make_group_alone,
    name_of_group,
    ranks_of_group,
    without_propagation,
)
from dream_trainer.compat.pipelining import sent_is_held
from dream_trainer.compat.pytorch import has_values, in_backward, local_tensor, name_of_operation, storage_id
from dream_trainer.config.device_parameters import DeviceParameters
from dream_trainer.distributed.world import World
from dream_trainer.errors import ConfigError, DreamTrainerError, line_running_in
from dream_trainer.meta.realize import MetaPlace, Replay, put
from dream_trainer.meta.tape import Tape
from dream_trainer.nested import leaves, map_tensors
from dream_trainer.parallel.sharding import fsdp_modules
from dream_trainer.testing.checked_runs import end, write_whole
from dream_trainer.testing.program import Program, change, overridden
from dream_trainer.trainer.base import BaseTrainer, next_window
from dream_trainer.trainer.event_table import event_table
from dream_trainer.trainer.mixins.setup import Build, SetupStage
from dream_trainer.trainer.session import start

TEMPORARIES = "temporaries"  # made in backward or by the optimizer, and of no other kind


@dataclass(slots=True, eq=False)
class Piece:
    n_bytes: int
    kind: str
    module: str
    born: int
    died: float = math.inf


@dataclass(frozen=True)
class Crossing:
    """What one collective over the ranks of some dimensions does in a step."""

    operation: str
    dimensions: str
    ranks: int
    calls: int
    n_bytes: int  # of whole tensors: gathered, before they are scattered, or reduced
    sent: int  # by this rank, if a collective is a ring
    hosts: int  # on which the ranks are


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One rank's memory and traffic in a step."""

    peak: int
    at_peak: dict[str, int]  # bytes at the peak by kind
    modules: dict[str, int]  # bytes at the peak by the module that made them, or whose parameters they belong to
    traffic: list[Crossing]
    flops: int  # of matrix products and attention, with what is computed again
    read: dict[str, int]  # lines that asked a tensor for its value, with the number of times
    trainer: str
    rank: int
    world_size: int
    mesh: dict[str, int]
    settings: dict[str, Any]  # values of the config that a smaller peak would change, and a pipeline's parts of a batch
    numbers: list[int] | None = None  # the numbers that the first stage of a pipeline sends to the next


class Tracker(TorchDispatchMode):
    """Follows the storages of tensors that operations make while it is on."""

    _is_paused = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, Piece] = {}  # by storage
        self._pieces: list[Piece] = []  # also those that have died in this window
        self._tick = self._total = self._peak = self._peak_at = self._flops = 0
        self._sent = defaultdict[tuple[str, str], list[int]](list)  # bytes of each call, by operation and group
        self._read = Counter[str]()
        self._names: dict[int, str] = {}
        self._inside: list[str] = []
        self.is_users_turn = False  # whether the user's step runs, and nothing that it has called of ours to step

    # -- what lives

    def mark(self, tensors: Iterable[Any], kind: str, module: str | None = None) -> None:
        """Says what tensors are for, from their birth on."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                piece = self._note(local_tensor(tensor), kind)
                piece.kind = kind
                piece.module = piece.module if module is None else module

    def _note(self, tensor: Tensor, kind: str) -> Piece:
        storage, key = tensor.untyped_storage(), storage_id(tensor)
        if key not in self._alive:
            self._add(key, storage.nbytes(), kind, self._inside[-1] if self._inside else "")
            weakref.finalize(storage, self._remove, key).atexit = False
        return self._alive[key]

    def _add(self, key: int, n_bytes: int, kind: str, module: str) -> None:
        self._tick += 1
        piece = self._alive[key] = Piece(n_bytes, kind, module, self._tick)
        self._pieces.append(piece)
        self._total += n_bytes
        if self._total > self._peak:
            self._peak, self._peak_at = self._total, self._tick

    def _remove(self, key: int) -> Piece:
        piece = self._alive.pop(key)
        piece.died = self._tick
        self._total -= piece.n_bytes
        return piece

    # -- one window

    @contextmanager
    def window(self, modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
        """Inside, counts what `plan_of` returns."""
        self._names = {id(part): path for path, part in modules}
        for counted in (self._sent, self._read, self._inside):
            counted.clear()
        self._pieces = [*self._alive.values()]
        self._peak, self._peak_at, self._flops = self._total, self._tick, 0
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if (key := storage_id(storage)) in self._alive:
                before = self._remove(key)
                self._add(key, storage.nbytes(), before.kind, before.module)

        with ExitStack() as stack:
            # FSDP frees and remakes parameters by resizing their storages, which no mode sees.
            stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_))
            stack.enter_context(without_propagation(partial(patch.object, self, "_is_paused", new=True)))
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            stack.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            stack.enter_context(self)
            yield

    def plan_of(self, trainer: Any) -> RankPlan:
        kinds, modules = Counter[str](), Counter[str]()
        for piece in self._pieces:
            if piece.born <= self._peak_at <= piece.died:
                kinds[piece.kind] += piece.n_bytes
                modules[piece.module] += piece.n_bytes
        world, training = trainer.world, trainer.config.training_parameters
        traffic = [_crossing(world, *key, sent) for key, sent in self._sent.items()]
        pipeline: Any = vars(trainer.config).get("pipeline_parallel_parameters")
        parts = 1
        if pipeline is not None:
            parts = pipeline.stages_of_each_rank * (pipeline.microbatches or 2 * world.mesh_shape.pp)
        return RankPlan(
            peak=self._peak,
            at_peak=dict(kinds),
            modules=dict(modules),
            traffic=sorted(traffic, key=lambda row: (row.dimensions, row.operation)),
            flops=self._flops,
            read={line: times for line, times in self._read.items() if line},
            trainer=type(trainer).__name__,
            rank=world.rank,
            world_size=world.world_size,
            mesh=world.mesh_shape._asdict(),
            settings={
                "activation_checkpointing": trainer.config.device_parameters.activation_checkpointing,
                "train_batch_size": training.train_batch_size,
                "global_batch_size": training.global_batch_size,
                "accumulation": trainer.accumulation_steps,
                "parts": parts,
            },
            numbers=vars(world).get("sent_numbers"),
        )

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._inside.append(self._names.get(id(module), self._inside[-1] if self._inside else ""))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside.pop()

    # -- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(is_traceable_wrapper_subclass_type, types)):  # runs the operation on what it wraps
            return NotImplemented
        if self._is_paused:
            return func(*args, **kwargs)
        namespace, name = name_of_operation(func) or ("", "")
        has_none = bool(args) and isinstance(args[0], FakeTensor)
        if has_none and namespace == "aten" and name in ("_local_scalar_dense", "equal"):
            if self.is_users_turn:
                self._read[line_running_in(sys._current_frames()[threading.get_ident()])] += 1
            if name == "equal" or args[0].dtype is torch.bool:  # tensors are equal, and a boolean is False
                return name == "equal"
            return 1.0 if args[0].is_floating_point() else 1
        # Without values what is waited for would be another tensor.
        result = args[0] if has_none and name == "wait_tensor" else func(*args, **kwargs)
        if namespace in ("c10d", "_c10d_functional", "fsdp"):
            self._note_communication(namespace, name, args, kwargs, result)
        if (count := _FLOPS.get(name) if namespace == "aten" else None) is not None:
            self._flops += count(*args, **kwargs, out_val=result)
        is_forward = self.is_users_turn and (self._inside or not in_backward())
        kind = "activations" if is_forward else TEMPORARIES
        for tensor in leaves(result):
            if isinstance(tensor, Tensor) and not (tensor.is_meta or is_traceable_wrapper_subclass_type(type(tensor))):
                self._note(tensor, kind)
        return result

    def _note_communication(self, namespace: str, name: str, args: Any, kwargs: Any, result: Any) -> None:
        given = [tensor for tensor in leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        if namespace == "fsdp":  # copies between parameters and what is sent
            self._are_for_communication(kwargs.get("out", result))
            if name == "chunk_cat":
                self.mark(leaves(args[0]), "gradients")
            return
        group = name_of_group(args)
        if group is None or name in ("wait_tensor", "barrier"):
            return
        self._are_for_communication(given, result)
        operation, whole = _COLLECTIVES.get(name, (name.strip("_"), lambda given, result: given))
        self._sent[operation, group].append(sum(tensor.nbytes for tensor in leaves(whole(given, result))))

    def _are_for_communication(self, *tensors: Any) -> None:
        for tensor in leaves(tensors):
            if isinstance(tensor, Tensor):
                piece = self._note(tensor, "communication")
                piece.kind = "communication" if piece.kind in ("activations", TEMPORARIES) else piece.kind


def _shapes(query: Tensor, *others: Tensor) -> Iterator[tuple[int, ...]]:
    """As if each head of the query had keys of its own: PyTorch 2.11 counts no grouped ones."""
    return ((*query.shape[:2], *each.shape[2:]) for each in (query, *others))


_ATTENTION = "_scaled_dot_product_flash_attention"
_FLOPS: dict[str, Callable[..., int]] = {
    **{name[1]: count for packet, count in flop_registry.items() if (name := name_of_operation(packet)) is not None},
    f"{_ATTENTION}_for_cpu": lambda q, k, v, *_, **__: sdpa_flop_count(*_shapes(q, k, v)),
    f"{_ATTENTION}_for_cpu_backward": lambda d, q, k, v, *_, **__: sdpa_backward_flop_count(d.shape, *_shapes(q, k, v)),
}
# Their names here, and the whole tensors of what is given to them and what they return.
_COLLECTIVES: dict[str, tuple[str, Callable[[list[Tensor], Any], Any]]] = {
    "_allgather_base_": ("all_gather", lambda given, result: given[0]),
    "_reduce_scatter_base_": ("reduce_scatter", lambda given, result: given[1]),
    "alltoall_base_": ("all_to_all", lambda given, result: given[1]),
    "allreduce_": ("all_reduce", lambda given, result: given),
    "all_gather_into_tensor": ("all_gather", lambda given, result: result),
    "reduce_scatter_tensor": ("reduce_scatter", lambda given, result: given[0]),
    "all_to_all_single": ("all_to_all", lambda given, result: given[0]),
    "recv_": ("receive", lambda given, result: given),
}
_SHARES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def _crossing(world: Any, operation: str, group: str, calls: list[int]) -> Crossing:
    ranks, n_bytes = ranks_of_group(group), sum(calls)
    n, hosts = len(ranks), len({*map(world.host_of, ranks)})
    share = _SHARES[operation] * (n - 1) / n if operation in _SHARES else float(operation != "receive")
    dimensions, step = list[str](), world.world_size  # along which the ranks differ
    for name, size in world.mesh_shape._asdict().items():
        step //= size
        different = len({rank // step % size for rank in ranks})
        if different > 1:
            dimensions.append(name if different == size else f"{name} ({different} of {size})")
    return Crossing(operation, " x ".join(dimensions), n, len(calls), n_bytes, round(share * n_bytes), hosts)


class PlanError(DreamTrainerError):
    """A program cannot be planned, or has an error that a run would have too."""


class PlannedWorld(World):
    """A rank whose collectives return at once: all the others say what this one says."""

    sent_numbers: list[int] | None = None  # those that this stage of a pipeline sent to the next
    known_numbers: list[int] | None = None  # those of the first stage, taken for all

    @override
    def _make_default_group(self, timeout: timedelta) -> None:
        make_group_alone(self.rank, self.world_size)

    @override
    def _make_cpu_group(self, timeout: timedelta) -> dist.ProcessGroup:
        return cast("dist.ProcessGroup", dist.new_group())

    @override
    def _set_time_outs(self, seconds: float) -> None: ...

    @override
    def send_numbers(self, numbers: list[int], to: int, group: dist.ProcessGroup) -> tuple[dist.Work, Tensor]:
        self.sent_numbers = numbers
        return super().send_numbers(numbers, to, group)

    @override
    def receive_numbers(self, count: int, source: int, group: dist.ProcessGroup) -> list[int]:
        return cast("list[int]", self.known_numbers or self.sent_numbers)

    @override
    def _may_communicate(self) -> bool:
        return False

    @override
    def all_gather_object(self, value: Any, /) -> list[Any]:
        return [value] * self.world_size

    @override
    def all_reduce(self, values: Tensor, op: str = "sum") -> Tensor:
        return values.mul_(self.world_size) if op == "sum" else values

    @override
    def all_gather(self, values: Tensor) -> Tensor:
        return values.repeat(self.world_size, *[1] * values.ndim)


class Valueless(Replay):
    """Makes the tensors of models without values, in the places of those on meta and of real ones."""

    def __init__(self) -> None:
        self.mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
        self._like = cache(self._without_values)

    @override
    def fill(self, group: list[MetaPlace], tape: Tape, device: torch.device) -> None:
        n_bytes = tape.storages[group[0].note.ref.storage].meta.nbytes()
        storage = torch.UntypedStorage(n_bytes, device="meta")
        for place in group:
            real: Any = place.part
            if real is None:
                real = FakeTensor(self.mode, place.note.ref.view(storage), device)
                real._is_param = isinstance(place.tensor, nn.Parameter)
            put(place, real)

    @override
    def settle(self, model: nn.Module, device: torch.device) -> None:
        """Also replaces plain parameters and buffers that have values, as those of a model built elsewhere."""
        for module in model.modules():
            for slots in (module._parameters, module._buffers):
                for name, tensor in slots.items():
                    if tensor is not None and type(tensor) in (Tensor, nn.Parameter):
                        slots[name] = self._like(tensor)
        for wrapped in fsdp_modules(model):
            take_note(wrapped)

    def _without_values(self, tensor: Tensor) -> Any:
        like = self.mode.from_tensor(tensor)
        return nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like


Changes = Mapping[str, Any]  # values of a config by their place, such as `device.dp_shard`


@dataclass(frozen=True, kw_only=True)
class RankJob:
    program: Program
    rank: int = 0
    world_size: int = 1
    ranks_per_host: int = 8
    changes: Changes = field(default_factory=dict)
    numbers: list[int] | None = None  # what the first stage of a pipeline tells the next one of what it sends


_OF_TENSORS = ("materialise", "configure_optimizers", "configure_schedulers", "configure_metrics")  # stages of setup


class PlannedTrainer(BaseTrainer):
    """Stands before the user's class: a rank without the others, whose tensors have no values. `fit` sets up, trains
    two windows, and writes the plan of the one with the higher peak."""

    _job: ClassVar[RankJob] = RankJob(program=Program())
    _scratch: ClassVar[str]
    _tracker: Tracker
    _made: Valueless

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        config = overridden(config, self._job.program)
        config.callbacks = []
        config.runs_dir = f"{self._scratch}/runs"
        devices = config.device_parameters
        refuse(devices.cpu_offload, "cpu_offload=True cannot be planned: a plan counts the memory of one device.")
        refuse(devices.float8 != "none", f"float8={devices.float8!r} cannot be planned: its kernels are not the CPU's.")
        change(config, device={"device": "cpu", "verify": False, "compile": False})
        for place, value in self._job.changes.items():
            group, _, name = place.partition(".")
            change(config, **{group: {name: value}})
        super().__init__(config, *args, **kwargs)
        self._runtime.recorder = cast(Any, SimpleNamespace(listeners=lambda event, is_main: ()))
        self._runtime.events = event_table(self._runtime, is_main=True)
        vars(self)["_tracker"] = Tracker()

    @override
    def fit(self) -> None:
        runtime = self._runtime
        start(runtime)
        runtime.coordinator.begin_training()
        runtime.schedule.start()
        runtime.parallel.forget_whole()
        self._notify("pre_fit")
        self._notify("pre_epoch")
        for path, part in self._parts():
            self._tracker.mark(part.parameters(recurse=False), "parameters", path)
            self._tracker.mark(part.buffers(recurse=False), "buffers", path)
        steps: list[RankPlan] = []
        for _ in range(2):
            window = next_window(runtime)
            if window is None:
                raise ConfigError("the training data end before two steps. A plan trains two.")
            with self._without_values():
                with self._tracker.window(self._parts()):
                    self._run_window(window)
                steps.append(self._tracker.plan_of(self))
        worst = max(steps, key=lambda each: each.peak)
        self._done(replace(worst, numbers=steps[-1].numbers))  # later stages are planned with these

    def _done(self, plan: RankPlan) -> None:
        write_whole(Path(self._scratch, "found"), plan)
        end(0)

    @override
    def _wrap_step(self, step: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        inner = super()._wrap_step(step)

        def run(batch: Any, batch_idx: int) -> Any:
            self._tracker.is_users_turn = True
            inner(batch, batch_idx)
            self._tracker.is_users_turn = False
            return {}

        return run

    @override
    def move_batch(self, batch: Any, device: torch.device) -> Any:
        copy = map_tensors(self._copy, super().move_batch(batch, device))  # as it would be on another device
        self._tracker.mark(leaves(copy), "inputs")
        return copy

    def _copy(self, tensor: Tensor) -> Tensor:
        return cast(Tensor, self._made.mode.from_tensor(tensor)) if has_values(tensor) else tensor.clone()

    @override
    def step(
        self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], scheduler: Any | Sequence[Any] | None = None
    ) -> Tensor | None:
        for path, part in self._parts():
            self._tracker.mark((parameter.grad for parameter in part.parameters(recurse=False)), "gradients", path)
        self._tracker.is_users_turn = False
        norm = super().step(model, optimizer, scheduler)
        self._tracker.is_users_turn = True
        owners = {id(parameter): path for path, part in self._parts() for parameter in part.parameters(recurse=False)}
        for each in self._runtime.registry.optimizers().values():
            for parameter, state in each.state.items():
                self._tracker.mark(leaves(dict(state)), "optimizer state", owners.get(id(parameter)))
        return norm

    def _parts(self) -> Iterator[tuple[str, nn.Module]]:
        for name, model in self._runtime.registry.models().items():
            yield from model.named_modules(prefix=name)

    def _leave_out(self, *args: Any, **kwargs: Any) -> None: ...

    log = log_dict = _make_saver = _resume = _window_finished = _close = _leave_out

    # -- without values

    @override
    def _join_world(self, parameters: DeviceParameters, workers: Any) -> World:
        vars(self)["_made"] = Valueless()
        world = PlannedWorld(parameters, shard_by_default=self._shards_parameters, workers=workers)
        world.known_numbers = self._job.numbers
        return world

    @contextmanager
    def _without_values(self) -> Iterator[None]:
        try:
            with self._made.mode, sent_is_held():
                yield
        except DynamicOutputShapeException as error:
            raise PlanError(
                "the shape of a result depends on values, which a plan does not have. Use operations whose shapes are "
                "known, such as torch.where and masks instead of indexing by a condition."
            ).with_traceback(error.__traceback__) from None

    def _run_stage(self, stage: SetupStage, build: Build) -> None:
        of_user: Any = super()  # SetupMixin's, which comes after
        if stage.name == "materialise":
            build.plan.values = self._made
        with self._made.mode if stage.name in _OF_TENSORS else nullcontext():
            if stage.name != "load_pretrained":
                of_user._run_stage(stage, build)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        told = "a plan is of fit(), and the program calls evaluate() before. Give a function that returns the trainer"
        raise ConfigError(f"{told}: PROGRAM:FUNCTION.")
