"""Bottleneck adapters in AdapterHub's format: adapter_config.json with the key "config", and adapter.safetensors.

Tensors are `model.layers.L.output_adapters.adapters.NAME.adapter_down.0.weight` and so on. What `adapters` 1.2 writes with
`use_safetensors=True` is read, and it loads what is written here the same way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hone.base.errors import ArtifactError, SpecError
from hone.model.adapters import ADAPTERS
from hone.model.adapters.bottlenecks.base import Bottleneck
from hone.model.config import ModelConfig

WEIGHTS = "adapter.safetensors"

_ABSENT = {
    "phm_layer": False,
    "use_gating": False,
    "inv_adapter": None,
    "cross_adapter": False,
    "leave_out": [],
    "dropout": 0.0,
    "stochastic_depth": 0.0,
}
"""Options of AdapterHub that hone does not compute, with the value that says so."""
_OWN = ("reduction_factor", "non_linearity", "scaling")


def is_hub(values: dict[str, Any]) -> bool:
    """Whether an adapter_config.json is AdapterHub's."""
    return "peft_type" not in values and isinstance(values.get("config"), dict)


def read(where: Path, values: dict[str, Any]) -> Bottleneck:
    """The adapter of the folder `where`, by the `values` of its adapter_config.json. Raises ArtifactError for one that hone does not compute."""
    given = values["config"]
    wrong = {name: given[name] for name, none in _ABSENT.items() if given.get(name, none) not in (none, None)}
    kinds = [kind for kind in ADAPTERS if issubclass(ADAPTERS[kind], Bottleneck)]
    for kind in kinds if not wrong else ():
        named = {name: given[name] for name in _OWN if name in given}
        try:
            found = ADAPTERS.read({"kind": kind, "adapter_name": values.get("name") or "hone", **named})
        except SpecError as error:
            wrong["its values"] = str(error).splitlines()[0]
            break
        assert isinstance(found, Bottleneck), "the table has no other"
        mine = found.hub_values()
        if all(given.get(name, value) == value for name, value in mine.items()):
            return found
    wrong = wrong or {name: given.get(name) for name in ("mh_adapter", "output_adapter", "original_ln_before")}
    raise ArtifactError(
        f"{where}: {', '.join(f'{name} {value!r}' for name, value in wrong.items())} is none of AdapterHub's double_seq_bn, seq_bn and par_bn",
        fix="load it with the library `adapters`, or train one of hone's kinds: " + ", ".join(kinds),
    )


def config_values(adapter: Bottleneck, config: ModelConfig, base: str | None) -> dict[str, Any]:
    """The adapter_config.json; `base` is the folder of the model."""
    absent = {**_ABSENT, "init_weights": "mam_adapter" if adapter.first_up == 0 else "bert"}
    return {
        "config": {**adapter.hub_values(), **absent},
        "hidden_size": config.hidden_size,
        "model_class": f"{config.family.capitalize()}ForCausalLM",
        "model_name": base,
        "model_type": config.family,
        "name": adapter.adapter_name,
        "version": "adapters.1.2.0",
    }
