"""Private or moving names of PyTorch that no test of what users see would miss on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_the_globals_of_dcp_metadata_are_those_that_a_save_of_tensors_refers_to(tmp_path: Path) -> None:
    import pickle
    import warnings

    import torch
    import torch.distributed.checkpoint as dcp

    from dream_trainer.compat.pytorch import dcp_metadata_globals

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
    assert asked - dcp_metadata_globals() == {("torch", "float32")}
    assert {name for _, name in dcp_metadata_globals() - asked} <= {"PosixPath"}


def flight_recorder_environment(directory: Path, **set_by_user: str) -> dict[str, str]:
    """The variables that begin with TORCH_ after the flight recorder was enabled."""
    import os
    from unittest import mock

    from dream_trainer.compat.pytorch import enable_flight_recorder

    with mock.patch.dict(os.environ, set_by_user):
        for name in [name for name in os.environ if name.startswith("TORCH_") and name not in set_by_user]:
            del os.environ[name]
        enable_flight_recorder(directory)
        return {name: value for name, value in os.environ.items() if name.startswith("TORCH_")}


def test_the_flight_recorder_writes_where_it_is_told_unless_the_user_said_otherwise(tmp_path: Path) -> None:
    found = flight_recorder_environment(tmp_path / "records")
    assert found == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/records/rank_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    assert (tmp_path / "records").is_dir()
    theirs = {
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/x/y_",
        "TORCH_FR_BUFFER_SIZE": "9",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
    assert flight_recorder_environment(tmp_path / "others", **theirs) == theirs
    assert not (tmp_path / "others").exists()


def test_this_torch_reads_the_names_that_the_flight_recorder_is_enabled_by() -> None:
    import torch

    directory = Path(torch.__file__).parent
    library = (directory / "lib/libtorch_cpu.so").read_bytes()
    header = (directory / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp").read_text()
    assert b"TORCH_FR_BUFFER_SIZE" in library
    assert b"TORCH_FR_DUMP_TEMP_FILE" in library
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" in header


def test_collectives_are_recorded() -> None:
    import pickle

    import torch.distributed as dist

    from dream_trainer.compat.pytorch import recorded_collectives

    assert recorded_collectives() is None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.barrier()
        records = recorded_collectives()
        assert records is not None
        assert "gloo:barrier" in {entry["profiling_name"] for entry in pickle.loads(records)["entries"]}
    finally:
        dist.destroy_process_group()


def test_results_of_operations_on_dtensors_are_not_taken_from_a_process_group_that_is_gone() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from dream_trainer.compat.pytorch import forget_meshes

    forget_meshes()  # those of tests that this process ran before
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        found = distribute_tensor(torch.ones(2), mesh, [Shard(0)]).detach().device_mesh
        dist.destroy_process_group()
        forget_meshes()
        assert found is mesh


def test_a_block_may_run_before_its_model_once_that_is_the_root() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from dream_trainer.compat.pytorch import begin_root, forget_meshes

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    expected = model(model[0](torch.ones(2)))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    begin_root(model)
    found = model(model[0](torch.ones(2)))  # else an error: the block would be a root of its own
    dist.destroy_process_group()
    forget_meshes()
    assert torch.equal(found, expected)


def test_memory_history_and_snapshots_are_where_they_were(tmp_path: Path) -> None:
    import inspect
    import pickle

    import torch

    from dream_trainer.compat.pytorch import record_memory_history, write_memory_snapshot

    if not torch.cuda.is_available():  # then torch's own refuse to run
        inspect.signature(torch.cuda.memory._record_memory_history).bind("all", max_entries=10)
        inspect.signature(torch.cuda.memory._record_memory_history).bind(None, max_entries=1)
        inspect.signature(torch.cuda.memory._dump_snapshot).bind("file")
        return
    record_memory_history(10)
    held = torch.ones(100, device="cuda")
    write_memory_snapshot(tmp_path / "memory.pickle")
    record_memory_history(0)
    with (tmp_path / "memory.pickle").open("rb") as file:
        found = pickle.load(file)
    assert any(trace["size"] >= held.nbytes for traces in found["device_traces"] for trace in traces)


def tf32_by_either_setting() -> None:
    import torch

    from dream_trainer.compat.pytorch import tf32_is_allowed, tf32_products

    assert not tf32_is_allowed()
    with tf32_products():
        assert tf32_is_allowed()
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"
    torch.backends.cuda.matmul.fp32_precision = "ieee"  # from here on the older setting may not be read
    with tf32_products():
        assert tf32_is_allowed()
        assert torch.backends.cudnn.conv.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert not tf32_is_allowed()


def test_tf32_is_switched_by_whichever_setting_the_process_uses() -> None:
    from tests.worlds import run_world

    run_world(tf32_by_either_setting, 1, fresh=True)  # the newer setting cannot be taken back


def test_nothing_keeps_a_mesh_and_with_it_its_connections_once_it_is_forgotten() -> None:
    import gc
    import weakref

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from dream_trainer.compat.pytorch import forget_meshes

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
    forget_meshes()
    gc.collect()
    assert left() is None


def test_the_stores_that_checkers_see_are_those_of_torch_distributed() -> None:
    import torch.distributed as dist

    from dream_trainer.compat import pytorch

    assert (pytorch.Store, pytorch.PrefixStore, pytorch.TCPStore) == (dist.Store, dist.PrefixStore, dist.TCPStore)
