"""Pushing an export to the Hugging Face Hub, with a model card drawn from the checkpoint."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from dream_trainer.checkpoint.manifest import Manifest, find_checkpoint, read_manifest
from dream_trainer.distributed.ranks import Ranks, from_main_rank
from dream_trainer.errors import CheckpointError, ConfigError
from dream_trainer.stores.store_path import as_path
from dream_trainer.weights.export import export_checkpoint
from dream_trainer.weights.export_files import ADAPTER_CONFIG_NAME, CONFIG_NAME

CARD_NAME = "README.md"

_TOLD = ("max_steps", "n_epochs", "global_batch_size", "gradient_clip_norm", "max_tokens")


def push_to_hub(
    source: str | Path,
    repo: str,
    *,
    step: int | None = None,
    model: str | None = None,
    weights: str = "model",
    merge_adapters: bool = False,
    base: Path | None = None,
    base_model: str | None = None,
    private: bool = True,
    message: str | None = None,
    world: Ranks | None = None,
) -> str:
    """Exports a checkpoint and uploads it to the Hugging Face Hub, with a model card drawn from it.

    Called by every rank of a job whose process group is there, as it is in a trainer's `with`: rank 0 works, and the
    others wait. `dream-trainer checkpoints push` does the same.

    Args:
        source: A run's directory (`trainer.run_dir`) or one of its checkpoints.
        repo: `owner/name` on the hub; created if there is none. The token is the one that `hf auth login` saved, or
            that of `HF_TOKEN`.
        step: Which checkpoint of a run; None for its newest whole one.
        model: The model, if there are several, as for `checkpoints export`.
        weights: "model" as trained, "ema" or "swa" as averaged by that callback.
        merge_adapters: Push the base with its adapters added, rather than the adapters.
        base: Present location of frozen weights that the checkpoint left out, if the run loaded them from elsewhere.
        base_model: The base's name on the hub, for the card and for `adapter_config.json`. Without it, the latter has
            the path on this machine.
        private: Whether a new repository is private.
        message: Message of the commit; by default the step.
        world: The ranks. Default: those of the default process group, or only this process without one.

    Returns:
        The address of the commit, on every rank.

    Raises:
        ConfigError: `huggingface_hub` is not installed, or `repo` is not a name of a repository.
        CheckpointError: There is no such checkpoint, the hub refused, or it was not reached. On several ranks, either
            as this, the same on all.
    """

    def push() -> str:
        try:
            from httpx import HTTPError
            from huggingface_hub import HfApi
            from huggingface_hub.errors import HfHubHTTPError, HFValidationError
        except ImportError as error:
            raise ConfigError("pushing needs huggingface_hub. Run pip install huggingface_hub.") from error
        checkpoint = find_checkpoint(as_path(source), step)
        manifest, api = read_manifest(checkpoint), HfApi(library_name="dream_trainer")
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "export"
            export_checkpoint(checkpoint, out, model=model, weights=weights, merge_adapters=merge_adapters, base=base)
            adapters = out / ADAPTER_CONFIG_NAME
            if base_model is not None and adapters.exists():
                config = json.loads(adapters.read_text()) | {"base_model_name_or_path": base_model}
                adapters.write_text(json.dumps(config, indent=2))
            (out / CARD_NAME).write_text(_model_card(out, repo, manifest, base_model))
            words = message or f"Step {manifest.step}"
            try:
                api.create_repo(repo, private=private, exist_ok=True)
                commit = api.upload_folder(repo_id=repo, folder_path=out, commit_message=words)
            except HFValidationError as error:
                raise ConfigError(f"repo={repo!r} is not the name of a repository: {error}") from error
            except (HfHubHTTPError, HTTPError, OSError) as error:
                raise CheckpointError(f"could not push {checkpoint} to {repo}: {error}") from error
        return str(commit.commit_url)

    ranks = world or Ranks.of_default_group()
    return push() if ranks.world_size == 1 else from_main_rank(ranks, f"push {source} to {repo}", push)


def _model_card(directory: Path, repo: str, manifest: Manifest, base_model: str | None) -> str:
    """A model card: the files, their training and validation, and no path of this machine."""
    from huggingface_hub import ModelCardData

    config = directory / CONFIG_NAME
    library: str | None = None
    use = "Weights as safetensors, under the names of the model's `state_dict()`."
    if (directory / ADAPTER_CONFIG_NAME).exists():
        library, use = "peft", f'Adapters: `PeftModel.from_pretrained(base, "{repo}")`.'
    elif config.exists() and "model_type" in json.loads(config.read_text()):
        library, use = "transformers", f'`AutoModel.from_pretrained("{repo}")`, or the class of its task.'
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


def _table(rows: dict[str, Any]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())])
