"""Adapters in PEFT's format: a folder inside a model folder, which PEFT and vLLM load over the model and hone applies.

A model folder whose config.json has the key `peft_adapter` keeps the adapter in the subfolder of that name:
adapter_config.json and adapter_model.safetensors, with tensors `base_model.model.MODULE.lora_A.weight` [r, in] and
`lora_B.weight` [out, r].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from hone.base.errors import ArtifactError, SpecError
from hone.base.lazy import lazy
from hone.model.adapters import ADAPTERS
from hone.model.adapters.base import LinearAdapter
from hone.model.adapters.bottlenecks import hub
from hone.model.adapters.bottlenecks.base import Bottleneck
from hone.model.adapters.own_weights import PREFIX
from hone.model.families import FAMILIES
from hone.model.families.stored import read_config
from hone.model.folder import ADAPTER, base_of, is_adapter, read_json
from hone.model.folder import ADAPTER_CONFIG as CONFIG
from hone.model.weights.tensors import layer_modules

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.adapters.base import Adapter
    from hone.model.config import ModelConfig
    from hone.model.shards import Shards

shards = lazy("hone.model.shards")

KEY = "peft_adapter"
"""The key of config.json that names the adapter's folder."""
WEIGHTS = "adapter_model.safetensors"
EMBEDDING = "model.embed_tokens.weight"

_REFUSED = (
    "lora_bias", "fan_in_fan_out",
    "layers_to_transform", "layers_pattern", "layer_replication", "target_parameters", "exclude_modules",
    "alora_invocation_tokens", "megatron_config",
    "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "lora_ga_config", "monteclora_config",
)  # fmt: skip
"""Keys of adapter_config.json that change what an adapter computes, and that are empty or false in the ones hone runs."""
_BESIDE_THE_MODEL = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the model as it is; PEFT changes its weights for others (pissa, olora, corda, loftq)."""


class Opened(NamedTuple):
    """What a folder says of its model, before a tensor is read."""

    model: Path
    """The folder of its weights."""
    adapter: Path | None
    """That of its adapter's, if it has one."""
    values: dict[str, Any]
    """config.json's."""
    plain: ModelConfig
    """The model without the adapter."""
    config: ModelConfig


def opened(folder: Path) -> Opened:
    """The model in `folder`: a model folder, in which config.json may name an adapter, or an adapter's, which names its model.

    Raises ArtifactError for an adapter that hone does not compute, or whose model is not there.
    """
    if is_adapter(folder):
        where, own = base_of(folder), folder
        values, plain = read_config(where)
    else:
        where, own = folder, folder / ADAPTER
        values, plain = read_config(folder)
        if KEY not in values:
            return Opened(folder, None, values, plain, plain)
        if values[KEY] != ADAPTER or plain.adapters:
            raise ArtifactError(
                f"{folder}: {KEY} in config.json is {values[KEY]!r}, which names no adapter that hone applies",
                fix=f"name the subfolder '{ADAPTER}', or remove the key to load the model without the adapter",
            )
    try:
        return Opened(where, own, values, plain, adapted(plain, read(own)))
    except SpecError as error:
        raise ArtifactError(f"{own}: {error.what}", fix=error.fix) from None


def adapted(config: ModelConfig, adapter: Adapter) -> ModelConfig:
    """`config` with `adapter`, which chooses its linears by the names that a PEFT folder stores (`target_modules`).

    Raises SpecError when it names no linear.
    """
    values = config.model_dump(mode="json")
    apart = {"lm_head", "embed_tokens", "model.embed_tokens"} & {*getattr(adapter, "modules_to_save", ())}
    if apart and config.tie_embeddings and not adapter.ensure_weight_tying:  # type: ignore[attr-defined]
        values["tie_embeddings"] = False
    found = type(config).read({**values, "adapters": [adapter.model_dump(mode="json")]})
    if not isinstance(adapter, LinearAdapter):
        return found
    names = target_modules(found, wrapped_modules(found))
    return type(config).read({**values, "adapters": [adapter.model_dump(mode="json") | {"target_modules": names}]})


def read(folder: Path) -> Adapter:
    """The adapter of a PEFT folder, from its adapter_config.json. Raises ArtifactError for one that hone does not compute."""
    values = read_json(folder / CONFIG)
    if hub.is_hub(values):
        return hub.read(folder / CONFIG, values)
    types = {ADAPTERS[kind].peft_type: ADAPTERS[kind] for kind in ADAPTERS}
    wrong = {"peft_type": values.get("peft_type")} if values.get("peft_type") not in types else {}
    if values.get("peft_type") != "LORA":
        own = ("bias", "modules_to_save", "trainable_token_indices")
        wrong |= {name: values[name] for name in own if values.get(name) not in (None, "none", [])}
    wrong |= {name: values[name] for name in _REFUSED if values.get(name)}
    if (first := values.get("init_lora_weights")) not in _BESIDE_THE_MODEL:
        wrong["init_lora_weights"] = first
    targets = values.get("target_modules")
    targets = [targets] if isinstance(targets, str) else targets
    around = wrong or issubclass(types[values["peft_type"]], LinearAdapter)
    if around and (not isinstance(targets, list) or not targets or not all(isinstance(one, str) for one in targets)):
        wrong["target_modules"] = values.get("target_modules")
    for name in ("r", "lora_alpha") if values.get("peft_type") == "LORA" else ():
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            wrong[name] = value
    if not wrong:
        try:
            kinds = [ADAPTERS[kind] for kind in ADAPTERS if ADAPTERS[kind].peft_type == values["peft_type"]]
            found = next(filter(None, (kind.of_peft(values) for kind in kinds)))
            named = {"target_modules": sorted(targets)} if isinstance(found, LinearAdapter) else {}
            return type(found).read({**found.model_dump(mode="json"), **named})
        except (ValueError, KeyError, TypeError, StopIteration, SpecError) as error:
            wrong["its values"] = str(error).splitlines()[0]
    name, value = next(iter(wrong.items()))
    raise ArtifactError(
        f"{folder / CONFIG}: {name} is {value!r}, and hone applies LoRA with rank and alpha patterns, rsLoRA, DoRA, IA3 and soft prompts",
        fix="merge the adapter into its model with PEFT, and remove the key peft_adapter from config.json",
    )


def weights_of(folder: Path) -> str:
    """The name of the file with an adapter's tensors: PEFT's, or AdapterHub's in a folder of it."""
    return hub.WEIGHTS if hub.is_hub(read_json(folder / CONFIG)) else WEIGHTS


def config_values(adapter: Adapter, base: str | None = None, sizes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The adapter_config.json of `adapter`, which names its modules, with the keys that PEFT and vLLM read; `base` is its model's folder,
    `sizes` are those of it that a folder repeats."""
    named = isinstance(adapter, LinearAdapter)
    return {
        "peft_type": adapter.peft_type,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        **adapter.peft_values(),
        **({"bias": "none"} if named and "bias" not in adapter.peft_values() else {}),
        **({"target_modules": sorted(adapter.target_modules)} if named else {}),
        **(sizes or {}),
        "inference_mode": True,
    }


def write(where: Path, config: ModelConfig, tensors: dict[str, Tensor], base: str | None = None) -> None:
    """Writes the adapter of `config` as the folder `where`; `tensors` by their keys. `base`: the folder of its model, to which it is
    applied wherever it lies; None: it lies in it."""
    where.mkdir(exist_ok=True, parents=True)
    adapter = alone(config)
    assert adapter is not None, "no PEFT folder holds these adapters"
    if isinstance(adapter, LinearAdapter):
        own = set(adapter.keys(config).values())
        modules = target_modules(config, (module_of(key) for key in tensors if key not in own))
        if config.tie_embeddings and (PREFIX + EMBEDDING) in tensors:  # PEFT trains and stores both
            tensors = {**tensors, f"{PREFIX}lm_head.weight": tensors[PREFIX + EMBEDDING].clone()}
            names = {one for one in adapter.modules_to_save if not EMBEDDING.endswith(f"{one}.weight")}
            saved = tuple(sorted((names - {"lm_head"}) | {"embed_tokens", "lm_head"}))
            adapter = adapter.model_copy(update={"modules_to_save": saved})
        adapter = adapter.model_copy(update={"target_modules": modules})
    name, values = WEIGHTS, {}
    if isinstance(adapter, Bottleneck):
        name, values = hub.WEIGHTS, hub.config_values(adapter, config, base)
    shards.save_tensors(where / name, {name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
    shards.write_json(where / CONFIG, values or config_values(adapter, base, adapter.peft_sizes(config)))


def module_of(key: str) -> str:
    """The checkpoint module to which the tensor `key` of adapter_model.safetensors belongs."""
    around = [ADAPTERS[kind] for kind in ADAPTERS if issubclass(ADAPTERS[kind], LinearAdapter)]
    ends = [f".{end}" for kind in around for end in kind.stored.values()]
    return key.removeprefix(PREFIX).removesuffix(next((end for end in ends if key.endswith(end)), ""))


def without(
    tensors: Iterable[tuple[str, Tensor]], names: dict[str, str], factors: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """`tensors` but for those in `names`, which go into `factors` under the key that it has for them."""
    for name, tensor in tensors:
        if name in names:
            factors[names[name]] = tensor
        else:
            yield name, tensor


def wrapped_modules(config: ModelConfig) -> set[str]:
    """The checkpoint modules that the adapters of `config` wrap."""
    own = {key for one in config.adapters for key in one.keys(config).values()}  # type: ignore[attr-defined]
    return {module_of(key) for key in keys(config).values() if key not in own}


def target_modules(config: ModelConfig, modules: Iterable[str]) -> tuple[str, ...]:
    """Names by which exactly `modules` of the checkpoint are chosen: last words if that is enough, else whole names."""
    chosen = set(modules)
    every = {"lm_head", *(module.name for index in range(config.num_layers) for module in layer_modules(config, index))}
    leaves = {name.rpartition(".")[2] for name in chosen}
    reached = {name for name in every if name.rpartition(".")[2] in leaves}
    return tuple(sorted(leaves if reached == chosen else chosen))


def keys(config: ModelConfig) -> dict[str, str]:
    """The key in adapter_model.safetensors of each tensor of the adapter of `config`, by its name in hone's checkpoints."""
    found: dict[str, str] = {}
    for one in config.adapters:
        found |= one.keys(config)  # type: ignore[attr-defined]
    for index in range(config.num_layers):
        for path, linear in config.linears(index).items():
            modules = list(config.modules(index, path))
            for adapter, pieces in config.wrappers(index, path, linear):
                names = (
                    dict(zip((piece.name for piece in linear.pieces), modules, strict=True)) if len(modules) > 1 else {}
                )
                for piece in pieces:
                    module = names.get(piece.name, modules[0])
                    for part, end in adapter.stored.items():
                        name = FAMILIES[config.family].tensor(index, f"{path}.{part}_{piece.name}")
                        found[name] = f"{PREFIX}{module}.{end}"
    return found


def key(module: str, part: str) -> str:
    """The key of `part` ('lora_A', 'lora_B') of a checkpoint module."""
    return f"{PREFIX}{module}.{part}.weight"


def beside(adapter: Adapter) -> Adapter:
    """`adapter` without what it trains of the model itself."""
    own = {"bias": "none", "modules_to_save": ()} if hasattr(adapter, "modules_to_save") else {}
    return adapter.model_copy(update=own)


def alone(config: ModelConfig) -> Adapter | None:
    """The adapter of `config` if a folder can hold it: one, that PEFT or AdapterHub has too."""
    adapter = config.adapters[0] if len(config.adapters) == 1 else None
    known = isinstance(adapter, Bottleneck) or (adapter is not None and adapter.peft_type)  # type: ignore[attr-defined]
    return adapter if known else None  # type: ignore[return-value]


class AdaptedShards:
    """The tensors of a model folder and of the adapter in it, these under their names in hone's checkpoints."""

    def __init__(self, model: Shards, adapter: Shards, config: ModelConfig) -> None:
        self.model, self.adapter = model, adapter
        self._keys = keys(config)
        tied = config.tie_embeddings and EMBEDDING in self._keys
        self._twice = {f"{PREFIX}lm_head.weight"} if tied else set[str]()
        """What a PEFT folder stores beside the embedding of a tied model, and is the same."""

    def names(self) -> list[str]:
        """Every tensor's name; a tensor of the adapter that belongs to no module keeps its key."""
        back = {key: name for name, key in self._keys.items()}
        own = [back.get(key, key) for key in self.adapter.names() if key not in self._twice]
        return list(dict.fromkeys([*self.model.names(), *own]))

    def file(self, name: str) -> Path:
        """The file that holds tensor `name`."""
        where, name = self._where(name)
        return where.file(name)

    def tensor(self, name: str) -> Tensor:
        """The tensor called `name`, on the CPU; its memory is the mapped file."""
        where, name = self._where(name)
        return where.tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        where, name = self._where(name)
        return where.shape(name)

    def close(self) -> None:
        """Unmaps the files."""
        self.model.close()
        self.adapter.close()

    def reopened(self) -> Self:
        """The same tensors with memory maps of their own."""
        found = copy(self)
        found.model, found.adapter = self.model.reopened(), self.adapter.reopened()
        return found

    def _where(self, name: str) -> tuple[Shards, str]:
        if name in self._keys:
            return self.adapter, self._keys[name]
        if name in self.adapter.names():
            return self.adapter, name
        if (
            name == "lm_head.weight" and name not in self.model.names()
        ):  # a head that an adapter parted from the embedding
            return self.model, EMBEDDING
        return self.model, name
