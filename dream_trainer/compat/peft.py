"""How peft wraps a model: which of its tensors are the base's, which an adapter's, and how the two become one.

peft's own functions take whole tensors, all at once; so only names are asked of it, and shards are read one by one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, cast

from torch import nn

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


@dataclass(frozen=True)
class LowRank:
    """A product of two narrow matrices that is added to a weight of the base."""

    down: str  # name of the matrix of shape (rank, inputs)
    up: str  # name of that of shape (outputs, rank)
    scaling: float
    is_transposed: bool  # whether the base has its weight as (inputs, outputs), as embeddings do


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model and the weights they are added to; plain values, which a checkpoint keeps."""

    config: Mapping[str, Any]  # the content of peft's `adapter_config.json`
    names: Mapping[str, str]  # the name of each of the adapter's tensors in peft's files, to its name in the model
    base: Mapping[str, str]
    """Maps the base author's name of each tensor to the name of the tensor with its values in the model."""
    low_rank: Mapping[str, LowRank] = field(default_factory=dict)
    """Maps the author's names to the products to add to some of `base`."""
    cannot_merge: str = ""  # why the two cannot be merged here; "" if they can
    active: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Each adapter that is active, by peft's name of it, with its config; empty in earlier checkpoints."""


def peft_model(model: nn.Module) -> PeftModel | None:
    """`model`, if peft has put adapters into its layers, not only prompts. Does not import peft for that."""
    if "peft" not in sys.modules:
        return None
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTuner

    return model if isinstance(model, PeftModel) and isinstance(model.base_model, BaseTuner) else None


def base_names(model: PeftModel, names: Iterable[str]) -> dict[str, str]:
    """The name that the base's author gave each tensor, to its name in the model; adapters' are left out."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    wrapped = {name for name, m in model.named_modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)}
    prefix = "base_model.model."
    found = {}
    for name in names:
        kept: list[str] = []
        parts = name.split(".")
        for at, part in enumerate(parts):
            if ".".join(parts[:at]) not in wrapped:
                kept.append(part)
            elif part not in ("base_layer", "original_module"):
                break
        else:
            if name.startswith(prefix):
                found[".".join(kept).removeprefix(prefix)] = name
    return found


def trained_copies(model: PeftModel) -> list[tuple[nn.Module, nn.Module]]:
    """Modules of the base that are trained whole (`modules_to_save`): the original, and the copy that is trained."""
    from peft.utils.other import ModulesToSaveWrapper

    return [
        (wrapper.original_module, wrapper.modules_to_save[name])
        for wrapper in model.modules()
        if isinstance(wrapper, ModulesToSaveWrapper)
        for name in wrapper.active_adapters
    ]


def adapted_weights(model: PeftModel) -> list[str]:
    """The names in the model of the base's weights that adapters are put on."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [
        f"{name}.base_layer.{inner}"
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
        for inner, _ in module.get_base_layer().named_parameters()
    ]


def may_start_from_the_base(model: PeftModel) -> str:
    """A setting of an adapter under which it may start from the base's weights; "" if none does."""
    for config in model.peft_config.values():
        values, kind = vars(config), str(getattr(config.peft_type, "value", config.peft_type))
        if kind not in _START_BY_THEMSELVES:
            return f"peft_type={kind!r}"
        way = values.get("init_lora_weights", True)
        if way not in (True, False, "gaussian", "orthogonal", "eva"):
            return f"init_lora_weights={way!r}"
        found = next((name for name in ("use_dora", "kasa_config") if values.get(name)), None)
        if found is not None:
            return f"{found}={values[found]!r}"
    return ""


_START_BY_THEMSELVES = {
    *("LORA", "ADALORA", "IA3", "LOHA", "LOKR", "BOFT", "OFT", "HRA", "HIRA", "VERA", "PVERA", "RANDLORA", "VBLORA"),
    *("FOURIERFT", "WAVEFT", "GRALORA", "GLORA", "LILY", "PEANUT", "BEFT", "C3A", "MISS", "ROAD", "UNILORA"),
}


def describe_adapters(
    model: PeftModel,
    names: Iterable[str],
    *,
    tied: Mapping[str, Sequence[str]],
    base_class: type[nn.Module],
    base_path: str | None,
) -> Adapters:
    from peft import get_peft_model_state_dict

    names, active = list(names), model.active_adapters
    adapter = active[0]
    # peft renames what it is given, whatever it is: so names are given, and no tensor is gathered.
    given: dict[str, Any] = {name: name for name in names}
    own: Any = get_peft_model_state_dict(model, state_dict=given, adapter_name=adapter, save_embedding_layers=False)
    base = base_names(model, names)
    low_rank, copies, reason = _mergeable(model, adapter, base, tied)
    if len(active) > 1:
        reason = f"{active} are active at once"
    configs = {name: _config(model.peft_config[name], base_class, base_path) for name in active}
    return Adapters(configs[adapter], own, base | copies, low_rank, reason, configs)


def _config(config: PeftConfig, base_class: type[nn.Module], base_path: str | None) -> dict[str, Any]:
    values = config.to_dict() | {"inference_mode": True}
    if not values.get("base_model_name_or_path"):
        values["base_model_name_or_path"] = base_path
    if config.task_type is None:
        values["auto_mapping"] = {"base_model_class": base_class.__name__, "parent_library": base_class.__module__}
    return _plain(values)


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of an `adapter_config.json`, with the installed peft's values for fields that it lacks."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kind: Any = PEFT_TYPE_TO_CONFIG_MAPPING.get(config.get("peft_type", ""))
    if kind is None:
        return dict(config)
    values = {f.name: f.default for f in fields(kind) if f.default is not MISSING}
    return {**_plain(values), **config}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    text = json.dumps(values, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
    return cast("dict[str, Any]", json.loads(text))


def _mergeable(
    model: PeftModel, adapter: str, base: Mapping[str, str], tied_elsewhere: Mapping[str, Sequence[str]]
) -> tuple[dict[str, LowRank], dict[str, str], str]:
    """The products to add, replacements of the base's tensors, and the reason if they cannot be merged."""
    from peft.tuners.lora import Embedding, Linear
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    low_rank: dict[str, LowRank] = {}
    copies: dict[str, str] = {}
    authors = {name: author for author, name in base.items()}
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    for name, names in tied_elsewhere.items():
        names_of[model.get_parameter(name)] = list(names)
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            for inner, _ in module.original_module.named_parameters():
                original = f"{name}.original_module.{inner}"
                tied = [other for other in names_of[model.get_parameter(original)] if not other.startswith(f"{name}.")]
                if tied:
                    return {}, {}, f"{name} is trained whole, and its weight was also {tied[0]}, which is not"
                if original in authors:
                    copies[authors[original]] = f"{name}.modules_to_save.{adapter}.{inner}"
        elif isinstance(module, AuxiliaryTrainingWrapper):
            return {}, {}, f"{name} is a {type(module).__name__}"
        elif isinstance(module, Linear | Embedding):
            weight = f"{name}.base_layer.weight"
            if adapter in module.lora_variant or module.lora_bias.get(adapter):
                return {}, {}, f"{name} is more than a product added to a weight (such as DoRA, or a bias)"
            if weight not in authors or not model.get_parameter(weight).is_floating_point():
                return {}, {}, f"{name} is added to a weight that is tied or quantized"
            tied = [other for other in names_of[model.get_parameter(weight)] if other != weight]
            if tied and adapter in module.scaling:
                return {}, {}, f"{name} is added to a weight that is also {tied[0]}, which would change with it"
            if adapter in module.scaling:
                is_embedding = isinstance(module, Embedding)
                down, up = (
                    f"{name}.lora_embedding_{part}.{adapter}"
                    if is_embedding
                    else f"{name}.lora_{part}.{adapter}.weight"
                    for part in "AB"
                )
                is_transposed = is_embedding or bool(module.fan_in_fan_out)
                low_rank[authors[weight]] = LowRank(down, up, float(module.scaling[adapter]), is_transposed)
        elif isinstance(module, BaseTunerLayer):
            return {}, {}, f"{name} is a {type(module).__name__}, and no low-rank product of a linear layer"
    return low_rank, copies, ""
