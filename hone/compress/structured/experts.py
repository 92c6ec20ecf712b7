"""Expert pruning: whole experts are removed, with their rows of the router, equally many in every layer that has experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.base.run import Run
from hone.compress.structured.base import Size, StructuredPruner, largest, size_of
from hone.cost.compress import Passes
from hone.model.linear_spec import LinearSpec, is_router

if TYPE_CHECKING:
    from hone.compress.capture import Flow
    from hone.compress.structured.cut import Cut
    from hone.model.config import ModelConfig
    from hone.model.weights.model import ModelSource

cuts = lazy("hone.compress.structured.cut")
importances = lazy("hone.compress.structured.importance")

_OTHERWISE = "use kind=depth, or quantize the experts"


class Experts(StructuredPruner):
    """Removes the experts whose outputs, weighted by the router, are smallest. Lasby et al. 2025 (REAP), arXiv:2510.13999."""

    paper: ClassVar[str] = "arXiv:2510.13999"

    num_experts: Size = Field(
        0.75, description="Experts that stay in every layer; below 1 the fraction of them, rounded down."
    )
    importance: Literal["reap", "frequency"] = Field(
        "reap",
        description="Of an expert: the mean over its tokens of the router's weight times the norm of its output, or the number of tokens.",
    )

    def reshape(self, config: ModelConfig) -> ModelConfig:
        made = cuts.Cut(tuple(range(config.num_layers)), experts=self._stay(config)).config(config)
        for index in range(config.num_layers):
            before, after = (_of_experts(one, index) for one in (config, made))
            if [_visited(one) for one in before.values()] != [_visited(one) for one in after.values()]:
                raise SpecError(
                    f"experts: '{config.layers[index].feed_forward.kind}' of layer {index} would send tokens to another number of experts",
                    fix=_OTHERWISE,
                )
        return made

    def choose(self, checkpoint: ModelSource, flow: Flow | None, run: Run) -> tuple[Cut, dict[str, Any]]:
        assert flow is not None, "experts measures activations"
        config = checkpoint.config
        scores = importances.expert_scores(checkpoint, flow, run, weighted=self.importance == "reap")
        counts = [len(one) for one in self._stay(config)]
        stay = tuple(largest(one, count) for one, count in zip(scores, counts, strict=True))
        total, unused = sum(map(len, scores)), sum(score == 0 for one in scores for score in one)
        run.say(f"experts: {total - sum(counts)} of {total} leave, by {self.importance}; {unused} saw no token")
        return cuts.Cut(tuple(range(config.num_layers)), experts=stay), {"experts": [list(one) for one in stay]}

    def passes(self, config: ModelConfig) -> Passes | None:
        each = (one for index in range(config.num_layers) for one in _of_experts(config, index).values())
        written = sum(_visited(one) * one.out_features for one in each if one.residual)
        return Passes(1.0, observed=2 * written)  # outputs, their gradients

    def _stay(self, config: ModelConfig) -> tuple[tuple[int, ...], ...]:
        """The first experts of every layer, as many as will stay; () of a layer without experts."""
        stay = []
        for index in range(config.num_layers):
            experts = _of_experts(config, index)
            if not experts:
                stay.append(())
                continue
            _check(config, index, experts)
            (count,) = {one.experts for one in experts.values()}
            size = size_of(self.num_experts, count, f"experts: num_experts of layer {index}")
            visited = max(map(_visited, experts.values()))
            if size < visited:
                raise SpecError(
                    f"experts: num_experts is {size}, and a token of layer {index} visits {visited}",
                    fix=f"keep at least {visited}",
                )
            stay.append(tuple(range(size)))
        if not any(stay):
            raise SpecError("experts: no layer of the model has experts", fix="use kind=width or kind=depth")
        return tuple(stay)


def _of_experts(config: ModelConfig, index: int) -> dict[str, LinearSpec]:
    """The linears of layer `index` that hold a matrix for each expert."""
    return {path: one for path, one in config.linears(index).items() if one.experts is not None}


def _visited(linear: LinearSpec) -> int:
    """Experts that a token visits."""
    return round((linear.experts or 0) * linear.share)


def _check(config: ModelConfig, index: int, experts: dict[str, LinearSpec]) -> None:
    """Raises SpecError where what layer `index` declares does not say what leaves with an expert."""
    layer, linears = config.layers[index], config.linears(index)
    what = f"experts: the feed-forward '{layer.feed_forward.kind}' of layer {index}"
    counts = {one.experts for one in experts.values()}
    if counts != {getattr(layer.feed_forward, "num_experts", None)}:
        raise SpecError(
            f"{what} has {', '.join(map(str, sorted(counts)))} experts, which no field num_experts says", fix=_OTHERWISE
        )
    groups = getattr(getattr(layer.feed_forward, "router", None), "num_groups", 1)
    if groups > 1:
        raise SpecError(
            f"{what} chooses among {groups} groups of neighbours, which would be others without some", fix=_OTHERWISE
        )
    if not any(one.residual for one in experts.values()):
        raise SpecError(f"{what} has no linear of experts that writes to the residual stream", fix=_OTHERWISE)
    if not any(is_router(linears, path) for path in linears):
        raise SpecError(
            f"{what} declares no router: no linear has a row for each expert and reads what they read", fix=_OTHERWISE
        )
