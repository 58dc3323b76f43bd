"""CheckpointMixin: when checkpoints are saved, and which one a run resumes from. It acts between windows, after a
window's validation, on all ranks at the same step; a thread of each rank writes. See trainer/saved_state.py and
trainer/state_registry.py for the saved state and the choice."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn as nn

from dream_trainer.best_value import mode_of, refuse_other_places
from dream_trainer.checkpoint.files import step_name
from dream_trainer.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    best_checkpoint,
    list_checkpoints,
    verify_checkpoint,
)
from dream_trainer.checkpoint.model_state import ModelForm, frozen_digests, model_configs
from dream_trainer.checkpoint.run_directory import linked_checkpoints
from dream_trainer.checkpoint.saver import HostCopies, Moment, Saver
from dream_trainer.checkpoint.saving import HostSaves
from dream_trainer.checkpoint.store import read_shared
from dream_trainer.checks import check_choice
from dream_trainer.compat.compiler import compiled_original
from dream_trainer.config.checkpoint_parameters import (
    ALL_KEPT,
    BranchParameters,
    CheckpointConfigMixin,
    CheckpointParameters,
    Mode,
)
from dream_trainer.distributed.ranks import Ranks, on_all_ranks
from dream_trainer.distributed.world import on_host, ranks_of_host
from dream_trainer.errors import CheckpointError, ConfigError, followed_by
from dream_trainer.events.callback import AveragingCallback, averages_to_export
from dream_trainer.modules.metrics import higher_is_better
from dream_trainer.screen import logger
from dream_trainer.stores.store_path import StorePath, absolute, as_path
from dream_trainer.trainer import saved_state
from dream_trainer.trainer.abstract import AbstractTrainer
from dream_trainer.trainer.resume import changed_fields, resume
from dream_trainer.trainer.runtime import Runtime
from dream_trainer.trainer.session import start
from dream_trainer.weights.adapters import adapters_of, refuse_other_adapters
from dream_trainer.weights.load import load_weights


class CheckpointMixin(AbstractTrainer):
    """Saves the whole run and resumes it exactly: the same command starts and restarts."""

    _config_class: ClassVar[type | None] = CheckpointConfigMixin
    _saves_checkpoints: ClassVar[bool] = True

    @property
    def checkpoint_dir(self) -> Path:
        """Directory of this run's checkpoints, or a link to it; with an object store, the upload staging directory."""
        return self.run_dir / "checkpoints"

    def checkpoints(self) -> list[Manifest]:
        """The run's complete checkpoints, oldest first; those in an object store, and those that wait to be sent."""
        places = dict.fromkeys((self.checkpoint_dir, self._checkpoints_root()))  # in this order: one may be uploaded
        found = {manifest.step: manifest for place in places for manifest in list_checkpoints(place)}
        return [found[step] for step in sorted(found)]

    def _elsewhere(self) -> Path | None:
        directory, config = self._runtime.config.checkpoint_parameters.directory, self.config
        if directory is None:
            return None
        return as_path(directory).expanduser() / config.project / config.group / config.experiment

    def _checkpoints_root(self) -> Path:
        elsewhere = self._elsewhere()
        return elsewhere / "checkpoints" if isinstance(elsewhere, StorePath) else self.checkpoint_dir

    def save_checkpoint(self) -> Path:
        """Saves the run as it is now and waits until that is on the disk; between windows, called by every rank.

        An existing checkpoint of this step is replaced, as weights may have changed since. Its metrics stay
        those of the step's validation.

        Returns:
            The checkpoint's directory, or its path in the object store once it is uploaded.

        Raises:
            CheckpointError: Some rank could not write; raised on every rank, earlier checkpoints are whole.
            NonFiniteError: A gradient norm was not finite and the policy says to raise.
            StepError: The trainer is not set up yet, or an accumulation window is open.
        """
        self._runtime.refuse_inside_window("save_checkpoint")
        with self._runtime.parallel.as_shards():
            self._runtime.saver.save()
        return self._checkpoints_root() / step_name(self.global_step)

    def load_checkpoint(self, path: str | Path) -> None:
        """Loads the checkpoint at `path` into this trainer; between windows, called by every rank.

        Launches and sets up on the first call. If the run then trains on, its newer checkpoints are set aside (renamed,
        not deleted), since it writes those steps again; `evaluate` and `predict` change nothing. Every file's checksum
        is compared before anything is loaded.

        Raises:
            CheckpointError: It is damaged, or of another model, seed or global batch; raised on every rank.
        """
        source = as_path(path)
        start(self._runtime)
        self._runtime.refuse_inside_window("load_checkpoint")
        self._runtime.saver.finish()
        with self._runtime.parallel.as_shards():
            self._load(verify_checkpoint(source, world=self.world))

    def best_checkpoint(self, metric: str | None = None, mode: Mode | None = None) -> Manifest:
        """The checkpoint of the best validation.

        Args:
            metric: The metric; None is `best_metric` of CheckpointParameters.
            mode: Whether its "min" or "max" is best. None takes `best_mode`, or infers it from the metric's name.

        Returns:
            Its manifest: `path`, `step`, `metrics`.

        Raises:
            CheckpointError: There is none.
        """
        return self.__best(metric, mode)[1]

    def __best(self, metric: str | None, mode: Mode | None) -> tuple[str, Manifest]:
        """The chosen metric, and the best checkpoint by it, as rank 0 sees it; a collective."""
        if mode is not None:
            check_choice("mode", mode, ("min", "max"))
        start(self._runtime)
        self._runtime.refuse_inside_window("best_checkpoint")
        self._runtime.saver.finish()
        saved = self.world.all_gather_object(self.checkpoints())[0]
        metric = metric or self.__parameters().best_metric
        if metric is not None:
            known = higher_is_better(self.named_metrics(), metric)
            by_name = partial(mode_of, metric, None, higher_is_better=known, named_by="metric", set_by="mode")
            if found := best_checkpoint(saved, metric, mode or self._best_modes().get(metric) or by_name()):
                return metric, found
        raise CheckpointError(
            f"no checkpoint has a value of {metric or 'best_metric'} but NaN. Train first, with validations and "
            f"CheckpointParameters(save_on_best=True, keep_best=1, best_metric={metric or 'val/loss'!r})."
        )

    def load_best(self, metric: str | None = None, mode: Mode | None = None) -> Path:
        """Loads the weights of the best validation's checkpoint into the models; between windows, called by every rank.

        If an average of the weights is validated, such as EMA's, it is the checkpoint's average, and the average starts
        again from it. A later `fit` starts from these weights, with the optimizers, schedules and counters of the last
        step. Frozen weights that no checkpoint has (`save_frozen=False`) and modules' extra state stay as they are.

        Takes the arguments of `best_checkpoint`, and returns the checkpoint's directory.

        Raises:
            CheckpointError: There is none.
            StepError: An accumulation window is open.
        """
        metric, found = self.__best(metric, mode)
        averages = [one for one in self.callbacks if isinstance(one, AveragingCallback) and one.validate]
        value, best = found.metrics[metric], self._runtime.best.values.get(metric)
        if best not in (None, value):
            self.warn_once(
                "another best",
                f"load_best() takes the weights of step {found.step}, with {metric} {value:.6g}, and the best was "
                f"{best}: this run has no checkpoint of it. Save each best with save_on_best=True and keep_best=1.",
            )
        with self.changing_weights():
            for name, model in self.named_models().items():
                tensors = model.state_dict(keep_vars=True).items()
                frozen = {name for name, one in tensors if isinstance(one, nn.Parameter) and not one.requires_grad}
                renames = None if compiled_original(model) is None else {r"^_orig_mod\.": ""}
                load_weights(model, found.path, model_name=name, renames=renames, optional=frozen, world=self.world)
        for average in averages:
            average.load_as_weights(found.path)
        return found.path

    def export(
        self,
        path: str | Path,
        *,
        model: str | None = None,
        weights: str = "model",
        dtype: torch.dtype | None = None,
        max_shard_size: int | str = "5GB",
        merge_adapters: bool = False,
        overwrite: bool = False,
    ) -> list[Path]:
        """Writes a model's weights as they are now in Hugging Face's layout; called by every rank.

        One tensor at a time is gathered. `dream-trainer checkpoints export` does the same for a checkpoint on the disk,
        without ranks or an accelerator.

        Args:
            path: Directory to write, or a `.safetensors`, `.pt` or `.pth` file.
            model: Name of the model; may be left out if there is only one.
            weights: "model": its own; "ema" or "swa", or "ema.<n>" with several: the averages of that callback.
            dtype: Floating-point type to write; None leaves each as it is.
            max_shard_size: Bytes per file, as a number or such as "5GB".
            merge_adapters: By default a peft model's adapters are written, in peft's layout. True writes the base
                weights with the adapters merged in, under the base model's names.
            overwrite: Whether to replace an existing export.

        Returns:
            The files written.

        Raises:
            CheckpointError: Rank 0 could not write; the same on every rank.
        """
        from dream_trainer.weights.export import export_model
        from dream_trainer.weights.weight_files import choose_model

        target = as_path(path)
        if isinstance(target, StorePath):
            raise CheckpointError(f"{path} is in an object store. Export to a directory, and copy that.")
        start(self._runtime)
        self._runtime.refuse_inside_window("export")
        models = self.named_models()
        name = choose_model(models, model)
        as_one = self._runtime.rounds.as_one_model()
        of_weights = as_one if weights == "model" else averages_to_export(self.callbacks, weights, name)
        with self._runtime.parallel.as_shards(), of_weights:
            self._runtime.parallel.reshard()
            return export_model(
                models[name],
                target,
                world=self.world,
                config=model_configs({name: models[name]}).get(name),
                dtype=dtype,
                max_shard_size=max_shard_size,
                merge_adapters=merge_adapters,
                overwrite=overwrite,
            )

    # -- start and resume

    def _finish_setup(self) -> None:
        super()._finish_setup()
        self._make_saver()

    def _make_saver(self) -> None:
        parameters = self.__parameters()
        if parameters.best_metric is not None:
            refuse_other_places(parameters.best_metric, self._runtime.data.validation, named_by="best_metric")
        elsewhere = self._elsewhere()
        beside = self.world.beside()
        self.__form = ModelForm()
        frozen = None if parameters.save_frozen else frozen_digests(self.named_models(), self.world)
        best, best_metric = self._runtime.best, parameters.best_metric
        saver = self._runtime.saver = Saver(
            parameters,
            self.world,
            self.checkpoint_dir,
            beside,
            HostCopies(self.world.device) if parameters.async_save else None,
            settle=partial(_settled, self._runtime),
            snapshot=partial(saved_state.snapshot, self._runtime, self.__form, frozen),
            tensors=partial(saved_state.tensors_to_save, self._runtime, frozen),
            is_best=lambda step: best.steps.get(best_metric or "") == step,
            on_save=partial(self._notify, "on_save"),
            on_lost=(lambda: None) if self._runtime.log is None else self._runtime.log.save_was_lost,
            patience=self._runtime.session.patience,
            say_once=self.warn_once,
            clock=time.monotonic,
            only_when_called=self._runtime.config.training_parameters.fast_dev_run,
            local=self._host_saves(parameters, beside),
        )

        def load_best_value(state: Mapping[str, Any]) -> None:  # which is the evaluation's since
            if best_metric is not None and state.get("best_value") is not None:
                best.values.setdefault(best_metric, state["best_value"])

        self._runtime.state_registry.register("checkpoint", dict, load_best_value, goes_with_counters=True)
        self._runtime.optimizer_step.wait_for_copies = saver.wait_for_copies
        if self._runtime.config.training_parameters.fast_dev_run:
            return
        saver.claim(self.run_dir)
        if isinstance(elsewhere, StorePath):
            from dream_trainer.checkpoint.remote_run import RemoteRun

            place, connect = elsewhere / "checkpoints", self.world.connect_to_store
            saver.send_to(RemoteRun(place, parameters, self.world, self.run_dir, connect))
        elif elsewhere is not None or self.checkpoint_dir.is_symlink():
            # A run in another `runs_dir` may have the same.
            saver.claim(linked_checkpoints(self.checkpoint_dir, elsewhere, self.world))

    def __parameters(self) -> CheckpointParameters:
        """Those of the config, with the `best_mode` that metrics know."""
        parameters: CheckpointParameters = self._runtime.config.checkpoint_parameters
        if parameters.best_metric is None:
            return parameters
        known = higher_is_better(self.named_metrics(), parameters.best_metric)
        return replace(parameters, best_mode=parameters.known_best_mode(known))

    def _host_saves(self, parameters: CheckpointParameters, beside: Ranks) -> HostSaves:
        if parameters.local_directory is None or self._runtime.config.training_parameters.fast_dev_run:
            return HostSaves()
        from dream_trainer.checkpoint.local_checkpoints import LocalCheckpoints

        world = self.world
        return LocalCheckpoints(
            Path(parameters.local_directory).expanduser().absolute(),
            experiment=self.config.experiment,
            root=absolute(self._checkpoints_root()),
            mesh_shape=world.mesh_shape._asdict(),
            ranks=ranks_of_host(world, world.host_number),
            world=world,
            beside=beside,
            host=on_host(world, beside, timeout_seconds=self._runtime.config.device_parameters.start_timeout_seconds),
        )

    def _resume(self) -> None:
        super()._resume()
        self.__form.note(self.named_models())
        parameters = self.__parameters()
        if self._runtime.config.training_parameters.fast_dev_run:
            return
        saved_state.check(self._runtime, saves=parameters.saves)
        if not resume(self._checkpoints_root(), parameters, self.world, self._load, self._resumes_locally):
            self._runtime.saver.lacks_checkpoint = parameters.resume is not None
            if parameters.init_from is not None:
                self._load_initial_weights(as_path(parameters.init_from), parameters)

    def _load_initial_weights(self, path: Path, parameters: CheckpointParameters) -> None:
        models = self.named_models()
        if (path / MANIFEST_NAME).exists():  # models may have adapters both here and there
            saved = on_all_ranks(self.world, f"load {path}", lambda: read_shared(path)).get("adapters", {})
            if len(models) == len(saved) == 1:  # a single adapter may have another name there
                saved = dict(zip(models, saved.values(), strict=True))
            adapted = {name: one for name, one in models.items() if name in saved and adapters_of(one) is not None}
            refuse_other_adapters(path, adapted, saved, world=self.world)
        elif len(models) > 1:
            raise ConfigError(
                f"init_from={parameters.init_from!r} does not say which of the models {sorted(models)} it is for. "
                "Call load_weights for each in load_pretrained."
            )
        for name, model in models.items():
            own_name = name if len(models) > 1 else None
            renames, strict = parameters.init_renames, parameters.init_strict
            load_weights(model, path, model_name=own_name, renames=renames, strict=strict, world=self.world)

    def _resumes_locally(self, newest: Manifest) -> bool:
        """Loads the state after `newest` from the hosts if every host has its ranks' part; returns whether it did."""
        found = self._runtime.saver.local.find(newest)
        if found is None:
            return False
        try:
            self._load(verify_checkpoint(found.path, world=self.world, shards=False), newest=newest)
        except CheckpointError as error:
            if self.world.is_main:
                logger.warning("a local checkpoint is not used, and %s is read: %s", newest.path.parent, error)
            return False
        return True

    @contextmanager
    def _validation_context(self) -> Iterator[None]:
        if self._runtime.saver.lacks_checkpoint and not self._runtime.session.is_training and self.local_batches == 0:
            self.warn_once(
                "no checkpoint",
                f"{self._checkpoints_root()} has no checkpoint: these weights are as setup left them. Check project, "
                "group and experiment; resume=None is for a run that has none.",
            )
        with super()._validation_context():
            yield

    def _load(self, manifest: Manifest, branch: BranchParameters = ALL_KEPT, *, newest: Manifest | None = None) -> None:
        """`newest` is the run's newest checkpoint if `manifest` belongs to a host-local checkpoint."""
        is_own = newest is not None or manifest.path.parent.resolve() == self._checkpoints_root().resolve()
        saved_state.restore(self._runtime, manifest, self.__form, None if is_own else branch)
        path = self._runtime.resumed_from = str(absolute(manifest.path))
        begins = {"checkpoint": path, "step": manifest.step, "words": dict(vars(branch))}
        self._runtime.parent = manifest.parent if is_own else begins
        self._runtime.saver.goes_on_from(
            self.global_step,
            manifest.metrics if branch.counters == "keep" else {},
            is_own=is_own,
            has_pending_work=self.progress.owed is not None,
            is_local=newest is not None and newest.step != manifest.step,
        )
        self._runtime.saver.local.loaded(manifest, is_own=is_own)
        if self.world.is_main:
            logger.info("resumed from %s at step %d", manifest.path, self.global_step)
            if changed := changed_fields(manifest, self._runtime.config):
                logger.warning(
                    "the config differs from the checkpoint's: %s. The new values apply, unless another line says that "
                    "the checkpoint's stays in use.",
                    "; ".join(changed),
                )
        self._notify("on_load", manifest.path)

    def _close(self) -> None:
        # The directory is released last, since loggers write their last lines.
        with followed_by(self._runtime.saver.release), followed_by(super()._close):
            self._runtime.saver.close()
            ended = self._runtime.coordinator
            if ended.trains and ended.ended_by is None and not self._runtime.session.has_failed:
                self._runtime.saver.local.clear()

    def _best_modes(self) -> dict[str, Mode]:
        parameters = self.__parameters()
        metric = parameters.best_metric
        named: dict[str, Mode] = {} if metric is None else {metric: parameters.known_best_mode()}
        return named | super()._best_modes() | named  # the checkpoints' own metric comes first


def _settled(runtime: Runtime) -> Moment:
    runtime.hooks.settle()
    runtime.coordinator.check_order()
    return Moment(runtime.progress.global_step, has_pending_work=runtime.progress.owed is not None)
