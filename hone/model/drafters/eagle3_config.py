"""The sizes of an EAGLE-3 head: read from config.json as SpecForge or speculators write it, and written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from hone.base.errors import SpecError
from hone.model.config import LayerSpec, ModelConfig
from hone.model.drafters.folder import LAYER
from hone.model.families.config_json import from_hf
from hone.model.families.rope_json import write_rope_scaling
from hone.model.feed_forwards.swiglu import SwiGLU
from hone.model.mixers.attention import Attention

_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes of a head."""

    layer: LayerSpec
    """Attention, whose projection to queries, keys and values reads twice `hidden_size`, and SwiGLU."""
    hidden_size: int
    norm_eps: float
    max_seq_len: int
    vocab_size: int
    """Tokens of the model."""
    draft_vocab_size: int
    """Of these, tokens that the head guesses."""
    taps: tuple[int, ...]
    """The model's layers, from 0, after which it reads hidden states: a low one, one in the middle, a high one."""
    target_hidden_size: int
    """Width of those."""
    norm_before_residual: bool = False
    """Whether the residual stream is h after its norm, as in some heads of speculators."""

    @classmethod
    def of(cls, values: dict[str, Any], where: str, num_layers: int) -> Self:
        """From the `values` of the config.json called `where`, of a head for a model of `num_layers`. Raises SpecError for what hone cannot run."""
        own = values.get(LAYER) or values
        count = own.get("num_hidden_layers", 1)
        if count != 1:
            raise SpecError(
                f"{where}: the head has {count} layers, hone runs one", fix="give an EAGLE-3 head of one layer"
            )
        try:
            config = from_hf({**own, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}, where)
        except KeyError as error:
            raise SpecError(f"{where} has no {error.args[0]}", fix="give the head's own config.json") from None
        told = (values.get("eagle_config") or {}).get(_IDS)
        if values.get(_IDS):  # as vLLM counts: 0 is the embedding, n what layer n - 1 gives
            told = [one - 1 for one in values[_IDS]]
        taps = tuple(told or default_taps(num_layers))
        wrong = [one for one in taps if not 0 <= one < num_layers]
        if wrong:
            raise SpecError(
                f"{where}: the head reads hidden states after layer {wrong[0]}, the model has layers 0 to {num_layers - 1}",
                fix="give a head that was trained for this model",
            )
        return cls(
            layer=config.layers[0],
            hidden_size=config.hidden_size,
            norm_eps=config.norm_eps,
            max_seq_len=config.max_seq_len,
            vocab_size=config.vocab_size,
            draft_vocab_size=values.get("draft_vocab_size") or config.vocab_size,
            taps=taps,
            target_hidden_size=values.get("target_hidden_size") or own.get("target_hidden_size") or config.hidden_size,
            norm_before_residual=bool(values.get("norm_before_residual")),
        )

    @classmethod
    def beside(cls, model: ModelConfig, draft_vocab_size: int, taps: tuple[int, ...]) -> Self:
        """Of a new head for a model of `model`: its layer has the widths of the model's first one. Raises SpecError for other mixers."""
        first = model.layers[0]
        mixer, fed = first.mixer, first.feed_forward
        if not isinstance(mixer, Attention):
            raise SpecError(
                f"objective eagle3 makes a layer of attention like the model's, whose first layer has mixer '{mixer.kind}'",
                fix="train objective medusa beside this model",
            )
        inner = getattr(fed, "intermediate_size", None) if isinstance(fed, SwiGLU) else None
        sizes = {"num_heads": mixer.num_heads, "num_kv_heads": mixer.num_kv_heads, "head_dim": mixer.head_dim}
        own = Attention(kind="attention", rope=mixer.rope, **sizes)
        feed_forward = SwiGLU(kind="swiglu", intermediate_size=inner or 4 * model.hidden_size)
        return cls(
            layer=LayerSpec(mixer=own, feed_forward=feed_forward),
            hidden_size=model.hidden_size,
            norm_eps=model.norm_eps,
            max_seq_len=model.max_seq_len,
            vocab_size=model.vocab_size,
            draft_vocab_size=min(draft_vocab_size, model.vocab_size),
            taps=taps or default_taps(model.num_layers),
            target_hidden_size=model.hidden_size,
        )

    @property
    def num_params(self) -> int:
        """Parameters of a head that uses the model's embedding."""
        width = self.hidden_size
        layer = self.layer
        q = layer.mixer.num_heads * layer.mixer.head_dim
        kv = layer.mixer.num_kv_heads * layer.mixer.head_dim
        inner = layer.feed_forward.intermediate_size
        matrices = (q + 2 * kv) * 2 * width + width * q + 3 * inner * width
        return len(self.taps) * self.target_hidden_size * width + matrices + 4 * width + self.draft_vocab_size * width


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The layers, from 0, after which a head reads hidden states if nothing says which: those that vLLM and SGLang take."""
    low = min(1, num_layers - 1)
    middle = max(low, num_layers // 2 - 1)
    return low, middle, max(middle, num_layers - 4)


def to_values(config: Eagle3Config, model: ModelConfig, base: str, dtype: str) -> dict[str, Any]:
    """config.json of a head as SpecForge writes it; `base` is the folder of its model, of `model`."""
    mixer = config.layer.mixer
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "base_model_name_or_path": base,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.layer.feed_forward.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": mixer.rope.theta,
        "rope_scaling": write_rope_scaling(mixer.rope),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": list(model.eos_token_ids) or None,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "torch_dtype": dtype,
        "eagle_config": {_IDS: list(config.taps), "use_aux_hidden_state": True},
        _IDS: [layer + 1 for layer in config.taps],
    }
