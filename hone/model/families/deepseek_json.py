"""Translation between DeepSeek's fields of config.json, of latent attention and of experts in groups, and those of `MLA` and `MoE`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from hone.base.errors import SpecError
from hone.model.families.experts_json import read_training, whole, write_training

NORM_EPS = 1e-6
"""What the classes of transformers add in the norms of latents, whatever rms_norm_eps is."""
_BIAS, _SEQUENCE = {"kind": "bias", "rate": 1e-3}, "sequence_loss"


@dataclass(frozen=True)
class Latent:
    """How a family's config.json describes latent attention."""

    interleave: str = ""
    """The field that says whether rotated pairs are neighbours; empty: they are."""

    def read(self, values: dict[str, Any], scaling: dict[str, Any], where: str) -> dict[str, Any]:
        """The mixer of every layer, without its rope; `scaling` are the rotary fields. Raises SpecError naming the field that is wrong."""
        heads, keys = values["num_attention_heads"], values.get("num_key_value_heads")
        if keys not in (None, heads):
            raise SpecError(
                f"{where}: num_key_value_heads is {keys!r}, and each of {heads} heads has keys of its own from the latent",
                fix=f"set num_key_value_heads to {heads}",
            )
        warmer = scaling.get("mscale_all_dim") or 0.0
        if isinstance(warmer, bool) or not isinstance(warmer, (int, float)) or warmer < 0:
            raise SpecError(f"{where}: mscale_all_dim is {warmer!r}", fix="set it to a number, 0 for none")
        return {
            "kind": "mla",
            "num_heads": heads,
            "head_dim": whole(values, "qk_nope_head_dim", where),
            "value_dim": whole(values, "v_head_dim", where),
            "rope_dim": whole(values, "qk_rope_head_dim", where),
            "latent_dim": whole(values, "kv_lora_rank", where),
            "q_latent_dim": None if values.get("q_lora_rank") is None else whole(values, "q_lora_rank", where),
            "rope_interleaved": not self.interleave or bool(values.get(self.interleave, True)),
            "mscale_all_dim": warmer,
            "latent_norm_eps": NORM_EPS,
        }

    def write(self, mixer: Any) -> dict[str, Any]:
        """The fields of config.json that an `MLA` has, but for rope_theta and what `scaling` adds to rope_scaling."""
        return {
            "num_key_value_heads": mixer.num_heads,
            "qk_nope_head_dim": mixer.head_dim,
            "v_head_dim": mixer.values,
            "qk_rope_head_dim": mixer.rope_dim,
            "kv_lora_rank": mixer.latent_dim,
            "q_lora_rank": mixer.q_latent_dim,
            **({self.interleave: mixer.rope_interleaved} if self.interleave else {}),
            "attention_bias": False,
        }

    def scaling(self, mixer: Any, written: dict[str, Any] | None) -> dict[str, Any] | None:
        """rope_scaling with DeepSeek's weights of YaRN's temperature, from which vLLM computes `attention_factor`."""
        if written is None or mixer.rope.scaling != "yarn":
            return written
        rope, weight = mixer.rope, mixer.mscale_all_dim
        if rope.attention_factor != 1.0 and rope.factor > 1:  # at 1 the two are equal
            slope = 0.1 * math.log(rope.factor)
            weight = (rope.attention_factor * (slope * mixer.mscale_all_dim + 1) - 1) / slope
        return {**written, "mscale": weight, "mscale_all_dim": mixer.mscale_all_dim}

    def full(self, mixer: Any, norm_eps: float) -> Any:
        """The mixer with what its empty fields mean."""
        eps = norm_eps if mixer.latent_norm_eps is None else mixer.latent_norm_eps
        return mixer.model_copy(update={"value_dim": mixer.values, "latent_norm_eps": eps})


@dataclass(frozen=True)
class RoutedExperts:
    """How the config.json of DeepSeek-V2 (`softmax`) or V3 (`sigmoid`, with a bias of the choice) describes its experts."""

    router: Literal["softmax", "sigmoid"]

    @property
    def usual(self) -> dict[str, Any]:
        """The feed-forward of a model of the family that says nothing else."""
        return {"kind": "moe", "num_shared_experts": 1, **self._chosen({}), "balance": [*self._moved, _SEQUENCE]}

    @property
    def _moved(self) -> list[dict[str, Any]]:
        return [_BIAS] if self.router == "sigmoid" else []

    def _chosen(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"router": {"kind": self.router, "normalize": self.router == "sigmoid", **options}}

    def read(self, values: dict[str, Any], dense: dict[str, Any], where: str) -> list[dict[str, Any]]:
        """Each layer's feed-forward, `dense` in the first ones. Raises SpecError naming the field that is wrong."""
        top_k = whole(values, "num_experts_per_tok", where)
        options = {"top_k": top_k, "scale": values.get("routed_scaling_factor", 1.0)}
        if self.router == "sigmoid":
            options["normalize"] = bool(values.get("norm_topk_prob", True))
        if values.get("n_group") and (self.router == "sigmoid" or values.get("topk_method") == "group_limited_greedy"):
            options |= {"num_groups": whole(values, "n_group", where), "top_groups": whole(values, "topk_group", where)}
        weight, balance = values.get("aux_loss_alpha"), self._moved
        if weight and values.get("seq_aux", True):
            balance = [*balance, {"kind": _SEQUENCE, "weight": weight}]
        elif weight and isinstance(weight, float):  # a balanced batch has alpha, and with ours weight x top_k
            balance = [*balance, {"kind": "aux_loss", "weight": weight / top_k}]
        moe = {
            "kind": "moe",
            "intermediate_size": whole(values, "moe_intermediate_size", where),
            "num_experts": whole(values, "n_routed_experts", where),
            "num_shared_experts": whole(values, "n_shared_experts", where),
            **self._chosen(options),
            "balance": balance,
            **read_training(values, where),
        }
        first = values.get("first_k_dense_replace", 0)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise SpecError(f"{where}: first_k_dense_replace is {first!r}", fix="set it to the number of dense layers")
        return [dense if index < first else moe for index in range(values["num_hidden_layers"])]

    def write(self, config: Any) -> dict[str, Any]:
        """The fields of config.json that a `ModelConfig` has for its layers with experts. Raises SpecError for what the family cannot say."""
        layers = [layer.feed_forward for layer in config.layers]
        first = next((index for index, one in enumerate(layers) if one.kind == "moe"), len(layers))
        values: dict[str, Any] = {"first_k_dense_replace": first, "moe_layer_freq": 1}
        if self.router == "sigmoid":
            values["num_nextn_predict_layers"] = 0  # its class would look for one
        if first == len(layers):
            return values
        moe = layers[first]
        _must_have(self.router, moe, config.family)
        router = moe.router
        grouped = "group_limited_greedy" if router.num_groups > 1 else "greedy"
        balance = moe.model_dump(mode="json")["balance"]
        rest = balance[len(self._moved) :]
        plain = balance == [*self._moved, *rest] and [one["kind"] for one in rest] in ([], [_SEQUENCE])
        values |= {
            "moe_intermediate_size": moe.intermediate_size,
            "n_routed_experts": moe.num_experts,
            "n_shared_experts": moe.num_shared_experts,
            "num_experts_per_tok": router.top_k,
            "routed_scaling_factor": router.scale,
            "norm_topk_prob": router.normalize,
            "n_group": router.num_groups,
            "topk_group": router.top_groups,
            "topk_method": "noaux_tc" if self.router == "sigmoid" else grouped,
            "scoring_func": self.router,
            "output_router_logits": False,
        }
        if plain and rest:
            values |= {"aux_loss_alpha": rest[0]["weight"], "seq_aux": True}
        return values | write_training(moe, with_balance=not plain)


def _must_have(router: str, moe: Any, family: str) -> None:
    """Raises SpecError unless a router has the scores and the bias that all of the family have."""
    own = "save it with hone.save, which has a format of its own for such stacks"
    if moe.router.kind != router:
        raise SpecError(
            f"layers route by '{moe.router.kind}', and family {family} by {router}",
            fix=f"{own}, or take router {router}",
        )
    if moe.bias != (router == "sigmoid"):
        said = "has a router's bias (balance 'bias')" if moe.bias else "is without a router's bias (balance 'bias')"
        raise SpecError(
            f"no class of family {family} {said}", fix=f"{own}, or {'leave balance bias out' if moe.bias else 'add it'}"
        )
