"""StateRegistry: checkpointed state other than weights, optimizers and data, and how each part is saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor

from dream_trainer.checks import check_choice
from dream_trainer.config.checkpoint_parameters import BranchParameters
from dream_trainer.errors import HookError
from dream_trainer.events.collection import numbered
from dream_trainer.screen import logger
from dream_trainer.trainer.counters import Counters

if TYPE_CHECKING:
    from dream_trainer.trainer.runtime import Runtime

Scope = Literal["shared", "rank", "tensors"]
CALLBACK_PREFIX = "callbacks."  # names: `callbacks.<class>.<number within the class>.<name>`
REGISTERED_PREFIX = "registered."  # and those of `register_state` `registered.<name>.<name of the tensor>`


class Registered(NamedTuple):
    save: Callable[[], Any]
    load: Callable[[Any], None]
    goes_with_counters: bool  # or, like the user's state, with the weights


class StateRegistry:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._registered: dict[Scope, dict[str, Registered]] = {"shared": {}, "rank": {}, "tensors": {}}

    def register(
        self,
        name: str,
        save: Callable[[], Any],
        load: Callable[[Any], None],
        *,
        scope: Scope = "shared",
        goes_with_counters: bool = False,
    ) -> None:
        """As `register_state` of the trainer."""
        check_choice("scope", scope, ("shared", "rank", "tensors"))
        if any(name in registered for registered in self._registered.values()):
            raise HookError(f"register_state({name!r}) was called twice. Give one of the states another name.")
        if self._runtime.session.is_resumed:
            raise HookError(
                f"register_state({name!r}) was called after the checkpoint was loaded. Call it in __init__, in a "
                "configure_ method or in a callback's post_setup."
            )
        self._registered[scope][name] = Registered(save, load, goes_with_counters)

    def plain(self) -> dict[str, Any]:
        """Plain values that are equal on all ranks."""
        runtime, scale = self._runtime, self._runtime.accumulation.loss_scale
        return {
            "progress": runtime.progress.state_dict(),
            "loss_scale": None if scale is None else scale.state_dict(),
            "schedulers": {name: one.state_dict() for name, one in runtime.registry.schedulers().items()},
            **runtime.rates.state(),
            "callbacks": [{"class": type(c).__name__, "state": c.state_dict()} for c in runtime.config.callbacks],
            "mixins": {name: one.save() for name, one in self._registered["shared"].items()},
            "user": runtime.hooks.state_dict(),
        }

    def load(
        self, shared: Mapping[str, Any], tensors: Collection[str], branch: BranchParameters, *, is_own: bool
    ) -> None:
        """Loads what all ranks share of a checkpoint, which has `tensors` and `is_own` if the run itself wrote it."""
        runtime = self._runtime
        runtime.progress.load_state_dict(_progress(shared["progress"], branch))
        scale, saved_scale = runtime.accumulation.loss_scale, shared.get("loss_scale")
        if branch.optimizer != "new" and scale is not None and saved_scale is not None:
            scale.load_state_dict(saved_scale)
        warned = runtime.rates.restore(shared, branch, runtime.progress.tokens_seen)
        for line in warned if runtime.world.is_main else ():
            logger.warning("%s", line)
        _load_callbacks(runtime, shared["callbacks"], tensors, None if is_own else branch)
        for name, one in self._registered["shared"].items():
            if name in shared["mixins"] and (branch.counters == "keep" or not one.goes_with_counters):
                one.load(shared["mixins"][name])
        runtime.hooks.load_state_dict(shared["user"])
        for name, one in self._registered["tensors"].items():
            own = one.save()
            if all(f"{REGISTERED_PREFIX}{name}.{key}" in tensors for key in own):
                one.load(own)

    def of_rank(self) -> dict[str, Any]:
        """This rank's own plain values."""
        registered = {name: one.save() for name, one in self._registered["rank"].items()}
        return {"user": self._runtime.hooks.rank_state_dict()} | ({"registered": registered} if registered else {})

    def load_of_rank(self, saved: Mapping[str, Any]) -> None:
        self._runtime.hooks.load_rank_state_dict(saved["user"])
        for name, one in self._registered["rank"].items():
            if name in saved.get("registered", {}):
                one.load(saved["registered"][name])

    def tensors(self, saved: Collection[str] | None = None) -> dict[str, Tensor]:
        """Tensors, sharded or equal on all ranks; given a checkpoint's names, only of owners that have some there."""
        owned: dict[str, Mapping[str, Tensor]] = {
            f"{CALLBACK_PREFIX}{name}.": callback.checkpoint_tensors()
            for name, callback in numbered(self._runtime.config.callbacks)
        }
        owned |= {f"{REGISTERED_PREFIX}{name}.": one.save() for name, one in self._registered["tensors"].items()}
        return {
            f"{prefix}{name}": tensor
            for prefix, of_one in owned.items()
            for name, tensor in of_one.items()
            if saved is None or any(f"{prefix}{other}" in saved for other in of_one)
        }


def _progress(saved: dict[str, Any], branch: BranchParameters) -> dict[str, Any]:
    """The counters to begin from; they include the position in the data, which `branch` decides separately."""
    fresh = Counters().state_dict()
    counters = saved if branch.counters == "keep" else fresh
    position = saved if branch.data == "keep" else fresh
    of_data = ("data", "is_pass_over", "loader_was_replaced")
    of_epoch = ("batch_idx", "epoch_steps") if branch.data == "new" else ()  # its data restart, so the epoch restarts
    return counters | {name: position[name] for name in (*of_data, *of_epoch) if name in position}


def _load_callbacks(
    runtime: Runtime, saved: Iterable[dict[str, Any]], tensors: Collection[str], begins: BranchParameters | None
) -> None:
    """Matches callbacks by class and by their order within it, so that adding or removing one does not shift others."""
    left = list(saved)
    for place, callback in numbered(runtime.config.callbacks):
        class_name, prefix = type(callback).__name__, f"{CALLBACK_PREFIX}{place}."
        match = next((entry for entry in left if entry["class"] == class_name), None)
        if match is not None:
            left.remove(match)
        lacks_tensors = any(prefix + name not in tensors for name in callback.checkpoint_tensors())
        if match is None or lacks_tensors:
            if (callback.state_dict() or lacks_tensors) and runtime.world.is_main:
                logger.warning("the checkpoint has no state of callback %s; it starts without any.", class_name)
            continue
        callback.load_state_dict(match["state"])
        if begins is not None:
            callback.begin_branch(new_counters=begins.counters == "new", new_data=begins.data == "new")
    lost = [entry["class"] for entry in left if entry["state"]]
    if lost and runtime.world.is_main:
        logger.warning("the checkpoint has state of callbacks that are no longer there: %s.", ", ".join(lost))
