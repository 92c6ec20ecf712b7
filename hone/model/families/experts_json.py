"""Translation between the fields of config.json that describe experts and those of `MoE`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hone.base.errors import SpecError

TRAINING = "hone_experts"
"""The field with what only a training in hone reads: losses, capacities and jitter that the family has no field for."""
_TRAINING_FIELDS = ("capacity_factor", "token_drop_policy", "jitter", "balance")
_LOSS = "router_aux_loss_coef"


@dataclass(frozen=True)
class Experts:
    """How a family's config.json says what its experts are."""

    count: str
    """The field with their number; `num_experts` and `num_local_experts` are read whichever is there."""
    width: str = "intermediate_size"
    """The field with the width of one."""
    normalize: bool | None = None
    """Whether the weights of the chosen sum to 1; None: as norm_topk_prob says."""
    dense_layers: bool = False
    """Whether decoder_sparse_step and mlp_only_layers say which layers are dense."""
    shared: str = ""
    """The field with the width of all shared experts together, whose result a gate multiplies; empty: there are none."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `MoE` that all its checkpoints share."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Fields of config.json that are fields of `MoE` by the same name, with their defaults."""

    @property
    def usual(self) -> dict[str, Any]:
        """The feed-forward of a model of the family that says nothing else."""
        shared = {"num_shared_experts": 1, "shared_gate": True} if self.shared else {}
        return {"kind": "moe", **shared, **self.fixed, **self.numbers}

    def read(self, values: dict[str, Any], dense: dict[str, Any], where: str) -> list[dict[str, Any]]:
        """Each layer's feed-forward, with `dense` where it has no experts. Raises SpecError naming the field that is wrong."""
        return _read(values, self, dense, where)

    def write(self, config: Any) -> dict[str, Any]:
        """The fields of config.json that a `ModelConfig` has for its first layer with experts; {} for a model without any. Raises SpecError for a router's bias."""
        return _write(config, self)


def _read(values: dict[str, Any], family: Experts, dense: dict[str, Any], where: str) -> list[dict[str, Any]]:
    count = whole(values, "num_local_experts" if values.get("num_experts") is None else "num_experts", where)
    moe = {
        "kind": "moe",
        "intermediate_size": whole(values, family.width, where),
        "num_experts": count,
        "router": {
            "kind": "softmax",
            "top_k": whole(values, "num_experts_per_tok", where),
            "normalize": bool(values.get("norm_topk_prob", False)) if family.normalize is None else family.normalize,
        },
    }
    if family.shared:
        width = whole(values, family.shared, where)
        if width % moe["intermediate_size"]:
            raise SpecError(
                f"{where}: {family.shared} is {width}, no multiple of {family.width} {moe['intermediate_size']}",
                fix="hone runs shared experts of the width of the others",
            )
        moe |= {"num_shared_experts": width // moe["intermediate_size"], "shared_gate": True}
    moe |= {**family.fixed, **{name: values.get(name, usual) for name, usual in family.numbers.items()}}
    weight, jitter = values.get(_LOSS), values.get("router_jitter_noise")
    moe["balance"] = [{"kind": "aux_loss", "weight": weight}] if weight else []
    moe["jitter"] = jitter or 0.0
    own = read_training(values, where)
    return [{**moe, **own} if has else dense for has in _with_experts(values, family, where)]


def _write(config: Any, family: Experts) -> dict[str, Any]:
    layers = [layer.feed_forward for layer in config.layers]
    moe = next((one for one in layers if one.kind == "moe"), None)
    if moe is not None and moe.bias:
        raise SpecError(
            f"no class of family {config.family} has a router's bias (balance 'bias')",
            fix="save it with hone.save, which has a format of its own for such stacks, or balance by aux_loss",
        )
    if moe is None or moe.router.kind != "softmax":
        return {}
    losses = [one.weight for one in moe.balance if one.kind == "aux_loss"]
    values = {
        family.count: moe.num_experts,
        family.width: moe.intermediate_size,
        "num_experts_per_tok": moe.router.top_k,
        _LOSS: losses[0] if losses else 0.0,
        "output_router_logits": False,
    }
    if family.normalize is None:
        values["norm_topk_prob"] = moe.router.normalize
    values |= {name: getattr(moe, name) for name in family.numbers}
    if family.shared:
        values[family.shared] = moe.num_shared_experts * moe.intermediate_size or moe.intermediate_size
    if family.dense_layers:
        values["decoder_sparse_step"] = 1
        values["mlp_only_layers"] = [index for index, one in enumerate(layers) if one.kind != "moe"]
    return values | write_training(moe, with_balance=[one.kind for one in moe.balance] not in ([], ["aux_loss"]))


def read_training(values: dict[str, Any], where: str) -> dict[str, Any]:
    """What only a training in hone reads, as fields of `MoE`. Raises SpecError for anything else in it."""
    own = values.get(TRAINING) or {}
    if not isinstance(own, dict) or not own.keys() <= set(_TRAINING_FIELDS):
        raise SpecError(
            f"{where}: {TRAINING} is {own!r}", fix=f"give it fields of {', '.join(_TRAINING_FIELDS)} or remove it"
        )
    return own


def write_training(moe: Any, *, with_balance: bool) -> dict[str, Any]:
    """The field with what only a training in hone reads of a `MoE`, its balance where the family cannot say it; {} for nothing."""
    dumped = moe.model_dump(mode="json")
    own = {name: dumped[name] for name in _TRAINING_FIELDS if name != "balance" and dumped[name] != type(moe).model_fields[name].default}  # fmt: skip
    own |= {"balance": dumped["balance"]} if with_balance else {}
    return {TRAINING: own} if own else {}


def _with_experts(values: dict[str, Any], family: Experts, where: str) -> list[bool]:
    """Whether each layer has experts."""
    count = values["num_hidden_layers"]
    if not family.dense_layers:
        return [True] * count
    step, dense = values.get("decoder_sparse_step", 1), values.get("mlp_only_layers") or []
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise SpecError(f"{where}: decoder_sparse_step is {step!r}", fix="set it to a whole number above 0")
    if not isinstance(dense, list):
        raise SpecError(f"{where}: mlp_only_layers is {dense!r}", fix="give it a list of layers")
    return [index not in dense and (index + 1) % step == 0 for index in range(count)]


def whole(values: dict[str, Any], name: str, where: str) -> int:
    """values[name], a whole number above 0. Raises SpecError for anything else."""
    found = values.get(name)
    if isinstance(found, bool) or not isinstance(found, int) or not 0 < found <= 65_536:
        raise SpecError(f"{where}: {name} is {found!r}", fix=f"set {name} to a whole number above 0")
    return found
