"""The model's own weights that an adapter trains beside its factors: modules to save, and biases of linears."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from hone.base.errors import SpecError
from hone.model.linear_spec import NormSpec

PREFIX = "base_model.model."
"""What PEFT puts before the names of a model's modules."""


class OwnWeight(NamedTuple):
    """A parameter of the decoder that is trained whole."""

    part: str
    """The part of the decoder that has it: 'embed_tokens', 'layers.3'."""
    path: str
    """Its path in the decoder: 'layers.3.mixer.qkv.inner.bias'."""
    shape: tuple[int, ...]
    tensors: dict[str, tuple[str, int]]
    """The checkpoint tensors it is made of, in order, each with its key in a PEFT folder and its rows."""

    @property
    def num_params(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count


def own_weights(adapter: Any, config: Any) -> list[OwnWeight]:
    """Those that the LoRA `adapter` of the model of `config` trains.

    Raises SpecError for a module to save that is neither an end of the model nor a norm, and for a bias that is shared by
    modules of which some are not wrapped.
    """
    found = list(_saved(adapter, config)) if adapter.modules_to_save else []
    return found + (list(_biases(adapter, config)) if adapter.bias != "none" else [])


def _saved(adapter: Any, config: Any) -> Iterator[OwnWeight]:
    """The modules in `modules_to_save`; of a tied model the embedding for its head, too."""
    hit, sizes = set[str](), (config.vocab_size, config.hidden_size)
    known = {"embed_tokens": ("embed_tokens", "model.embed_tokens", sizes), "norm": ("norm", "model.norm", sizes[1:])}
    known["lm_head"] = known["embed_tokens"] if config.tie_embeddings else ("lm_head", "lm_head", sizes)
    every = [(part, part, module, shape) for part, module, shape in known.values()]
    named = {part: {"lm_head", "model.embed_tokens"} for part in ("embed_tokens",) if config.tie_embeddings}
    for index in range(config.num_layers):
        names = config.singles(index)
        for path, one in config.parameters(index).items():
            if isinstance(one, NormSpec):
                owner = f"layers.{index}.{path}".removesuffix(".weight")
                every.append((f"layers.{index}", owner, names[path].removesuffix(".weight"), one.shape))
    for part, owner, module, shape in dict.fromkeys(every):
        ends = {
            end
            for end in adapter.modules_to_save
            for name in named.get(part, {module})
            if name.endswith(end)  # as PEFT has it: 'norm' are all norms
        }
        hit |= ends
        if ends:
            tensors = {f"{module}.weight": (f"{PREFIX}{module}.weight", shape[0])}
            yield OwnWeight(part, f"{owner}.weight", shape, tensors)
    if missing := set(adapter.modules_to_save) - hit:
        raise SpecError(
            f"modules_to_save {sorted(missing)} name no embedding, head or norm of the model",
            fix="name embed_tokens, lm_head, norm or a layer's norms; give linears to target_modules",
        )


def _biases(adapter: Any, config: Any) -> Iterator[OwnWeight]:
    """The biases of wrapped linears, or with bias: all of every linear of the layers."""
    for index in range(config.num_layers):
        for path, linear in config.linears(index).items():
            if not linear.bias or linear.experts is not None:
                continue
            around, modules = config.wrappers(index, path, linear), config.modules(index, path)
            wrapped = {piece.name for _, pieces in around for piece in pieces}
            names = dict(zip(modules, (piece.name for piece in linear.pieces))) if len(modules) > 1 else {}
            inside = {module: bool(around) and names.get(module, linear.name) in wrapped for module in modules}
            if adapter.bias == "lora_only" and not any(inside.values()):
                continue
            if adapter.bias == "lora_only" and not all(inside.values()):
                left = [module for module, taken in inside.items() if not taken]
                raise SpecError(
                    f"bias lora_only trains the biases of wrapped modules, which one tensor holds with those of {', '.join(left)}",
                    fix="give target_modules all of these, or bias: all or none",
                )
            tensors = {
                f"{module}.bias": (f"{PREFIX}{module}{'.base_layer' if inside[module] else ''}.bias", rows)
                for module, rows in modules.items()
            }
            owner = f"layers.{index}.{path}{'.inner' * len(around)}"
            yield OwnWeight(f"layers.{index}", f"{owner}.bias", (linear.out_features,), tensors)
