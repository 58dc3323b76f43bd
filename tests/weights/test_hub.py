"""Pushing to a hub: a server on this machine that answers as the hub does, and keeps what it is sent."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

import dream_trainer as dt
from tests.api import CheckpointError, ConfigError
from tests.checkpoint.states import DESCRIPTION, save
from tests.worlds import gloo_group, run_world


class Hub(ThreadingHTTPServer):
    """Attributes: repos, by name what their creation asked for; files, the content of each that was committed."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.repos: dict[str, dict] = {}
        self.files: dict[str, bytes] = {}
        self.summary = ""
        self.commits = 0
        self.refuses = False


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.refuses:
            self.answer({"error": "You may not."}, status=403)
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization', 'somebody')}/{asked['name']}"
            self.server.repos[name] = asked
            self.answer({"url": f"http://127.0.0.1:{self.server.server_port}/{name}"})
        elif "/preupload/" in self.path:
            self.answer(
                {
                    "files": [
                        {**file, "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                        for file in json.loads(body)["files"]
                    ]
                }
            )
        elif "/commit/" in self.path:
            self.server.commits += 1
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                else:
                    self.server.summary = line["value"]["summary"]
            self.answer({"commitOid": "c0", "commitUrl": f"http://127.0.0.1:{self.server.server_port}/o/n/commit/c0"})
        else:
            self.answer({})

    def do_GET(self) -> None:
        self.answer({"sha": "c0", "siblings": [], "id": "o/n"})

    def answer(self, content: dict, status: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    import huggingface_hub
    from huggingface_hub import constants

    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    try:
        yield server
    finally:
        huggingface_hub.close_session()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    tensors = {"models.net.weight": torch.arange(6.0).view(2, 3)}
    shared = {"extra_state": {"net": {}}, "model_configs": {"net": {"model_type": "bert", "hidden_size": 3}}}
    config = {"seed": 11, "training_parameters": {"max_steps": 40, "n_epochs": None}}
    description = DESCRIPTION | {"config": config, "metrics": {"val/loss": 0.25}}
    save(tmp_path / "run/checkpoints", 7, tensors=tensors, shared=shared, description=description)
    return tmp_path / "run"


def test_what_is_pushed_is_the_export_and_a_card(hub: Hub, run: Path) -> None:
    assert dt.push_to_hub(run, "somebody/net", base_model="google/bert").endswith("/commit/c0")
    assert hub.repos["somebody/net"]["visibility"] == "private"
    assert set(hub.files) == {"model.safetensors", "config.json", "README.md"}
    assert torch.equal(load(hub.files["model.safetensors"])["weight"], torch.arange(6.0).view(2, 3))
    assert hub.summary == "Step 7"
    card = hub.files["README.md"].decode()
    front, body = card.split("---\n")[1:3]
    assert "base_model: google/bert" in front
    assert "library_name: transformers" in front
    for line in ("# net", "| step | 7 |", "| max_steps | 40 |", "| seed | 11 |", "| val/loss | 0.25 |"):
        assert line in body
    assert "n_epochs" not in card
    assert str(run) not in card


def test_a_refusal_of_the_hub_is_an_error(hub: Hub, run: Path) -> None:
    hub.refuses = True
    with pytest.raises(Exception, match="to somebody/net: "):
        dt.push_to_hub(run, "somebody/net")


def test_a_chosen_checkpoint_is_pushed_in_public_with_a_message(hub: Hub, run: Path) -> None:
    checkpoint = run / "checkpoints/step_00000007"
    dt.push_to_hub(checkpoint, "somebody/net", private=False, message="The first")
    assert hub.repos["somebody/net"]["visibility"] == "public"
    assert set(hub.files) == {"model.safetensors", "config.json", "README.md"}
    assert hub.summary == "The first"


def test_what_cannot_be_pushed_is_said_before_anything_is_sent(hub: Hub, run: Path) -> None:
    with pytest.raises(CheckpointError, match="no whole checkpoint of step 8"):
        dt.push_to_hub(run, "somebody/net", step=8)
    with pytest.raises(ConfigError, match="is not the name of a repository"):
        dt.push_to_hub(run, "not a name")
    assert not hub.repos


@gloo_group()
def push_from_ranks(port: int, run: str) -> tuple[str, str]:
    from huggingface_hub import constants

    constants.ENDPOINT = f"http://127.0.0.1:{port}"
    address = dt.push_to_hub(run, "somebody/net")
    with pytest.raises(CheckpointError) as refused:
        dt.push_to_hub(run, "not a name")
    return address, str(refused.value)


def test_of_several_ranks_one_pushes_and_all_know_what_came_of_it(hub: Hub, run: Path) -> None:
    found = run_world(push_from_ranks, 2, hub.server_port, str(run))
    assert found[0] == found[1]
    assert found[0][0].endswith("/commit/c0")
    assert "is not the name of a repository" in found[0][1]
    assert hub.commits == 1
