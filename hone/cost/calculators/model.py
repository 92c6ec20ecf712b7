"""The sizes of a model that calculators take: by fields, by the name of a known model, or from a folder's config.json."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from hone.base.errors import SpecError, did_you_mean
from hone.cost.calculators.sheet import Calculator
from hone.cost.dims import Attending, LayerDims, ModelDims

_FROM_CONFIG = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate_size": ("moe_intermediate_size", "intermediate_size", "n_inner"),
    "vocab_size": ("vocab_size",),
    "tie_embeddings": ("tie_word_embeddings",),
    "experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "latent_dim": ("kv_lora_rank",),
    "rope_dim": ("qk_rope_head_dim",),
}
"""Fields by the keys of a Hugging Face config.json, the first that is there."""


class Sized(Calculator):
    """A calculator of a decoder of equal layers."""

    model: str = Field(
        "", description="A known model (hone cost models), or a folder with config.json; fields given beside it count."
    )
    layers: int = Field(0, ge=0, description="Layers.")
    hidden_size: int = Field(0, ge=0, description="Width of the residual stream.")
    heads: int = Field(0, ge=0, description="Query heads of a layer.")
    kv_heads: int = Field(0, ge=0, description="Key and value heads of a layer; 0: as many as query heads.")
    head_dim: int = Field(0, ge=0, description="Width of a head; 0: hidden_size / heads.")
    intermediate_size: int = Field(0, ge=0, description="Width of the feed-forward, of one expert; 0: 4 hidden_size.")
    vocab_size: int = Field(0, ge=0, description="Rows of the embedding.")
    gated: bool = Field(True, description="Whether the feed-forward has a gate (SwiGLU): three matrices, not two.")
    tie_embeddings: bool = Field(False, description="Whether the head is the embedding.")
    experts: int = Field(0, ge=0, description="Routed experts of a layer; 0: none.")
    experts_per_token: int = Field(0, ge=0, description="Experts that a token visits.")
    latent_dim: int = Field(0, ge=0, description="Latent attention (MLA): numbers of the compressed keys and values.")
    rope_dim: int = Field(0, ge=0, description="Latent attention: numbers of the key that carries the position.")
    params: float = Field(0, ge=0, description="Weights, where known; 0: counted from the sizes.")
    active_params: float = Field(0, ge=0, description="Weights used for a token, where known; 0: counted.")

    def sized(self, *needed: str) -> Sized:
        """This with the fields of `model` where they are not given, and defaults from other fields. Raises SpecError for the first
        of `needed` that is missing."""
        known = shape_of(self.model) if self.model else {}
        given = {name: getattr(self, name) for name in self.model_fields_set}
        values = {**{name: one for name, one in known.items() if name != "source"}, **given}
        found = self.model_copy(update=values)
        more: dict[str, Any] = {}
        if found.heads and not found.kv_heads:
            more["kv_heads"] = found.heads
        if found.heads and found.hidden_size and not found.head_dim:
            more["head_dim"] = found.hidden_size // found.heads
        if found.hidden_size and not found.intermediate_size:
            more["intermediate_size"] = 4 * found.hidden_size
        found = found.model_copy(update=more)
        for name in needed:
            if not getattr(found, name):
                raise SpecError(
                    f"the calculation needs {name}",
                    fix=f"give --{name}=NUMBER, or --model=llama-3-8b, or a model's folder",
                )
        if found.heads and found.kv_heads and found.heads % found.kv_heads:
            raise SpecError(
                f"kv_heads = {found.kv_heads} does not divide heads = {found.heads}",
                fix="every key head serves equally many",
            )
        if found.experts_per_token > found.experts:
            raise SpecError(
                f"experts_per_token = {found.experts_per_token} of experts = {found.experts}", fix="give --experts, too"
            )
        return found

    @property
    def attention(self) -> str:
        """What the attention is called by its heads."""
        if self.latent_dim:
            return "MLA"
        return "MHA" if self.kv_heads == self.heads else "MQA" if self.kv_heads == 1 else "GQA"

    @property
    def expert_params(self) -> float:
        """Weights of all routed experts."""
        return self.layers * self.experts * (3 if self.gated else 2) * self.hidden_size * self.intermediate_size

    def dims(self) -> ModelDims:
        """The dimensions that hone's estimates take. Latent attention is counted as multi-head attention: give `params` for it."""
        h, inner, query, kv = (
            self.hidden_size,
            self.intermediate_size,
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
        )
        feed = ((2 * inner, h), (h, inner)) if self.gated else ((inner, h), (h, inner))
        visited = self.experts_per_token if self.experts else 1
        router = ((self.experts, h),) if self.experts else ()
        matmuls = ((query + 2 * kv, h), (h, query), *feed * visited, *router)
        layer = LayerDims.attention(matmuls, Attending(self.heads, self.kv_heads, self.head_dim), inner)
        ends = self.vocab_size * h * (1 if self.tie_embeddings else 2) + h
        active = self.layers * (layer.matmul_params + 2 * h) + ends
        idle = self.layers * max(self.experts - visited, 0) * sum(rows * columns for rows, columns in feed)
        return ModelDims(
            int(self.params) or active + idle, int(self.active_params) or active, self.vocab_size, h, 1 << 20,
            self.tie_embeddings, (layer,) * self.layers,
        )  # fmt: skip


def shape_of(model: str) -> dict[str, Any]:
    """The sizes of a known model, or of the folder `model`. Raises SpecError for neither."""
    if model in shapes():
        return shapes()[model]
    file = Path(model) / "config.json"
    if not file.is_file():
        raise SpecError(
            f"no known model '{model}', and no file {file}",
            fix=f"{did_you_mean(model, shapes())}known: {', '.join(shapes())}",
        )
    try:
        values = json.loads(file.read_text(encoding="utf8"))
        values = {**values, **values.get("text_config", {})}
    except ValueError as error:
        raise SpecError(f"{file} is not JSON: {error}", fix="give the folder of a model") from None
    found = {}
    for name, keys in _FROM_CONFIG.items():
        for key in keys:
            if values.get(key) is not None:
                found[name] = values[key]
                break
    found["gated"] = values.get("hidden_act", values.get("activation_function")) in (
        "silu",
        "swiglu",
        "gelu_pytorch_tanh",
    )
    return found


@cache
def shapes() -> dict[str, dict[str, Any]]:
    """Known models: their sizes and the paper that has them."""
    return json.loads((Path(__file__).parent / "shapes.json").read_text(encoding="utf8"))
