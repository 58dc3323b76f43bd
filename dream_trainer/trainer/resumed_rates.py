"""Learning rates and other optimizer options when a run resumes from a checkpoint. A LambdaLR follows this config.
Every other scheduler loads its whole state, arguments such as T_max included."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from dream_trainer.checkpoint import typed_json
from dream_trainer.compat.pytorch import inner_schedulers
from dream_trainer.config.checkpoint_parameters import BranchParameters
from dream_trainer.config.parameter_class import is_ours
from dream_trainer.config.serialize import difference
from dream_trainer.errors import CheckpointError, ConfigError, HookError
from dream_trainer.optim.learning_rates import TokenLR
from dream_trainer.trainer.registry import Scheduler

ANOTHER_RUN = (
    "begin another run from the checkpoint: a new experiment name, resume=<path of the checkpoint> and "
    "branch=BranchParameters({words})"
)
"""How to train with what a run cannot take, as the end of a sentence; `words` are those of a branch."""

Options = list[dict[str, Any]]  # numbers of each parameter group, such as its learning rate and weight decay

# Options that depend on the machine, and `initial_lr`, which is compared as `lr`.
_NOT_COMPARED = "params param_names initial_lr foreach fused capturable differentiable maximize".split()


@dataclass(eq=False, repr=False)
class ResumedRates:
    """Options and schedules as this config builds them, and as a checkpoint changes them."""

    _optimizers: Callable[[], Mapping[str, Optimizer]]
    _schedulers: Callable[[], Mapping[str, Scheduler]]
    _configure: Callable[[], None]  # which assigns the schedulers
    _configured: dict[Optimizer, Options] = field(default_factory=dict)
    _of_checkpoint: dict[Optimizer, Options] = field(default_factory=dict)
    _built: dict[Scheduler, dict[str, Any]] = field(default_factory=dict)  # state before the first step
    _caps: dict[Scheduler, list[float]] = field(default_factory=dict)

    def note_options(self) -> None:
        """Notes the options that `configure_optimizers` set, once, before a schedule changes them."""
        for optimizer in self._optimizers().values():
            self._configured.setdefault(optimizer, [_options(group) for group in optimizer.param_groups])

    def note_built(self) -> None:
        self.note_options()
        for scheduler in self._schedulers().values():
            if scheduler not in self._built:
                self._built[scheduler] = dict(_plain(scheduler.state_dict()))

    def state(self) -> dict[str, Any]:
        """The part of a checkpoint that is in no state of an optimizer or scheduler."""
        schedulers = self._schedulers()
        return {
            "rate_caps": {name: self._caps[one] for name, one in schedulers.items() if one in self._caps},
            "token_origins": {name: one.origin[0] for name, one in schedulers.items() if isinstance(one, TokenLR)},
            "built_schedules": {
                name: {"kind": _kind(one), "state": self._built[one]}
                for name, one in schedulers.items()
                if one in self._built
            },
            "configured_options": {name: self._in_force(one) for name, one in self._optimizers().items()},
        }

    def build_again(self) -> None:
        """Has the schedulers built over the options in force before any schedule changed them."""
        before = self._schedulers().keys()
        for optimizer in self._optimizers().values():
            options_of_groups = chain(self._in_force(optimizer), repeat({}))
            for group, options in zip(optimizer.param_groups, options_of_groups, strict=False):
                base = options.get("lr", group.get("initial_lr", group["lr"]))
                group.pop("initial_lr", None)
                group.update({key: value for key, value in options.items() if key != "lr"})
                set_rate(group, base)
        self._configure()
        if (now := self._schedulers().keys()) != before:
            raise HookError(
                f"configure_schedulers was called again and left the schedulers {sorted(now)}, not {sorted(before)}. "
                "Let it assign the same names each time."
            )
        self.note_built()

    def refuse(self, shared: Mapping[str, Any], branch: BranchParameters) -> None:
        """Raises, before weights are loaded, if schedulers cannot load the checkpoint's state."""
        if branch.schedule == "new":
            return
        self._refuse_other_classes(shared)
        if branch.schedule == "keep" and branch.optimizer == "keep":
            return
        word = 'schedule="extend"' if branch.schedule == "extend" else f'optimizer="{branch.optimizer}"'
        for name, scheduler in self._outermost():
            if not isinstance(scheduler, LambdaLR):
                raise ConfigError(
                    f"branch with {word}: {name!r} is a {type(scheduler).__name__}, whose rates follow "
                    'from those before. Use branch.schedule="new", or a LambdaLR, as build_schedule makes.'
                )

    def _refuse_other_classes(self, shared: Mapping[str, Any]) -> None:
        for name, one in self._outermost():
            then = shared.get("built_schedules", {}).get(name, {}).get("kind", _kind(one))
            if then != _kind(one):
                raise CheckpointError(
                    f"{name} is of class {_kind(one)}, and the checkpoint's is of class {then}, whose state it "
                    'cannot load. Begin a run of another name with branch=BranchParameters(schedule="new").'
                )

    def restore(self, shared: Mapping[str, Any], branch: BranchParameters, tokens_seen: int) -> list[str]:
        """Restores schedulers and rates after the optimizers' state; returns warnings."""
        schedulers, saved = self._schedulers(), shared["schedulers"]
        if branch.schedule != "new" and set(schedulers) != set(saved):
            raise CheckpointError(
                f"it has schedulers {sorted(saved)}, and this trainer {sorted(schedulers)}. A run of another name "
                'begins with its own by branch=BranchParameters(schedule="new").'
            )
        warned = self._take_options(shared.get("configured_options", {}) if branch.optimizer == "keep" else {})
        is_built_again = branch.schedule == "new" and branch.optimizer == "keep"
        if is_built_again:
            self.build_again()
        then = shared["progress"].get("tokens_seen", 0)
        for name, scheduler in self._schedulers().items():
            passed = 0 if branch.schedule == "new" else then - shared.get("token_origins", {}).get(name, 0)
            if isinstance(scheduler, TokenLR):
                scheduler.origin[0] = tokens_seen - passed
        for name, one in self._outermost() if is_built_again else ():
            is_new = one is not schedulers[name]
            if isinstance(one, LambdaLR):  # one by tokens has its origin only now
                _rebase(one, one.base_lrs if is_new else [group["lr"] for group in one.optimizer.param_groups])
            elif not is_new and not isinstance(one, ReduceLROnPlateau):
                raise ConfigError(
                    f'branch with schedule="new": {name} ({type(one).__name__}) was built for the optimizer as it was '
                    "before. Build it in configure_schedulers, which is called again for this."
                )
        return warned if branch.schedule == "new" else warned + self.go_on(shared, branch)

    def go_on(self, shared: Mapping[str, Any], branch: BranchParameters) -> list[str]:
        """Loads schedulers; gives warnings. Arguments as of `restore`."""
        self._refuse_other_classes(shared)
        warned = []
        for name, one in self._outermost():
            saved, then = shared["schedulers"][name], shared.get("built_schedules", {}).get(name)
            if isinstance(one, LambdaLR):
                warned += self._go_on_by_steps(name, one, shared, branch)
                continue
            one.load_state_dict(dict(saved))
            changed = [] if then is None else _changed(then["state"], self._built.get(one, {}))
            if changed:
                anew = ANOTHER_RUN.format(words='schedule="new"')
                warned.append(
                    f"{name} ({type(one).__name__}) is now built with {', '.join(changed)}, and stays as it was. "
                    f"To use this config's, {anew}."
                )
        return warned

    def _go_on_by_steps(
        self, name: str, scheduler: LambdaLR, shared: Mapping[str, Any], branch: BranchParameters
    ) -> list[str]:
        saved, bases = shared["schedulers"][name], list(scheduler.base_lrs)
        n_groups = len(bases)
        pairs = zip(saved["_last_lr"], saved["base_lrs"], strict=True)
        factors = _for_groups([float(rate) / float(base) if float(base) else 1.0 for rate, base in pairs], n_groups)
        if len(saved["base_lrs"]) == n_groups:
            scheduler.load_state_dict(dict(saved))
        else:
            scheduler.last_epoch = saved["last_epoch"]  # all that a new optimizer's groups have of the former ones
        if name in shared.get("rate_caps", {}):
            self._cap(scheduler, _for_groups(shared["rate_caps"][name], n_groups))
        now = [form(scheduler.last_epoch) for form in scheduler.lr_lambdas]
        changes, warned = list(zip(now, factors, strict=True)), []
        if branch.schedule == "extend":
            climbs = [after > before and not math.isclose(after, before) for after, before in changes]
            if any(climbs):
                self._cap(scheduler, [cap if climb else math.inf for cap, climb in zip(factors, climbs, strict=True)])
        elif any(not math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in changes):
            instead = ANOTHER_RUN.format(words='schedule="extend"')
            warned.append(
                f"{name} has another form than in the checkpoint, as for another total_steps. At step "
                f"{scheduler.last_epoch} it multiplied the learning rate by {factors[0]:.4g}, and the new form, from "
                f"the next step on, by {now[0]:.4g}. To not climb back, {instead}."
            )
        if branch.optimizer != "keep":
            _rebase(scheduler, bases)
        return warned

    def _cap(self, scheduler: LambdaLR, caps: Sequence[float]) -> None:
        """From now on no group's factor is above its cap, nor above one that it has already."""
        kept = [min(pair) for pair in zip(caps, self._caps.get(scheduler, caps), strict=True)]
        self._caps[scheduler] = kept
        scheduler.lr_lambdas = [_at_most(form, cap) for form, cap in zip(scheduler.lr_lambdas, kept, strict=True)]

    def _take_options(self, in_force: Mapping[str, Options]) -> list[str]:
        """Options of a checkpoint hold from now on; returns warnings of those that this config sets otherwise."""
        optimizers = self._optimizers()
        self._of_checkpoint = {optimizers[name]: options for name, options in in_force.items()}
        groups: dict[str, list[str]] = {}
        for name, of_groups in in_force.items():
            for group, (mine, theirs) in enumerate(zip(self._configured[optimizers[name]], of_groups, strict=False)):
                for option in (option for option in mine if option in theirs and mine[option] != theirs[option]):
                    both = f"{option}={mine[option]}, and the checkpoint's {theirs[option]} stays in use"
                    groups.setdefault(f"{name}: this config has {both}", []).append(str(group))
        anew = ANOTHER_RUN.format(words='optimizer="moments"')
        return [
            f"{line} (group{'s' * (len(of_line) > 1)} {', '.join(of_line)}). To train on with this config's, {anew}."
            for line, of_line in groups.items()
        ]

    def _in_force(self, optimizer: Optimizer) -> Options:
        return self._of_checkpoint.get(optimizer, self._configured.get(optimizer, []))

    def _outermost(self) -> Iterator[tuple[str, Scheduler]]:
        """Schedulers that are not part of another one, whose state contains theirs."""
        schedulers = self._schedulers()
        inner = {id(part) for scheduler in schedulers.values() for part in inner_schedulers(scheduler)}
        return ((name, one) for name, one in schedulers.items() if id(one) not in inner)


def copied(value: Any) -> Any:
    """An option of a group: a copy if it is a tensor, which steps change in place."""
    return value.clone() if isinstance(value, Tensor) else value


def set_rate(group: dict[str, Any], rate: Any) -> None:
    """Sets a group's learning rate, in place if it is a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {}
    for key, value in group.items():
        value = group.get("initial_lr", value) if key == "lr" else value
        value = float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
        if key not in _NOT_COMPARED and isinstance(value, int | float | tuple | list):
            options[key] = value
    return options


def _plain(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a checkpoint can contain, of the types that it gives back."""
    for key, value in state.items():
        try:
            yield key, typed_json.loads(typed_json.dumps(value))
        except TypeError:
            continue


def _changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Arguments that differ; rates are compared as options, and only what this version of PyTorch has in both."""
    lines = difference({key: then[key] for key in now if key in then}, {key: now[key] for key in then if key in now})
    return [line for line in lines if not line.partition(":")[0].endswith(("base_lrs", "_last_lr"))]


def _kind(scheduler: Scheduler) -> str:
    """The name of its class; PyTorch's for one of ours."""
    return next(cls.__name__ for cls in type(scheduler).__mro__ if not is_ours(cls))


def _for_groups(factors: Sequence[float], n_groups: int) -> list[float]:
    """One for each group; the highest for all if there were other groups."""
    return [*factors] if len(factors) == n_groups else [max(factors)] * n_groups


def _at_most(form: Callable[[int], float], cap: float) -> Callable[[int], float]:
    return lambda step: min(cap, form(step))


def _rebase(scheduler: LambdaLR, bases: Sequence[Any]) -> None:
    scheduler.base_lrs = list(bases)
    rates = []
    for group, base, form in zip(scheduler.optimizer.param_groups, bases, scheduler.lr_lambdas, strict=True):
        group["initial_lr"] = copied(base)
        set_rate(group, base * form(scheduler.last_epoch))
        rates.append(copied(group["lr"]))
    scheduler._last_lr = rates
