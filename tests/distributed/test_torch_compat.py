"""Each private or moving PyTorch name behind `torch_compat`, exercised."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_the_workers_of_a_loader_that_is_still_referred_to_can_be_ended() -> None:
    import multiprocessing

    from torch.utils.data import DataLoader

    from dream_trainer.distributed.torch_compat import shutdown_workers

    iterator = iter(DataLoader(list(range(8)), 2, num_workers=1, multiprocessing_context="fork"))
    next(iterator)
    assert multiprocessing.active_children() != []
    shutdown_workers(iterator)
    assert multiprocessing.active_children() == []
    shutdown_workers(iter(DataLoader(list(range(8)), 2)))
    shutdown_workers(None)


def test_torch_functions_can_be_called_past_every_mode() -> None:
    import torch
    from torch.overrides import TorchFunctionMode

    from dream_trainer.distributed.torch_compat import without_torch_function

    class Refuse(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    with Refuse(), without_torch_function():
        assert torch.ones(2).sum() == 2


def test_in_place_writes_are_counted_also_through_views_and_on_meta() -> None:
    import torch

    from dream_trainer.distributed.torch_compat import write_count

    tensor = torch.empty(3, 3, device="meta")
    before = write_count(tensor)
    tensor[0].normal_()
    tensor.view(-1).mul_(2)
    assert write_count(tensor) == before + 2
    with torch.inference_mode():
        assert write_count(torch.ones(2).mul_(2)) == 0


def test_attention_draws_its_parameters_again() -> None:
    import torch

    from dream_trainer.distributed.torch_compat import reset_attention_parameters

    attention = torch.nn.MultiheadAttention(8, 2)
    with torch.no_grad():
        attention.in_proj_bias.fill_(3)
    reset_attention_parameters(attention)
    assert (attention.in_proj_bias == 0).all()


def test_the_globals_of_dcp_metadata_are_those_that_a_save_of_tensors_refers_to(tmp_path: Path) -> None:
    import pickle
    import warnings

    import torch
    import torch.distributed.checkpoint as dcp

    from dream_trainer.distributed.torch_compat import dcp_metadata_globals

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
