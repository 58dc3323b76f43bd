"""World: the ranks of a trainer, with this one's device, the mesh, and how they are launched and left."""

from __future__ import annotations

import atexit
import gc
import os
import socket
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dream_trainer.checks import refuse
from dream_trainer.compat.pytorch import (
    Store,
    all_gather_flat,
    forget_meshes,
    is_dtensor,
    keep_own_generators,
    set_group_timeout,
    sum_scatter_flat,
)
from dream_trainer.config.device_parameters import (
    DeviceParameters,
    MeshShape,
    parameter_shape,
    refuse_split_copies,
    resolve_mesh,
)
from dream_trainer.distributed.hosts import host_name, meet_hosts, place_among_hosts
from dream_trainer.distributed.job import all_arrive, announce, end_job, job_store, store_for_group
from dream_trainer.distributed.ranks import Ranks, refuse_differences
from dream_trainer.errors import ConfigError, StepError

if TYPE_CHECKING:
    from dream_trainer.distributed.heartbeat import Heartbeat

# How long a rank with an exception waits for the others to have one too: they may still be at their last step.
_ALONE_AFTER_SECONDS = 5.0


class _Launches:
    """The worlds of this process on several ranks."""

    count = 0  # so far
    are_open = 0  # those that use the default process group
    own_group = False  # whether they made it
    heartbeat: Heartbeat | None = None  # of several hosts


_launches = _Launches()


def environment_ranks() -> tuple[int, int, int]:
    """(rank, local rank, world size) as torchrun sets them; (0, 0, 1) in a plain process."""
    rank = int(os.environ.get("RANK", "0"))
    return rank, int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("WORLD_SIZE", "1"))


def choose_device(name: str, local_rank: int) -> torch.device:
    accelerator = None if name == "cpu" else torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if accelerator is None else accelerator.type
    if name not in ("auto", kind):
        has = "cpu only" if kind == "cpu" else f"cpu and {kind}"
        raise ConfigError(f'device="{name}" is not on this machine ({has}). Use device="auto" or "cpu".')
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} has no {kind} device: this host has {count}. Start torchrun with "
            f"--nproc_per_node={count}."
        )
    return torch.device(kind) if kind == "mps" else torch.device(kind, local_rank)


class World(Ranks):
    """This process's place among the ranks of a trainer; docs/collectives.md has the attributes for users.

    Attributes:
        parameter_device: Device of its parameters, gradients and optimizer state.
        mesh_shape: Sizes of the mesh's dimensions.
        parameter_mesh: The mesh that parameters lie on: cp is 1 there, and its ranks are more shards, or more replicas.
        parameter_shape: Sizes of its dimensions.
        data_rank: This rank's index among those that see different data (dp_replicate x dp_shard x cp): of other
            samples, or of other positions in them.
        data_group: The process group of those ranks; None if it is all ranks.
        workers: Number of groups of neighbouring ranks that step on their own; 1: all step together.
        worker: The group of this rank, 0-based.
        step_size: Ranks of a group whose gradients each step averages.
        step_group: The process group of this rank's group; None if it is all of those ranks.
        across_workers: The ranks with the same place as this one in their groups; None if there is no other.
    """

    def __init__(
        self, parameters: DeviceParameters, *, shard_by_default: bool, workers: int | Literal["hosts"] = 1
    ) -> None:
        """Joins the process group and lays the mesh; "auto" gives the ranks to dp_shard if `shard_by_default`."""
        rank, self.local_rank, world_size = environment_ranks()
        place = place_among_hosts(_launches.count)
        self._ranks_per_host = world_size if place is None else len(place.ranks)
        self.workers = (1 if place is None else place.n_hosts) if workers == "hosts" else workers
        of_worker = max(1, world_size // self.workers)  # more workers than ranks are refused below
        per_host = self._ranks_per_host if self.workers == 1 else of_worker
        self.mesh_shape: MeshShape = resolve_mesh(parameters, world_size, shard_by_default, per_host)
        self.step_size = of_worker // self.mesh_shape.pp
        self.parameter_shape = parameter_shape(parameters, self.mesh_shape, shard_by_default)
        refuse_split_copies(self.mesh_shape, self.workers)
        self.worker = rank // self.step_size if self.workers > 1 else 0
        pp, *_, cp, tp = self.mesh_shape
        super().__init__(rank, world_size, None, data_copies=tp, sample_copies=cp * tp, stages=pp)
        self.device = choose_device(parameters.device, self.local_rank)
        self.mesh: DeviceMesh | None = None
        self.parameter_mesh: DeviceMesh | None = None
        self.further_groups: list[dist.ProcessGroup] = []
        self._time_out = timedelta(seconds=parameters.start_timeout_seconds)
        self._parameters = parameters
        self.parameter_device = self.device
        if parameters.cpu_offload and self.device.type != "cpu":
            if self.world_size == 1:
                raise ConfigError(
                    f"cpu_offload=True on one {self.device.type} device: FSDP2 offloads what it shards, from two ranks "
                    "on. Start more processes, or use cpu_offload=False."
                )
            self.parameter_device = torch.device("cpu")
        if self.device.type not in ("cpu", "mps"):
            torch.accelerator.set_device_index(self.device)
        if self.world_size > 1:
            self._join()
        self.dp_size = self.mesh_shape.dp_replicate * self.mesh_shape.dp_shard
        groups = make_groups(self.world_size, self.mesh_shape, self.workers)
        self.data_group, self.step_group, self.across_workers = groups
        self._set_time_outs(parameters.start_timeout_seconds)
        self.dp_rank = self.rank // self.sample_copies % self.dp_size
        self.data_size = self.dp_size * cp
        self.data_rank = self.rank // self.data_copies % self.data_size
        self._number = _launches.count
        self._meetings: Counter[str] = Counter()
        self._open = True

    def averaging_group(self) -> dist.ProcessGroup | None:
        """Ranks that average gradients of plain parameters; None if there are no others."""
        if self.data_size == 1 or self.step_size == 1:
            return None
        return self.step_group or self.data_group or dist.group.WORLD

    @property
    def stage_rank(self) -> int:
        return self.rank // (self.world_size // self.stages)

    @property
    def divided_samples(self) -> str:
        """The setting that gives ranks parts of the same samples, and so different numbers of labels; "" without."""
        return self.mesh_shape.setting("cp") if self.mesh_shape.cp > 1 else ""

    def send_numbers(self, numbers: list[int], to: int, group: dist.ProcessGroup) -> tuple[dist.Work, Tensor]:
        """Sends a rank of `group`, by its place there, numbers that it does not know; to be waited for."""
        tensor = torch.tensor(numbers, device=self.device)
        work = dist.isend(tensor, group=group, group_dst=to)
        assert work is not None  # this rank is of the group
        return work, tensor

    def receive_numbers(self, count: int, source: int, group: dist.ProcessGroup) -> list[int]:
        numbers = torch.empty(count, dtype=torch.int64, device=self.device)
        dist.recv(numbers, group=group, group_src=source)
        found: list[int] = numbers.tolist()
        return found

    def stage_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the other stages of this one's model, in order; None without stages."""
        return None if self.mesh is None or self.stages == 1 else self.mesh["pp"].get_group()

    def all_gather_with_gradient(self, values: Tensor) -> Tensor:
        """The rows of all data-parallel ranks, with gradients: for losses that compare samples, as contrastive ones do.

        In backward, each rank gets the sum over ranks of the gradients of its rows. If every rank's loss is the mean
        over its own samples, the step's mean over ranks is the gradient of the mean over all (docs/collectives.md).
        Every rank must call this equally often, and run the backward equally often.

        Args:
            values: `[n, ...]` on `device`; n may differ between ranks.

        Returns:
            `[sum of n, ...]`, in the order of `dp_rank`; `values` itself on one data-parallel rank.

        Raises:
            ValueError: `values` has no rows to gather: it is 0-dim, or a DTensor.
            RanksDifferError: Other sizes than n, or dtypes, differ.
            ConfigError: Groups of ranks step on their own, share samples, or hold stages of models.
        """
        self.refuse_if_forbidden()
        shape = self.mesh_shape
        divided = [shape.setting(dimension) for dimension in ("pp", "cp") if getattr(shape, dimension) > 1]
        refuse(
            divided,
            f"all_gather_with_gradient gathers the rows of whole samples of all ranks. Under {' and '.join(divided)} "
            "some ranks have parts of them, or no outputs. Use 1 with losses that compare samples.",
        )
        refuse(
            self.workers > 1,
            f"all_gather_with_gradient speaks to all ranks in each step, and {self.workers} groups of them step on "
            "their own. Train with workers=1.",
        )
        group = self.averaging_group()
        what = "a DTensor" if is_dtensor(values) else "0-dim" if values.dim() == 0 else ""
        refuse(
            what,
            f"all_gather_with_gradient gathers rows, and these values are {what}. Give it a plain tensor [n, ...]: "
            "values.full_tensor() of a DTensor, values.unsqueeze(0) of a single number.",
            ValueError,
        )
        return values if group is None else rows_of_all(values, group, self)

    def _join(self) -> None:
        timeout = timedelta(seconds=self._parameters.start_timeout_seconds)
        _launches.count += 1
        if not dist.is_initialized():
            self._make_default_group(timeout)
            _launches.own_group = True
        _launches.are_open += 1
        self.cpu_group = self._make_cpu_group(timeout)
        sizes = {name: size for name, size in vars(self._parameters).items() if type(size) is int}
        mesh = {**self.mesh_shape._asdict(), **sizes}  # laid in two ways, it would hang
        refuse_differences(self, {"mesh": mesh}, "Use the same device_parameters on every rank.")
        lay = partial(init_device_mesh, self.device.type, mesh_dim_names=MeshShape._fields)
        self.mesh = self.parameter_mesh = lay(tuple(self.mesh_shape))
        keep_own_generators(self.mesh)
        if self.parameter_shape != self.mesh_shape:
            self.parameter_mesh = lay(tuple(self.parameter_shape))

    def _make_default_group(self, timeout: timedelta) -> None:
        backend, kind = "gloo", self.device.type
        if kind != "cpu":
            backend = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
        store = store_for_group(_launches.count, self.rank, self.world_size, timeout)
        job, place = job_store(), place_among_hosts(_launches.count)
        assert job is not None  # there since `store_for_group`
        announce(job, self.rank)
        if place is not None:
            meet_hosts(job, place, self.world_size, timeout_seconds=timeout.total_seconds())
            own, limit = self.connect_to_store(), self._parameters.host_timeout_seconds
            if limit is not None and own is not None:
                from dream_trainer.distributed.heartbeat import Heartbeat

                _launches.heartbeat = Heartbeat(own, job, place, limit_seconds=limit).start()
        device = self.device if kind == "cuda" else None
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.world_size, timeout=timeout, device_id=device
        )

    def _make_cpu_group(self, timeout: timedelta) -> dist.ProcessGroup:
        return cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout))

    def tell_where(self, where: Callable[[], str]) -> None:
        """Adds the position of training to the message about a lost host; `where` is called from a thread."""
        if _launches.heartbeat is not None:
            _launches.heartbeat.where, _launches.heartbeat.is_training = where, False

    def __repr__(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh_shape._asdict().items())
        return f"World(rank={self.rank} of {self.world_size}, device={self.device}, {mesh})"

    def first_step_is_done(self) -> None:
        """Shortens the groups' time-outs: compiling and loading are over, so a late rank is a lost rank."""
        self._set_time_outs(self._parameters.step_timeout_seconds)
        if _launches.heartbeat is not None:
            _launches.heartbeat.is_training = True

    def _set_time_outs(self, seconds: float) -> None:
        """How long collectives may take from now on, in every group; those of a mesh are made with torch's default."""
        if self.mesh is None or self.parameter_mesh is None:
            return
        self._time_out = timedelta(seconds=seconds)
        own = [group for group in (self.data_group, self.step_group, self.across_workers) if group is not None]
        of_meshes = (*self.mesh.get_all_groups(), *self.parameter_mesh.get_all_groups())
        for group in (None, self.cpu_group, *own, *self.further_groups, *of_meshes):
            set_group_timeout(group, self._time_out)

    def connect_to_store(self) -> Store | None:
        """A separate connection to the job's store, for a thread; None at world size 1."""
        return None if self.world_size == 1 else job_store(for_thread=True)

    @property
    def n_hosts(self) -> int:
        """Number of hosts, as far as torchrun has said that there are several."""
        return -(-self.world_size // self._ranks_per_host)

    @property
    def host_number(self) -> int:
        return self.host_of(self.rank)

    def host_of(self, rank: int) -> int:
        return rank // self._ranks_per_host

    @property
    def host(self) -> str:
        name = socket.gethostname()
        return host_name(self.host_number, name) if self.n_hosts > 1 else name

    def links(self, ranks: Sequence[int]) -> str:
        n_hosts = len(set(map(self.host_of, ranks)))
        return "inside the host" if n_hosts == 1 else f"between {n_hosts} hosts"

    def further_group(self) -> dist.ProcessGroup:
        """A group of all ranks whose collectives meet no others, with the time-out of a step's; every rank calls it."""
        group = cast("dist.ProcessGroup", dist.new_group(timeout=self._time_out))
        self.further_groups.append(group)
        return group

    def beside(self) -> Ranks:
        """The same ranks on a further gloo group with the long time-out, for a thread; every rank calls it."""
        if self.world_size == 1:
            return Ranks.alone()
        group = self._make_cpu_group(timedelta(seconds=self._parameters.start_timeout_seconds))
        copies = {"data_copies": self.data_copies, "sample_copies": self.sample_copies, "stages": self.stages}
        return Ranks(self.rank, self.world_size, group, **copies)

    # -- ends

    def fail(self, exc: BaseException) -> NoReturn:
        """Ends this rank after an exception, without waiting for anyone: the others may be inside any collective."""
        end_job(exc, job_store(), rank=self.rank, world_size=self.world_size)

    def fail_unless_all_do(self, exc: Exception) -> None:
        """Ends this rank if only it has the exception: if caught, its collectives would not match the others'."""
        if self._open and not all_arrive(f"exception {self._number}", self.world_size, _ALONE_AFTER_SECONDS):
            self.fail(exc)

    def meet(self, ranks: Sequence[int], where: str) -> None:
        """Waits for `ranks` before a collective that users' code caused, perhaps only on some of them."""
        self.refuse_if_forbidden()
        key = f"{self._number}/{','.join(map(str, ranks))}/{where}"
        self._meetings[key] += 1
        seconds = self._time_out.total_seconds() / 2
        said = (
            f"rank {self.rank} read {where} outside of its block's forward, which gathers it from ranks "
            f"{', '.join(map(str, ranks))}, and not all of these have. Read it on all of them, in the same order, or "
            "raise fsdp_parameters.min_group_mib above the model's size."
        )
        if not all_arrive(key, len(ranks), seconds, times=self._meetings[key], waits_for=said):
            raise StepError(said)

    def close(self, timeout_seconds: float | None = None) -> None:
        """Leaves the process group; the last world of the process destroys it. Safe to call twice. Without the barrier
        and the short sleep a third of runs were aborted (docs/measurements/ranks.md#leaving-a-process-group)."""
        if not self._open:
            return
        self._open = False
        if self.world_size == 1:
            return
        _launches.are_open -= 1
        if _launches.are_open == 0 and _launches.own_group and dist.is_initialized():
            seconds = self._time_out.total_seconds() if timeout_seconds is None else timeout_seconds
            said = (
                "this rank closes its trainer and waits for other ranks, which have not. If it is the only one to do "
                "so (`if trainer.is_main: trainer.close()`), have every rank close."
            )
            have_all = all_arrive(f"{_launches.count}/leaving", self.world_size, seconds, waits_for=said)
            if not have_all and timeout_seconds is not None:
                raise RuntimeError(said)
            dist.barrier(group=self.cpu_group)
            if _launches.heartbeat is not None:
                _launches.heartbeat.close()
                _launches.heartbeat = None
            dist.destroy_process_group()
            _launches.own_group = False
            self.cpu_group = self.data_group = self.step_group = self.across_workers = None
            self.mesh = self.parameter_mesh = None
            forget_meshes()
            gc.collect()
            time.sleep(0.1)
        self.cpu_group = self.mesh = self.parameter_mesh = None
        self.further_groups.clear()


def close_at_exit(world: World) -> None:
    def leave() -> None:
        if "last_value" in vars(sys):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        try:
            world.close(timeout_seconds=10)
        except RuntimeError as error:  # a rank left in another way; there is nothing left to wait for
            sys.stderr.write(f"[rank {world.rank}] leaves without the others: {error}\n")

    atexit.register(leave)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, operation: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.of_backward = adjoint, operation
        return operation(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None, None]:
        return linear(gradients[0], *ctx.of_backward), None, None


def linear(values: Tensor, operation: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]) -> Tensor:
    """`operation(values)`; its backward is `adjoint`, and the other way round, so second gradients are exact too."""
    result: Tensor = _Linear.apply(values, operation, adjoint)  # type: ignore[no-untyped-call]
    return result


def gathered_rows(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, ...] of each rank to [ranks * n, ...] of all."""
    gathered = own.new_empty((group.size() * len(own), *own.shape[1:]))
    all_gather_flat(gathered, own.contiguous(), group)
    return gathered


def summed_rows(every: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks * n, ...] of each rank to the sum over ranks of this one's [n, ...]."""
    summed = every.new_empty((len(every) // group.size(), *every.shape[1:]))
    sum_scatter_flat(summed, every.contiguous(), group)
    return summed


def rows_of_all(values: Tensor, group: dist.ProcessGroup, ranks: Ranks) -> Tensor:
    """The rows of all ranks of `group`, in rank order, with gradients; a collective of all `ranks`."""
    form = f"rows of {list(values.shape[1:])} in {values.dtype}"
    facts = ranks.all_gather(torch.tensor([len(values), zlib.crc32(form.encode())]))
    if (facts[:, 1] != facts[0, 1]).any():
        refuse_differences(ranks, {"values to gather": form}, "Only the number of rows may differ.")
    lengths = facts[ranks.rank % ranks.data_copies :: ranks.data_copies, 0].tolist()
    longest = max(lengths)
    gather, add = partial(gathered_rows, group=group), partial(summed_rows, group=group)
    if min(lengths) == longest:
        return linear(values, gather, add)
    padded = F.pad(values, (0, 0) * (values.dim() - 1) + (0, longest - len(values)))
    parts = linear(padded, gather, add).split(longest)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def make_groups(world_size: int, shape: MeshShape, workers: int) -> tuple[dist.ProcessGroup | None, ...]:
    """Three groups: this rank's stage's ranks that see different data; ranks whose gradients a step averages; ranks
    with this one's place in groups that step independently. None if a group is all ranks or a single one."""
    ranks = list(range(world_size))
    of_stage = world_size // shape.pp
    stages = [ranks[first : first + of_stage] for first in range(0, world_size, of_stage)]
    same_data = [stage[place :: shape.tp] for stage in stages for place in range(shape.tp)]
    data = own_group(same_data) if len(same_data) > 1 else None
    if workers == 1:
        return data, own_group(stages) if shape.pp > 1 else None, None
    size = world_size // workers
    within = [ranks[first : first + size] for first in range(0, world_size, size)]
    return data, own_group(within), own_group([ranks[place::size] for place in range(size)])


def own_group(groups: list[list[int]], **options: Any) -> dist.ProcessGroup:
    """This rank's group of those that divide all ranks."""
    return cast("dist.ProcessGroup", dist.new_subgroups_by_enumeration(groups, **options)[0])


def ranks_of_host(world: World, host: int) -> list[int]:
    return [rank for rank in range(world.world_size) if world.host_of(rank) == host]


def on_host(world: World, beside: Ranks, *, timeout_seconds: float) -> Ranks:
    """Those of `beside` that are on this host, numbered from 0, for the same thread; every rank calls it."""
    if world.n_hosts == 1:
        return beside
    hosts = [ranks_of_host(world, host) for host in range(world.n_hosts)]
    group = own_group(hosts, timeout=timedelta(seconds=timeout_seconds), backend="gloo")
    own = hosts[world.host_number]
    return Ranks(own.index(world.rank), len(own), group)
