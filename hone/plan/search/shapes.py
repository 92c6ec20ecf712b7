"""The models of a goal: a folder, the sizes of a new one, or a range of sizes, each with its config and its dims."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.plan import facts_of
from hone.cost.cache import BYTES
from hone.cost.dims import ModelDims
from hone.cost.train.tensor import part_of
from hone.plan.search.goal import Goal, Sizes

if TYPE_CHECKING:
    from hone.model.config import ModelConfig
    from hone.model.facts import CheckpointFacts

ASPECT = 128
"""Hidden size over layers of the models of a range: Llama 2 and 3 have 102 to 130."""

VOCABULARY = 32768


@dataclass(frozen=True)
class Candidate:
    """One model of a goal."""

    name: str
    dims: ModelDims
    config: ModelConfig
    """Its config; with equal layers and no experts that of two of them, which says the same of each and is read a hundred times."""
    shape: dict[str, Any] | None
    """Fields of a train stage's `model`; None: it begins with the weights in `folder`."""
    folder: str | None = None
    facts: CheckpointFacts | None = None

    def checkpoint(self, dtype: str = "bfloat16") -> CheckpointFacts:
        """The facts of its folder; of a model given by its sizes those that a training would leave, with weights in `dtype`."""
        if self.facts is not None and self.facts.weights_bytes:
            return self.facts
        from hone.model.facts import CheckpointFacts
        from hone.model.shape import Shape

        config = self.facts.config if self.facts is not None else Shape.read(self.shape).config(self.dims.vocab_size)
        sizes = {"dtype": dtype, "weights_bytes": BYTES[dtype] * self.dims.num_params}
        return CheckpointFacts(where=self.name, config=config, tokenizer=None, **sizes)

    def part(self, ranks: int) -> ModelDims:
        """The dims of one of `ranks` tensor-parallel ranks."""
        if ranks == 1:
            return self.dims
        found = part_of(self.config.local(ranks).dims(), ranks)
        return found if self.config.num_layers == self.dims.num_layers else longer(found, self.dims.num_layers)


def longer(few: ModelDims, num_layers: int) -> ModelDims:
    """The dims of `num_layers` layers like the equal ones of `few`."""
    ends = few.vocab_size * few.hidden_size * (1 if few.tie_embeddings else 2) + few.hidden_size
    params = (few.num_params - ends) // few.num_layers * num_layers + ends
    return replace(few, num_params=params, active_params=params, layers=(few.layers[0],) * num_layers)


def layers_alone(dims: ModelDims, count: int) -> ModelDims:
    """`count` layers like the mean one of `dims`, without embedding, head and loss."""
    ends = dims.vocab_size * dims.hidden_size * (1 if dims.tie_embeddings else 2)
    share = count / max(dims.num_layers, 1)
    return replace(
        dims,
        num_params=round((dims.num_params - ends) * share),
        active_params=round((dims.active_params - ends) * share),
        vocab_size=0,
        layers=tuple(dims.layers[index % dims.num_layers] for index in range(count)),
    )


def candidates_of(goal: Goal) -> list[Candidate]:
    """The models to choose among. Raises SpecError or ArtifactError for a folder or sizes that are no model."""
    if isinstance(goal.model, Sizes):
        return [_new(shape_of(size, goal.model), goal, goal.model.vocab_size) for size in sizes_of(goal.model)]
    if isinstance(goal.model, dict):
        return [_new(goal.model, goal, goal.vocab_size or VOCABULARY)]
    if not Path(goal.model).is_dir():
        raise SpecError(
            f"model '{goal.model}' is no folder",
            fix="give a model's folder, or the sizes of a new model: {hidden_size: ..}",
        )
    from hone.model.facts import CheckpointFacts

    facts = facts_of(Artifact.read(goal.model))
    if not isinstance(facts, CheckpointFacts):
        raise SpecError(f"{goal.model} is a {facts.noun}, not a model", fix="give a folder with config.json")
    dims, config = facts.config.dims(), facts.config
    name = Path(goal.model).resolve().name
    shape = None if facts.weights_bytes else _shape_like(config)
    if all(one == config.layers[0] for one in config.layers) and dims.num_params == dims.active_params:
        config = config.model_copy(update={"layers": config.layers[:2]})
    return [Candidate(name, dims, config, shape, goal.model, facts)]


def sizes_of(span: Sizes) -> list[float]:
    """The sizes of a range, by equal factors."""
    if span.points == 1 or span.smallest == span.largest:
        return [span.smallest]
    factor = (span.largest / span.smallest) ** (1 / (span.points - 1))
    return [span.smallest * factor**index for index in range(span.points)]


def shape_of(num_params: float, span: Sizes) -> dict[str, Any]:
    """The sizes of a Llama of `num_params`, within half a layer: the width whose layers are nearest to h / 128, 8 key heads."""

    def layers(hidden: int) -> int:
        return max(round((num_params - 2 * span.vocab_size * hidden) / _layer_params(hidden)), 2)

    widths = [*range(128, 1024, 128), *range(1024, 32769, 1024)]  # wide ones have a multiple of 8 heads of 128
    hidden = min(widths, key=lambda one: abs(math.log(one / ASPECT / layers(one))))
    heads = hidden // 128 if hidden >= 1024 else hidden // 64
    kv_heads = next(count for count in (8, 4, 2, 1) if heads % count == 0)
    return {
        "hidden_size": hidden,
        "num_layers": layers(hidden),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": _inner(hidden),
        "max_seq_len": span.max_seq_len,
        "tie_embeddings": False,
    }


def _inner(hidden: int) -> int:
    """A feed-forward of 3.5 h, as Llama 3's."""
    return round(3.5 * hidden / 128) * 128


def _layer_params(hidden: int) -> float:
    """Queries and output h^2 each, keys and values of 8 heads of 128, gate, up and down."""
    return 2 * hidden**2 + 2 * hidden * min(1024, hidden) + 3 * hidden * _inner(hidden)


def _new(shape: dict[str, Any], goal: Goal, vocab_size: int) -> Candidate:
    """A model by its sizes. Raises SpecError for sizes that do not fit together."""
    from hone.model.shape import Shape

    fields = {"max_seq_len": max(goal.seq_len, goal.requests.prompt_tokens + goal.requests.output_tokens), **shape}
    shape = Shape.read(fields)
    if shape.mixers or shape.feed_forward or shape.num_dense_layers or shape.num_layers < 2:
        config = shape.config(vocab_size)
        dims = config.dims()
    else:
        config = shape.model_copy(update={"num_layers": 2}).config(vocab_size)
        dims = longer(config.dims(), shape.num_layers)
    return Candidate(said_size(dims.num_params), dims, config, fields)


def _shape_like(config: ModelConfig) -> dict[str, Any] | None:
    """The fields of a train stage's `model` for a folder that has a config alone. Raises SpecError where layers differ."""
    first = config.layers[0]
    mixer, feed_forward = first.mixer, first.feed_forward
    if any(one != first for one in config.layers) or mixer.kind != "attention" or feed_forward.kind != "swiglu":
        raise SpecError(
            "the folder has a config without weights, and its layers are not all attention with SwiGLU",
            fix="give the sizes of the model themselves, as in a train stage's `model`",
        )
    return {
        "family": config.family, "hidden_size": config.hidden_size, "num_layers": config.num_layers,
        "num_heads": mixer.num_heads, "num_kv_heads": mixer.num_kv_heads, "head_dim": mixer.head_dim,
        "intermediate_size": feed_forward.intermediate_size, "max_seq_len": config.max_seq_len,
        "tie_embeddings": config.tie_embeddings, "norm_eps": config.norm_eps,
    }  # fmt: skip


def said_size(num_params: float) -> str:
    """'8.03B', '124M': parameters in words."""
    for unit, power in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if num_params >= power:
            return f"{num_params / power:.3g}{unit}"
    return f"{num_params:.0f}"
