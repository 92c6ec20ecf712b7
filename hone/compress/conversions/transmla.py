"""TransMLA: latent attention from attention whose query heads share key/value heads, by rotations and principal components."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.base.run import Run
from hone.compress.conversions.base import Conversion, must_be_plain, with_layers
from hone.compress.step import Targets
from hone.cost.compress.compression import Passes
from hone.model.families.config_json import to_hf
from hone.model.families.deepseek_json import NORM_EPS

if TYPE_CHECKING:
    from pathlib import Path

    from hone.compress.capture import Flow
    from hone.model.config import LayerSpec, ModelConfig
    from hone.model.weights.model import ModelSource

tensors = lazy("hone.compress.conversions.tensors")
latents = lazy("hone.compress.conversions.latents")
frequencies = lazy("hone.compress.conversions.frequencies")

_PLAIN = ("qkv_bias", "out_bias", "qk_norm", "window", "softcap", "sinks")
_FAMILY = "deepseek_v3"


class TransMLA(Conversion):
    """Makes latent attention (MLA) of grouped-query attention: one small latent a token replaces its keys and values. Meng et al. 2025, arXiv:2502.07864.

    The keys of all heads are turned, at each rotary frequency, so that the first of them has most of what they do: it alone keeps its
    rotary positions and is shared by all heads. The other keys and the values become one latent, their first principal components.
    """

    paper: ClassVar[str] = "arXiv:2502.07864"

    kv_rank: int | None = Field(
        None, gt=0, description="Width of the latent; empty: as many as there are, which loses nothing."
    )
    rope_heads: int = Field(
        1,
        gt=0,
        description="Turned keys of each frequency that keep rotary positions: with num_kv_heads x fold of them the conversion loses "
        "nothing; above 1 the folder is one that only hone reads.",
    )
    fold: int = Field(
        1,
        gt=0,
        description="Neighbouring frequencies that count as one: the rotated part has rope_heads x head_dim / fold channels.",
    )
    latent_norm: bool = Field(
        True,
        description="Whether the latent is normed, as in DeepSeek's models: the norm's weight is the latent's mean size, which is not "
        "exact. False keeps latents as they are, in a folder that only hone reads.",
    )

    def convert(self, index: int, layer: LayerSpec, config: ModelConfig) -> LayerSpec | None:
        mixer = layer.mixer
        if mixer.kind != "attention":
            return None
        must_be_plain(self.kind, index, mixer, *_PLAIN)
        pairs = mixer.head_dim // 2
        if mixer.rotary_dim is not None:
            raise SpecError(
                f"{self.kind}: the attention of layer {index} rotates {mixer.rotary_dim} of {mixer.head_dim} channels",
                fix="give a model whose heads are rotated whole",
            )
        if pairs % self.fold:
            raise SpecError(
                f"{self.kind}: fold {self.fold} does not divide the {pairs} frequencies of layer {index}",
                fix=f"give a fold that divides {pairs}",
            )
        most = mixer.num_kv_heads * self.fold
        if self.rope_heads > most:
            raise SpecError(
                f"{self.kind}: rope_heads {self.rope_heads} of {most} keys at each frequency",
                fix=f"give at most {most}",
            )
        rope_dim = self.rope_heads * mixer.head_dim // self.fold
        full = 2 * mixer.num_kv_heads * mixer.head_dim - rope_dim
        rank = self.kv_rank or full
        if rank > full:
            raise SpecError(
                f"{self.kind}: kv_rank {rank} of {full} numbers, which are all that layer {index} has beside the rotated key",
                fix=f"give at most {full}, or leave kv_rank out",
            )
        mla = {
            "kind": "mla",
            "num_heads": mixer.num_heads,
            "head_dim": mixer.head_dim,
            "rope_dim": rope_dim,
            "latent_dim": rank,
            "rope": frequencies.repeated(mixer.rope, mixer.head_dim, self.fold, self.rope_heads, config.max_seq_len),
            "rope_interleaved": True,
            "latent_norm_eps": NORM_EPS,
            "value_dim": mixer.head_dim,
            "latent_norm": self.latent_norm,
        }
        return type(layer).read({**layer.model_dump(mode="json"), "mixer": mla})

    def reshape(self, config: ModelConfig) -> ModelConfig:
        layers = self.converted(config)
        made = with_layers(config, layers)
        try:
            known = with_layers(config, layers, family=_FAMILY)
            to_hf(known)
        except SpecError:
            return made  # a stack that no class of transformers has: in hone's own format
        return known

    def rewrite(
        self, checkpoint: ModelSource, flow: Flow | None, targets: Targets, state: Path, run: Run
    ) -> tuple[ModelSource, dict[str, Any]]:
        config = self.reshape(checkpoint.config)
        known = latents.read(state, run.mesh)
        if known is None:
            assert flow is not None, "transmla measures keys and values"
            known = latents.measure(checkpoint, config, flow, run, self.fold)
            if run.mesh.leads:
                latents.write(known, state)
        parts = [one.kept for one in known.values()]
        run.say(
            f"transmla: latents of {min(parts):.1%} to {max(parts):.1%} of the energy of keys and values, by layer; rotated keys have "
            f"{sum(one.rotated for one in known.values()) / len(known):.1%} of the keys' energy"
        )
        made = tensors.converted(checkpoint, config, latents.Made(known, self.fold).recipe)
        return made, {"kept": {index: one.kept for index, one in known.items()}}

    def passes(self, config: ModelConfig) -> Passes | None:
        return Passes(1.1, observed=2 * config.hidden_size * config.num_layers)
