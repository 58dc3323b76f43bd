"""A model with everything that is awkward to load, and its weights in every kind of file that is read."""

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.checkpoint.states import save

State = dict[str, Tensor]


class Net(nn.Module):
    """Tied weights, BatchNorm statistics, a frozen layer, a tensor of no elements, and sizes that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.norm = nn.BatchNorm1d(5)
        self.wide = nn.Linear(5, 3)
        self.narrow = nn.Linear(3, 5).requires_grad_(False)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("derived", torch.ones(2), persistent=False)


def weights(seed: int = 0) -> State:
    """Random values for each name of `Net`, the tied ones under the first name only, statistics included."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, value in Net().state_dict().items():
        if name == "head.weight":
            continue
        if value.is_floating_point():
            state[name] = torch.randn(value.shape, generator=generator)
        else:
            state[name] = torch.randint(1, 100, value.shape, generator=generator)
    return state


def expected(state: Mapping[str, Tensor]) -> State:
    """What `Net` holds after PyTorch's own `load_state_dict`."""
    model = Net()
    model.load_state_dict({**state, "head.weight": state["embed.weight"]})
    return model.state_dict()


def hf_single(at: Path, state: State) -> Path:
    """A Hugging Face directory with one file."""
    at.mkdir()
    save_file(state, at / "model.safetensors", metadata={"format": "pt"})
    (at / "config.json").write_text("{}")
    return at


def hf_sharded(at: Path, state: State) -> Path:
    """A Hugging Face directory with three shards and their index."""
    return _sharded(at, state, "model", ".safetensors", save_file)


def hf_index(at: Path, state: State) -> Path:
    """The index of such a directory."""
    return hf_sharded(at, state) / "model.safetensors.index.json"


def several_safetensors(at: Path, state: State) -> Path:
    """A directory of safetensors files without an index."""
    hf_sharded(at, state)
    (at / "model.safetensors.index.json").unlink()
    return at


def safetensors_file(at: Path, state: State) -> Path:
    """One safetensors file."""
    path = at.with_suffix(".safetensors")
    save_file(state, path)
    return path


def bin_single(at: Path, state: State) -> Path:
    """An older Hugging Face directory."""
    at.mkdir()
    torch.save(state, at / "pytorch_model.bin")
    return at


def bin_sharded(at: Path, state: State) -> Path:
    """An older Hugging Face directory with shards."""
    return _sharded(at, state, "pytorch_model", ".bin", torch.save)


def _sharded(at: Path, state: State, stem: str, suffix: str, write: Callable[[State, Path], object]) -> Path:
    at.mkdir()
    names, weight_map = list(state), {}
    for index in range(3):
        file = f"{stem}-{index + 1:05d}-of-00003{suffix}"
        part = {name: state[name] for name in names[index::3]}
        write(part, at / file)
        weight_map |= dict.fromkeys(part, file)
    total = sum(value.nbytes for value in state.values())
    index_file = at / f"{stem}{suffix}.index.json"
    index_file.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return at


def bare_pt(at: Path, state: State) -> Path:
    """A bare state dict by torch.save."""
    path = at.with_suffix(".pt")
    torch.save(state, path)
    return path


def nested_pth(at: Path, state: State) -> Path:
    """A state dict among other things, as training scripts save it."""
    path = at.with_suffix(".pth")
    torch.save({"epoch": 3, "model": {"state_dict": state}, "optimizer": {"lr": 0.1}}, path)
    return path


def checkpoint(at: Path, state: State) -> Path:
    """One of our own checkpoints, with state of an optimizer beside the model."""
    tensors = {f"models.net.{name}": value for name, value in state.items()}
    return save(at, 7, tensors={**tensors, "optimizers.optimizer.net.wide.weight.exp_avg": torch.ones(3, 5)})


def foreign_dcp(at: Path, state: State) -> Path:
    """Somebody else's DCP directory, with values that are not tensors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save({**state, "step": 7, "name": "run"}, storage_writer=dcp.FileSystemWriter(at), no_dist=True)
    return at


KINDS: dict[str, Callable[[Path, State], Path]] = {
    kind.__name__: kind
    for kind in (
        *(hf_single, hf_sharded, hf_index, several_safetensors, safetensors_file),
        *(bin_single, bin_sharded, bare_pt, nested_pth, checkpoint, foreign_dcp),
    )
}
