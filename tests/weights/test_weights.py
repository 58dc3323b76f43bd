"""Weights of every kind of file arrive in a model as `load_state_dict` would put them there, or it is an error."""

import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.api import CheckpointError, ConfigError, DamagedCheckpointError, load_weights
from tests.checkpoint.states import Plant, plant_shard, save
from tests.trainer.arithmetic import same_bits
from tests.weights.weight_cases import (
    KINDS,
    Net,
    State,
    bare_pt,
    expected,
    foreign_dcp,
    hf_single,
    safetensors_file,
    weights,
)


def same(model: nn.Module, state: State) -> bool:
    return same_bits(model.state_dict(), state)


def refused(model: nn.Module, path: Path, **options: object) -> str:
    """The message of the error, after which the model is as it was."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as error:
        load_weights(model, path, **options)  # type: ignore[arg-type]
    assert same(model, before)
    return str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_every_kind_arrive_as_load_state_dict_would_put_them(kind: str, tmp_path: Path) -> None:
    state = weights()
    model = Net()
    parameters = [(id(parameter), parameter.requires_grad) for parameter in model.parameters()]
    report = load_weights(model, KINDS[kind](tmp_path / "it", state))
    assert same(model, expected(state))
    assert report.is_complete
    assert set(report.loaded) == set(model.state_dict())
    assert [(id(parameter), parameter.requires_grad) for parameter in model.parameters()] == parameters
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("kind", ["safetensors_file", "bare_pt", "foreign_dcp"])
@pytest.mark.parametrize(("saved", "here"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_values_are_cast_to_the_models_dtypes(kind: str, saved: torch.dtype, here: torch.dtype, tmp_path: Path) -> None:
    state = {"weight": torch.randn(3, 4).to(saved), "bias": torch.randn(3).to(saved)}
    model, truth = nn.Linear(4, 3, dtype=here), nn.Linear(4, 3, dtype=here)
    load_weights(model, KINDS[kind](tmp_path / "it", state))
    truth.load_state_dict(state)
    assert model.weight.dtype == here
    assert same(model, truth.state_dict())


def test_renames_apply_in_order_to_the_files_names(tmp_path: Path) -> None:
    state = weights()
    old = {f"transformer.{name}".replace("blocks.", "h."): value for name, value in state.items()}
    model = Net()
    load_weights(model, bare_pt(tmp_path / "it", old), renames={r"^transformer\.": "", r"^h\.(\d+)": r"blocks.\1"})
    assert same(model, expected(state))


def test_renames_that_make_two_names_one_are_an_error(tmp_path: Path) -> None:
    message = refused(Net(), bare_pt(tmp_path / "it", weights()), renames={r"^blocks\.\d": "block"})
    assert "'block.weight' of both 'blocks.0.weight' and 'blocks.1.weight'" in message


def test_any_name_of_a_tied_tensor_fills_it(tmp_path: Path) -> None:
    state = weights()
    truth = expected(state)
    state["head.weight"] = state.pop("embed.weight")
    model = Net()
    assert load_weights(model, safetensors_file(tmp_path / "it", state)).is_complete
    assert same(model, truth)


def test_tied_names_with_different_values_are_an_error_or_reported(tmp_path: Path) -> None:
    state = weights()
    path = bare_pt(tmp_path / "it", {**state, "head.weight": state["embed.weight"] + 1})
    model = Net()
    assert "head.weight (tied to embed.weight" in refused(model, path)
    assert list(load_weights(model, path, strict=False).mismatched) == ["head.weight"]
    assert same(model, expected(state))


def test_a_compiled_model_has_the_names_of_the_model_inside(tmp_path: Path) -> None:
    state = weights()
    model = Net()
    load_weights(torch.compile(model), safetensors_file(tmp_path / "it", state))  # type: ignore[arg-type]
    assert same(model, expected(state))


@pytest.mark.pitfall(38)
@pytest.mark.parametrize("kind", ["hf_sharded", "bare_pt", "checkpoint", "foreign_dcp"])
def test_a_renamed_layer_is_an_error_that_names_it_and_nothing_is_written(kind: str, tmp_path: Path) -> None:
    state = weights()
    state["gate.weight"] = state.pop("wide.weight")
    message = refused(Net(), KINDS[kind](tmp_path / "it", state))
    assert "1 missing (not in the file): wide.weight" in message
    assert "1 unexpected (not in the model): gate.weight" in message


@pytest.mark.pitfall(38)
def test_what_a_load_that_is_not_strict_left_out_is_reported_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = weights()
    state["gate.weight"] = state.pop("wide.weight")
    state["wide.bias"] = torch.ones(4)
    state.pop("norm.running_mean")
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with caplog.at_level(logging.WARNING, logger="dream_trainer"):
        report = load_weights(model, hf_single(tmp_path / "it", state), strict=False)
    assert set(report.missing) == {"wide.weight", "norm.running_mean"}
    assert report.unexpected == ("gate.weight",)
    assert dict(report.mismatched) == {"wide.bias": "(4,) in the file, (3,) in the model"}
    left = {"wide.weight", "norm.running_mean", "wide.bias"}
    assert set(report.loaded) == set(model.state_dict()) - left
    for name, value in model.state_dict().items():
        source = before if name in left else {**state, "head.weight": state["embed.weight"]}
        assert torch.equal(value, source[name]), name
    assert str(report) in caplog.text
    assert str(report).splitlines() == [
        f"{len(report.loaded)} of the model's {len(before)} tensors loaded",
        "  2 missing (not in the file): norm.running_mean, wide.weight",
        "  1 unexpected (not in the model): gate.weight",
        "  1 mismatched: wide.bias ((4,) in the file, (3,) in the model)",
    ]


@pytest.mark.parametrize("prefix", ["module.", "module.transformer."])
def test_a_prefix_in_the_file_is_an_error_that_proposes_the_rename(prefix: str, tmp_path: Path) -> None:
    state = weights()
    path = bare_pt(tmp_path / "it", {f"{prefix}{name}": value for name, value in state.items()})
    for strict in (True, False):
        message = refused(Net(), path, strict=strict)
        assert "nothing in it fits the model" in message
    proposed = eval(message.split("renames=")[1].split(" would match")[0])
    model = Net()
    load_weights(model, path, renames=proposed)
    assert same(model, expected(state))


def test_a_prefix_in_the_model_is_an_error_that_proposes_the_rename(tmp_path: Path) -> None:
    state = weights()
    path = bare_pt(tmp_path / "it", state)
    model = nn.ModuleDict({"encoder": Net()})
    assert "renames={'^': 'encoder.'} would match" in refused(model, path)
    load_weights(model, path, renames={"^": "encoder."})
    assert same(model.encoder, expected(state))


def test_a_model_of_a_checkpoint_is_chosen_by_its_name(tmp_path: Path) -> None:
    tensors = {f"models.{name}.{key}": value for name in ("a", "b") for key, value in weights(ord(name)).items()}
    path = save(tmp_path, 1, tensors=tensors)
    model = Net()
    load_weights(model, path, model_name="b")
    assert same(model, expected(weights(ord("b"))))


@pytest.mark.parametrize("name", ["nowhere", "directory", "notes.txt"])
def test_a_path_without_weights_is_an_error_that_says_what_is_understood(name: str, tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "notes.txt").write_text("loss 3.2")
    message = refused(Net(), tmp_path / name)
    assert name in message
    assert ".safetensors" in message
    assert "DCP" in message


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-300])


@pytest.mark.parametrize("harm", [truncated, Path.unlink])
@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("hf_single", "model.safetensors"),
        ("hf_sharded", "model-00002-of-00003.safetensors"),
        ("bin_sharded", "pytorch_model-00002-of-00003.bin"),
        ("checkpoint", "__0_0.distcp"),
        ("foreign_dcp", "__0_0.distcp"),
        ("foreign_dcp", ".metadata"),
    ],
)
def test_a_file_that_is_not_whole_is_named(kind: str, file: str, harm: Callable[[Path], None], tmp_path: Path) -> None:
    path = KINDS[kind](tmp_path / "it", weights())
    harm(path / file)
    with pytest.raises(CheckpointError) as error:
        load_weights(Net(), path)
    assert (path.name if harm is Path.unlink else file) in str(error.value)


def short_file(at: Path) -> Path:
    header = json.dumps({"weight": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}}).encode()
    (at / "it.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(20))
    return at / "it.safetensors"


def index_of(weight_map: dict[str, str]) -> Callable[[Path], Path]:
    def write(at: Path) -> Path:
        (at / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return at / "model.safetensors.index.json"

    return write


def twice(at: Path) -> Path:
    for name in "ab":
        save_file({"weight": torch.ones(3, 4)}, at / f"{name}.safetensors")
    return at


def pickled(content: object) -> Callable[[Path], Path]:
    def write(at: Path) -> Path:
        torch.save(content, at / "it.pt")
        return at / "it.pt"

    return write


UNREADABLE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "offsets": (short_file, "it.safetensors cannot be read"),
    "index above": (index_of({"weight": "../secret.safetensors"}), "outside its directory"),
    "a name in two files": (twice, "several files contain ['weight']"),
    "no state dict": (pickled(torch.ones(3)), "without a state dict"),
    "sparse": (pickled({"weight": torch.eye(3, 4).to_sparse()}), "weight in"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_read_is_refused_by_name(case: str, tmp_path: Path) -> None:
    write, message = UNREADABLE[case]
    assert message in refused(nn.Linear(4, 3, bias=False), write(tmp_path))


PLANTED: dict[str, Callable[[Path, Plant], object]] = {
    "it.pt": lambda file, plant: torch.save({"weight": torch.ones(3, 4), "more": plant}, file),
    "it.pth": lambda file, plant: torch.save({"weight": plant}, file, _use_new_zipfile_serialization=False),
    **dict.fromkeys(
        ("it.bin", "it.safetensors", "it/.metadata"), lambda file, plant: file.write_bytes(pickle.dumps(plant))
    ),
    "it/__0_0.distcp": plant_shard,
}


@pytest.mark.pitfall(43)
@pytest.mark.parametrize("name", PLANTED)
def test_a_file_made_to_run_code_is_refused_by_name_and_runs_none(name: str, tmp_path: Path) -> None:
    marker, file = tmp_path / "the code ran", tmp_path / name
    path = file if file.parent == tmp_path else foreign_dcp(file.parent, {"weight": torch.ones(3, 4)})
    PLANTED[name](file, Plant(marker))
    with pytest.raises(DamagedCheckpointError) as error:
        load_weights(nn.Linear(4, 3, bias=False), path)
    assert file.name in str(error.value)
    assert "to `False`" not in str(error.value)  # as PyTorch's own message proposes
    assert not marker.exists()


@pytest.mark.pitfall(43)
def test_values_of_a_dcp_directory_that_are_no_tensors_are_never_unpickled(tmp_path: Path) -> None:
    marker = tmp_path / "the code ran"
    state: dict[str, Tensor] = {"weight": torch.randn(3, 4)}
    path = foreign_dcp(tmp_path / "it", {**state, "extra": Plant(marker)})  # type: ignore[dict-item]
    model = nn.Linear(4, 3, bias=False)
    assert load_weights(model, path).is_complete
    assert same(model, state)
    assert not marker.exists()
    # The plant is live: PyTorch's own conversion, which unpickles everything, runs it.
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(path, tmp_path / "converted.pt")
    assert marker.exists()


@pytest.mark.parametrize("path", ["https://bucket/run", Path("https://bucket/run")])
def test_addresses_of_servers_are_refused_by_name(path: str | Path) -> None:
    with pytest.raises(ConfigError, match="https: is no place that is read"):
        load_weights(nn.Linear(1, 1), path)
