"""The architectures of llama.cpp: what each computes of a family's options, and the hyperparameters that it reads.

What is not in a row is refused: llama.cpp ignores keys and tensors that an architecture does not read, without a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from hone.base.errors import SpecError
from hone.model.config import ModelConfig
from hone.model.rope import Rope


@dataclass(frozen=True)
class Architecture:
    """One row: an architecture of llama.cpp."""

    name: str
    biases: Literal["none", "qkv", "all"] = "none"
    """Linears whose biases it adds: those of queries, keys and values, or of all."""
    neighbours: bool = False
    """Whether it rotates channels 2 i and 2 i + 1 of a head, so that rows of queries and keys are reordered."""
    activation: str = "swiglu"
    scalings: tuple[str, ...] = ("none", "linear", "yarn")
    """Rotary scalings that it computes as hone does."""
    window_period: int | None = None
    """Layers have a window but for each n-th one, unless a key gives another n; None: it has no windows."""
    local_theta: bool = False
    """Whether layers with a window have a rotary base of their own and no scaling."""
    no_rope_period: int | None = None
    """Each n-th layer has no rotary positions; None: all have."""
    whole_heads: bool = False
    """Whether it takes hidden_size for the width of all query heads together."""
    head: Literal["any", "tied", "stored"] = "any"
    """Whether the head may be the embedding: tied, it is never read; stored, it must be in the file."""
    other_scale_at: int | None = None
    """Number of layers at which its attention's scale is that of hidden_size / num_heads, else of head_dim (Gemma); None: head_dim."""
    multipliers: bool = False
    """Whether it reads the multipliers of Granite."""
    softcaps: tuple[str, ...] = ()
    """Which softcaps of Gemma it always applies ('attn', 'final')."""


_LLAMA = Architecture("llama", biases="all", neighbours=True, scalings=("none", "linear", "yarn", "llama3", "longrope"))
_GEMMA2 = Architecture(
    "gemma2", activation="geglu", window_period=2, head="tied", other_scale_at=46, softcaps=("attn", "final")
)
ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": Architecture("qwen2", biases="qkv"),
    "qwen3": Architecture("qwen3", biases="qkv"),
    "phi3": Architecture("phi3", scalings=("none", "longrope"), whole_heads=True),
    "granite": Architecture(
        "granite", biases="all", neighbours=True, scalings=_LLAMA.scalings, multipliers=True
    ),
    "olmo2": Architecture("olmo2", whole_heads=True, head="stored"),
    "gemma2": _GEMMA2,
    "gemma3_text": Architecture(
        "gemma3", activation="geglu", scalings=("none", "linear"), window_period=6, local_theta=True, other_scale_at=62
    ),
    "smollm3": Architecture("smollm3", neighbours=True, no_rope_period=4),
}  # fmt: skip
"""The architecture in llama.cpp of each model_type."""


def architecture(model_type: Any, where: str) -> Architecture:
    """The architecture of a model_type. Raises SpecError for those that hone does not write as GGUF."""
    if model_type not in ARCHITECTURES:
        raise SpecError(
            f"{where}: models of type {model_type!r} cannot be exported as GGUF",
            fix=f"supported are: {', '.join(ARCHITECTURES)}; llama.cpp's convert_hf_to_gguf.py knows more",
        )
    return ARCHITECTURES[model_type]


def hyperparameters(config: ModelConfig, where: str) -> tuple[dict[str, Any], list[str]]:
    """The architecture's metadata, and notes of what llama.cpp does otherwise.

    Raises SpecError for a model that llama.cpp would compute otherwise than hone.
    """
    arch = architecture(config.family, where)
    _check(config, arch, where)
    layer: Any = config.layers[0]
    mixer = layer.mixer
    whole: Any = next((one.mixer for one in config.layers if _window(one) is None), mixer)
    window, notes = _windows(config, arch, where)
    scaling, more = _scaling(whole.rope, arch, where)
    metadata = {
        "context_length": config.max_seq_len,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": layer.feed_forward.intermediate_size,
        "attention.head_count": mixer.num_heads,
        "attention.head_count_kv": mixer.num_kv_heads,
        "attention.key_length": mixer.head_dim,
        "attention.value_length": mixer.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.dimension_count": mixer.rotary_dim or mixer.head_dim,
        "rope.freq_base": float(whole.rope.theta),
        "vocab_size": config.vocab_size,
        **scaling,
        **window,
    }
    if arch.multipliers:
        metadata |= {
            "embedding_scale": float(config.embedding_multiplier),
            "residual_scale": float(config.residual_multiplier),
            "attention.scale": float(mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale),
            "logit_scale": float(config.logits_scaling),
        }
    if mixer.softcap is not None:
        metadata["attn_logit_softcapping"] = float(mixer.softcap)
    if config.logits_softcap is not None:
        metadata["final_logit_softcapping"] = float(config.logits_softcap)
    return {f"{arch.name}.{name}": value for name, value in metadata.items()}, notes + more


def _check(config: ModelConfig, arch: Architecture, where: str) -> None:
    """Raises SpecError for what the architecture has no place for."""
    for index, layer in enumerate(config.layers):
        if layer.mixer.kind != "attention":
            raise SpecError(
                f"{where}: layer {index} mixes with '{layer.mixer.kind}', which llama.cpp has not",
                fix="export a model whose layers all have attention",
            )
        if layer.mixer.sinks:
            raise SpecError(
                f"{where}: the attention of layer {index} has sinks, which this export has no tensors for",
                fix="serve it with hone serve or, as a folder of its family, with vLLM",
            )
    layer: Any = config.layers[0]
    mixer, kind, width = layer.mixer, layer.feed_forward.kind, layer.mixer.num_heads * layer.mixer.head_dim
    if kind != arch.activation:
        usual = {"swiglu": "SiLU", "geglu": "GELU"}[arch.activation]
        raise SpecError(
            f"{where}: llama.cpp computes {usual} in models of type {config.family}, this one has {kind}",
            fix="export a model with the activation that its family has",
        )
    biased = {
        "queries, keys and values": mixer.qkv_bias and arch.biases == "none",
        "the attention output": mixer.out_bias and arch.biases != "all",
        "the feed-forward": layer.feed_forward.bias and arch.biases != "all",
    }
    for what in (name for name, found in biased.items() if found):
        raise SpecError(
            f"{where}: llama.cpp has no biases on {what} of {config.family}",
            fix="export a model with attention_bias and mlp_bias false",
        )
    if arch.whole_heads and width != config.hidden_size:
        raise SpecError(
            f"{where}: llama.cpp takes the {mixer.num_heads} heads of {mixer.head_dim} of a {config.family} model for "
            f"hidden_size {config.hidden_size}",
            fix="export a model whose num_heads * head_dim is its hidden_size",
        )
    if arch.head == "tied" and not config.tie_embeddings:
        raise SpecError(
            f"{where}: llama.cpp's {arch.name} has no head besides the embedding, this model has one",
            fix="export a model with tie_word_embeddings true",
        )
    for name, softcap in (("attn", mixer.softcap), ("final", config.logits_softcap)):
        if name in arch.softcaps and softcap is None:
            raise SpecError(
                f"{where}: llama.cpp always caps the {name} logits of {config.family}, this model's config has none",
                fix=f"set {name}_logit_softcapping in its config.json as it was trained",
            )
    if not arch.multipliers:
        _check_scale(config, arch, where)
    _check_rotated(config, arch, where)


def _check_scale(config: ModelConfig, arch: Architecture, where: str) -> None:
    """Raises SpecError for another scale of the scores than the architecture's own."""
    mixer: Any = config.layers[0].mixer
    other = arch.other_scale_at == config.num_layers
    wanted = (config.hidden_size // mixer.num_heads if other else mixer.head_dim) ** -0.5
    scale = mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale
    if abs(scale - wanted) > 1e-6 * wanted:
        raise SpecError(
            f"{where}: llama.cpp scales the scores of a {config.family} model with {config.num_layers} layers by "
            f"{wanted:g}, this one has {scale:g}",
            fix=f"export a model with query_pre_attn_scalar {round(wanted**-2)}",
        )


def _check_rotated(config: ModelConfig, arch: Architecture, where: str) -> None:
    """Raises SpecError where other layers are without rotary positions than the architecture's."""
    every = arch.no_rope_period
    plain = [index for index, layer in enumerate(config.layers) if layer.mixer.rotary_dim == 0]
    wanted = [index for index in range(config.num_layers) if every is not None and (index + 1) % every == 0]
    if plain != wanted:
        raise SpecError(
            f"{where}: llama.cpp leaves out rotary positions in layers {wanted} of a {config.family} model with "
            f"{config.num_layers} layers, this one in {plain}",
            fix="export a model with the no_rope_layers of its family",
        )


def _window(layer: Any) -> int | None:
    return layer.mixer.window


def _windows(config: ModelConfig, arch: Architecture, where: str) -> tuple[dict[str, Any], list[str]]:
    """The metadata of sliding windows, and a note where the context is shortened for want of them."""
    found = [_window(layer) for layer in config.layers]
    sizes = {size for size in found if size is not None}
    if arch.window_period is None:
        keys: dict[str, Any] = {"attention.sliding_window": max(sizes, default=0)} if arch.name == "phi3" else {}
        if not sizes or min(sizes) >= config.max_seq_len:
            return keys, []
        note = f"context_length is {min(sizes)}, the sliding window: llama.cpp has none for {arch.name} and would attend further back"
        return {**keys, "context_length": min(sizes)}, [note]
    if not sizes:  # Gemma 3 has a way without windows, Gemma 2 sees all of the context through one as long
        return {} if arch.local_theta else {"attention.sliding_window": config.max_seq_len}, []
    local = [size is not None for size in found]
    if len(sizes) > 1:
        raise SpecError(
            f"{where}: its layers have windows of {sorted(sizes)} tokens, llama.cpp has one size for all",
            fix="export a model with one sliding_window",
        )
    tried = (arch.window_period, *range(config.num_layers + 1))
    period = next((one for one in tried if local == _local(one, config.num_layers)), None)
    if period is None:
        raise SpecError(
            f"{where}: llama.cpp has windows in all layers but each n-th, this model in {[index for index, one in enumerate(local) if one]}",
            fix="export a model whose layer_types repeat so",
        )
    keys = {"attention.sliding_window": max(sizes)}
    if period != arch.window_period:
        keys["attention.sliding_window_pattern"] = period
    if arch.local_theta:
        rope: Any = next(layer.mixer.rope for layer in config.layers if _window(layer) is not None)
        if rope.scaling != "none":
            raise SpecError(
                f"{where}: llama.cpp does not scale the rotary positions of layers with a window, this model does ({rope.scaling})",
                fix="export a model whose rope_parameters.sliding_attention are of type default",
            )
        keys["rope.freq_base_swa"] = float(rope.theta)
    return keys, []


def _local(period: int, num_layers: int) -> list[bool]:
    """Which layers have a window: all but each `period`-th; 0: all."""
    return [not period or bool((index + 1) % period) for index in range(num_layers)]


def _scaling(rope: Rope, arch: Architecture, where: str) -> tuple[dict[str, Any], list[str]]:
    """The metadata of rotary scaling, and a note. Raises SpecError for one that llama.cpp computes otherwise."""
    if rope.scaling not in arch.scalings:
        able = ", ".join(arch.scalings)
        raise SpecError(
            f"{where}: llama.cpp does not compute the rotary scaling {rope.scaling!r} of {arch.name} models as hone does",
            fix=f"supported for {arch.name} are: {able}",
        )
    if rope.scaling in ("none", "llama3"):
        return {}, []
    found: dict[str, Any] = {"rope.scaling.type": rope.scaling}
    if rope.scaling == "longrope":
        found |= {
            "rope.scaling.original_context_length": rope.original_max_seq_len,
            "rope.scaling.attn_factor": float(rope.attention_factor),
        }
        note = (
            f"longrope: llama.cpp takes the long divisors for every prompt where its context (-c) is above "
            f"{rope.original_max_seq_len}, and the short ones below; hone takes them by the sequence's length"
        )
        return found, [note]
    found["rope.scaling.factor"] = float(rope.factor)
    if rope.scaling == "yarn":
        usual = _yarn_attention(rope.factor)
        if abs(rope.attention_factor - usual) >= 1e-6 or not rope.truncate:
            raise SpecError(
                f"{where}: llama.cpp computes yarn with attention_factor {usual:g} and whole channels",
                fix="this checkpoint has others; export a model without them",
            )
        found |= {
            "rope.scaling.original_context_length": rope.original_max_seq_len,
            "rope.scaling.yarn_beta_fast": float(rope.beta_fast),
            "rope.scaling.yarn_beta_slow": float(rope.beta_slow),
        }
    return found, []


def _yarn_attention(factor: float) -> float:
    """YaRN's usual attention factor, which llama.cpp applies by itself. arXiv:2309.00071, equation 22."""
    return 0.1 * float(torch.tensor(factor).log()) + 1.0
