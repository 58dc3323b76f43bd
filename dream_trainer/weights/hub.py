"""Pushing an export to the Hugging Face Hub, with a model card drawn from the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dream_trainer.checkpoint.manifest import Manifest
from dream_trainer.errors import CheckpointError, ConfigError
from dream_trainer.weights.export_files import ADAPTER_CONFIG_NAME, CONFIG_NAME

CARD_NAME = "README.md"

_TOLD = ("max_steps", "n_epochs", "global_batch_size", "gradient_clip_val", "max_tokens")


def push_to_hub(
    directory: Path,
    repo: str,
    manifest: Manifest,
    *,
    base_model: str | None = None,
    private: bool = True,
    message: str | None = None,
) -> str:
    """Uploads a directory that an export wrote, and what lies beside it, such as a tokenizer.

    A `README.md` that is there already is uploaded as it is; else one is written from the checkpoint.

    Args:
        directory: The export.
        repo: `owner/name` on the hub; created if there is none. The token is the one that `hf auth login` saved, or
            that of `HF_TOKEN`.
        manifest: Of the checkpoint that was exported.
        base_model: The base's name on the hub, for the card and for `adapter_config.json`, which has the path on this
            machine otherwise.
        private: Whether a new repository is private.
        message: Of the commit; by default the step.

    Returns:
        The address of the commit.

    Raises:
        ConfigError: `huggingface_hub` is not installed, or `repo` is not a name of a repository.
        CheckpointError: The hub refused, or was not reached.
    """
    try:
        from httpx import HTTPError
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise ConfigError("pushing needs huggingface_hub: pip install 'dream-trainer[hub]'.") from error
    _name_base(directory / ADAPTER_CONFIG_NAME, base_model)
    card = directory / CARD_NAME
    if not card.exists():
        card.write_text(model_card(directory, repo, manifest, base_model))
    api = HfApi(library_name="dream_trainer")
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo, folder_path=directory, commit_message=message or f"Step {manifest.step}"
        )
    except HFValidationError as error:
        raise ConfigError(f"repo={repo!r} is not the name of a repository: {error}") from error
    except (HfHubHTTPError, HTTPError, OSError) as error:
        raise CheckpointError(f"could not push {directory} to {repo}: {error}") from error
    return str(commit.commit_url)


def _name_base(file: Path, base_model: str | None) -> None:
    if base_model is not None and file.exists():
        file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base_model}, indent=2))


def model_card(directory: Path, repo: str, manifest: Manifest, base_model: str | None) -> str:
    """The text of a model card: what the files are, how far they were trained, and what a validation found.

    Paths of this machine are not in it.

    Args:
        directory: The export.
        repo: The name to use as a title.
        manifest: Of the checkpoint.
        base_model: The base's name on the hub, if there is one.
    """
    from huggingface_hub import ModelCardData

    library, use = _library(directory, repo)
    front = ModelCardData(library_name=library, base_model=base_model, tags=["dream-trainer"]).to_yaml()
    training: dict[str, Any] = manifest.config.get("training_parameters", {})
    told = {name: training[name] for name in _TOLD if training.get(name) is not None}
    rows = {
        "step": manifest.step,
        "epoch": manifest.epoch,
        "samples seen": manifest.samples_seen,
        **told,
        "seed": manifest.config.get("seed"),
        "ranks": manifest.world_size,
        **{f"{name} version": version for name, version in manifest.versions.items()},
    }
    parts = [f"---\n{front}\n---", f"# {repo.rpartition('/')[2]}", use, "## Training", _table(rows)]
    if manifest.metrics:
        parts += ["## Validation", _table({name: f"{value:.6g}" for name, value in manifest.metrics.items()})]
    return "\n\n".join(part for part in parts if part) + "\n"


def _library(directory: Path, repo: str) -> tuple[str | None, str]:
    """Which library reads the export, and how."""
    if (directory / ADAPTER_CONFIG_NAME).exists():
        return "peft", f'Adapters: `PeftModel.from_pretrained(base, "{repo}")`.'
    config = directory / CONFIG_NAME
    if config.exists() and "model_type" in json.loads(config.read_text()):
        return "transformers", f'`AutoModel.from_pretrained("{repo}")`, or the class of its task.'
    return None, "Weights as safetensors, under the names of the model's `state_dict()`."


def _table(rows: dict[str, Any]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())])
