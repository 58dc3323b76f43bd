"""Each private or moving PyTorch name behind `torch_compat`, exercised."""

import gc
import inspect
import os
import pickle
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from dream_trainer.compat import pytorch
from tests.worlds import gloo_group, run_world


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_workers_that_a_loader_keeps_are_ended_and_it_starts_new_ones(
    kind: type[DataLoader[int]], own_children: Callable[[], set[BaseProcess]]
) -> None:
    loader = kind(list(range(8)), 2, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    next(iter(loader))
    workers = own_children()
    pytorch.end_workers(loader)
    assert workers
    assert not any(worker.is_alive() for worker in workers)
    assert len(list(loader)) == 4
    pytorch.end_workers(loader)
    pytorch.end_workers([1, 2])


def test_in_place_writes_are_counted_also_through_views_and_on_meta() -> None:
    tensor = torch.empty(3, 3, device="meta")
    before = pytorch.write_count(tensor)
    tensor[0].normal_()
    tensor.view(-1).mul_(2)
    assert pytorch.write_count(tensor) == before + 2
    with torch.inference_mode():
        assert pytorch.write_count(torch.ones(2).mul_(2)) == 0


def test_hooks_on_gradients_are_known_of_either_kind() -> None:
    changed, accumulated, neither = (torch.nn.Parameter(torch.ones(1)) for _ in range(3))
    changed.register_hook(lambda gradient: gradient)
    accumulated.register_post_accumulate_grad_hook(lambda parameter: None)
    assert [pytorch.has_hooks(one) for one in (changed, accumulated, neither)] == [True, True, False]


def test_the_globals_of_dcp_metadata_are_those_that_a_save_of_tensors_refers_to(tmp_path: Path) -> None:
    asked = set()

    class Recorder(pickle.Unpickler):
        def find_class(self, module_name: str, global_name: str, /) -> Any:
            asked.add((module_name, global_name))
            return super().find_class(module_name, global_name)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save({"w": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    with (tmp_path / ".metadata").open("rb") as file:
        Recorder(file).load()
    assert asked - pytorch.dcp_metadata_globals() == {("torch", "float32")}
    assert {name for _, name in pytorch.dcp_metadata_globals() - asked} <= {"PosixPath"}


def flight_recorder_environment(directory: Path, **set_by_user: str) -> dict[str, str]:
    """The variables that begin with TORCH_ after the flight recorder was enabled."""
    with mock.patch.dict(os.environ, set_by_user):
        for name in [name for name in os.environ if name.startswith("TORCH_") and name not in set_by_user]:
            del os.environ[name]
        pytorch.enable_flight_recorder(directory)
        return {name: value for name, value in os.environ.items() if name.startswith("TORCH_")}


def test_the_flight_recorder_writes_where_it_is_told_unless_the_user_said_otherwise(tmp_path: Path) -> None:
    assert pytorch.recorded_collectives() is None  # before there is a group
    found = flight_recorder_environment(tmp_path / "records")
    assert found == {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/records/rank_", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    assert (tmp_path / "records").is_dir()
    theirs = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/x/y_", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    assert flight_recorder_environment(tmp_path / "others", **theirs) == theirs
    assert not (tmp_path / "others").exists()


def test_this_torch_reads_the_names_that_the_flight_recorder_is_enabled_by() -> None:
    directory = Path(torch.__file__).parent
    library = (directory / "lib/libtorch_cpu.so").read_bytes()
    header = (directory / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp").read_text()
    assert b"TORCH_FR_DUMP_TEMP_FILE" in library
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" in header


def test_a_block_may_run_before_its_model_once_that_is_the_root(group_of_one: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    expected = model(model[0](torch.ones(2)))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    pytorch.begin_root(model)
    found = model(model[0](torch.ones(2)))  # else an error: the block would be a root of its own
    assert torch.equal(found, expected)


def test_memory_history_and_snapshots_are_where_they_were() -> None:
    """They run on CUDA only: tests/gpu/test_memory.py."""
    record, dump = map(inspect.signature, (torch.cuda.memory._record_memory_history, torch.cuda.memory._dump_snapshot))
    assert [*record.bind("all", max_entries=10).arguments.values()] == ["all", 10]
    assert [*dump.bind("file").arguments.values()] == ["file"]


def tf32_by_either_setting() -> None:
    assert not pytorch.tf32_is_allowed()
    with pytorch.tf32_products():
        assert pytorch.tf32_is_allowed()
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"
    torch.backends.cuda.matmul.fp32_precision = "ieee"  # from here on the older setting may not be read
    with pytorch.tf32_products():
        assert pytorch.tf32_is_allowed()
        assert torch.backends.cudnn.conv.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert not pytorch.tf32_is_allowed()


def test_tf32_is_switched_by_whichever_setting_the_process_uses() -> None:
    run_world(tf32_by_either_setting, 1, fresh=True)  # the newer setting cannot be taken back


def test_nothing_keeps_a_mesh_and_with_it_its_connections_once_it_is_forgotten() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("one", "other"))
    split = distribute_tensor(torch.ones(2, 2), mesh, [Shard(0), Shard(1)])
    # PyTorch 2.11 itself holds what it learnt of a product for ever, so there the sum stands in for it.
    result = split @ split if torch.__version__ >= "2.13" else split + split
    result.redistribute(placements=[Replicate(), Shard(0)]).full_tensor()
    del result
    left = weakref.ref(mesh)
    del mesh, split
    dist.destroy_process_group()
    pytorch.forget_meshes()
    gc.collect()
    assert left() is None


def test_whole_parameters_stand_in_for_shards_and_forwards_leave_them_there(group_of_one: None) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    out = model(torch.ones(2))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with torch.no_grad(), pytorch.whole_parameters(model):
        found, inside = model.state_dict(), model(torch.ones(2))
        after = dict(model.named_parameters())
    outside = model(torch.ones(2))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert all(torch.equal(after[name], value) for name, value in expected.items())
    assert torch.equal(inside, out)
    assert outside.dtype == torch.bfloat16
    assert all(isinstance(p, DTensor) for p in model.parameters())


def test_the_stores_that_checkers_see_are_those_of_torch_distributed() -> None:
    assert (pytorch.Store, pytorch.PrefixStore, pytorch.TCPStore) == (dist.Store, dist.PrefixStore, dist.TCPStore)


def test_autograd_takes_tensors_for_unchanged_that_are_written_to_unnoticed() -> None:
    weight = torch.ones(2, requires_grad=True)
    squares = weight.square().sum()
    before = weight._version
    with torch.no_grad(), pytorch.unnoticed_writes([weight]):
        weight.fill_(3.0)
    assert weight._version == before
    squares.backward()  # as of what is there now
    assert weight.grad is not None
    assert weight.grad.tolist() == [6.0, 6.0]


def test_norms_are_known_by_what_they_keep() -> None:
    norms = [torch.nn.BatchNorm1d(2), torch.nn.SyncBatchNorm(2), torch.nn.InstanceNorm3d(2), torch.nn.LayerNorm(2)]
    assert [isinstance(norm, pytorch.NormWithStatistics) for norm in norms] == [True, True, True, False]
    assert [isinstance(norm, pytorch.AnyBatchNorm) for norm in norms] == [True, True, False, False]


def test_a_value_is_of_one_tensor_and_goes_with_it_also_when_its_python_object_is_back() -> None:
    known, holder = pytorch.OfTensors(), torch.nn.Linear(2, 2)
    first, equal = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    known[first] = known[holder.weight] = "a file"
    assert (known.get(first), known.get(equal)) == ("a file", None)
    product = holder.weight * 2  # the graph holds the tensor
    del first, holder
    assert len(known) == 1
    assert known.get(product.grad_fn.next_functions[0][0].variable) == "a file"


def test_schedulers_inside_pytorchs_schedulers_are_found_at_any_depth() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    warmup, cosine, constant = LinearLR(optimizer), CosineAnnealingLR(optimizer, 5), ConstantLR(optimizer)
    sequence = SequentialLR(optimizer, [warmup, cosine], [2])
    chain = ChainedScheduler([sequence, constant], optimizer)
    assert pytorch.inner_schedulers(chain) == [sequence, warmup, cosine, constant]
    assert pytorch.inner_schedulers(sequence) == [warmup, cosine]
    assert pytorch.inner_schedulers(warmup) == []


def test_steps_are_counted_in_parts_where_the_whole_has_no_count() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    chain = ChainedScheduler([LinearLR(optimizer), ConstantLR(optimizer)], optimizer)
    sequence = SequentialLR(optimizer, [LinearLR(optimizer), CosineAnnealingLR(optimizer, 5)], [2])
    assert (pytorch.steps_taken(chain), pytorch.steps_taken(sequence)) == (0, 0)
    optimizer.step()
    for _ in range(3):
        chain.step()
        sequence.step()
    assert (pytorch.steps_taken(chain), pytorch.steps_taken(sequence)) == (3, 3)


@gloo_group()
def step_both() -> None:
    values = torch.arange(12.0).view(4, 3)
    alone, plain = torch.nn.Parameter(values.clone()), torch.nn.Parameter(values.clone())
    split = torch.nn.Parameter(distribute_tensor(values, init_device_mesh("cpu", (2,)), [Shard(0)]))
    for parameters in ([alone], [plain, split]):
        optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = parameter.detach() * 2
            with pytorch.plain_beside_dtensors():
                optimizer.step()
    assert torch.equal(plain, alone)
    assert torch.equal(split.full_tensor(), alone)
    assert not torch.equal(alone, values)


def test_a_fused_optimizer_steps_dtensors_and_plain_parameters_as_one_alone() -> None:
    run_world(step_both, 2)


def plan_of(**tensors: torch.Tensor) -> SavePlan:
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(tensors, is_coordinator=True)
    return planner.create_local_plan()


def half_of(plan: SavePlan) -> SavePlan:
    """As of a rank that has the first half of the rows."""
    (item,) = plan.items
    assert item.tensor_data is not None
    chunk = replace(item.tensor_data.chunk, sizes=torch.Size((2, 3)))
    return replace(plan, items=[replace(item, tensor_data=replace(item.tensor_data, chunk=chunk))])


def test_what_several_ranks_have_is_written_by_one_and_parts_are_taken() -> None:
    both = plan_of(a=torch.zeros(4, 3), b=torch.zeros(2))
    merged, metadata = pytorch.merge_plans_of_parts([both, both])
    theirs, their_metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan([both, both])
    assert (merged, metadata) == (theirs, their_metadata)
    assert sorted(item.index.fqn for plan in merged for item in plan.items) == ["a", "b"]

    half = half_of(plan_of(a=torch.zeros(4, 3)))
    with pytest.raises(ValueError, match="Failed to validate"):
        DefaultSavePlanner(flatten_state_dict=False).create_global_plan([half, half])
    _, metadata = pytorch.merge_plans_of_parts([half, half])
    record = metadata.state_dict_metadata["a"]
    assert record.size == torch.Size((4, 3))
    assert [chunk.sizes for chunk in record.chunks] == [torch.Size((2, 3))]
