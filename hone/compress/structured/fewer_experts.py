"""The base of techniques that leave fewer experts: equally many in every layer that has some, of which a token visits as many as before."""

from __future__ import annotations

from pydantic import Field

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.compress.structured.base import Size, StructuredPruner, size_of
from hone.model.config import ModelConfig
from hone.model.linear_spec import LinearSpec, is_router

cuts = lazy("hone.compress.structured.cut")

_OTHERWISE = "use kind=depth, or quantize the experts"


class FewerExperts(StructuredPruner):
    """Base of the techniques that leave fewer experts; only `num_experts` of the config changes."""

    num_experts: Size = Field(
        0.75, description="Experts that stay in every layer; below 1 the fraction of them, rounded down."
    )

    def reshape(self, config: ModelConfig) -> ModelConfig:
        made = cuts.Cut(tuple(range(config.num_layers)), experts=self.first_experts(config)).config(config)
        for index in range(config.num_layers):
            before, after = (experts_of(one, index) for one in (config, made))
            if [visited(one) for one in before.values()] != [visited(one) for one in after.values()]:
                raise SpecError(
                    f"{self.kind}: '{config.layers[index].feed_forward.kind}' of layer {index} would send tokens to another number of experts",
                    fix=_OTHERWISE,
                )
        return made

    def first_experts(self, config: ModelConfig) -> tuple[tuple[int, ...], ...]:
        """The first experts of every layer, as many as will stay; () of a layer without experts."""
        stay = []
        for index in range(config.num_layers):
            experts = experts_of(config, index)
            if not experts:
                stay.append(())
                continue
            self.check_layer(config, index, experts)
            (count,) = {one.experts for one in experts.values()}
            size = size_of(self.num_experts, count, f"{self.kind}: num_experts of layer {index}")
            least = max(map(visited, experts.values()))
            if size < least:
                raise SpecError(
                    f"{self.kind}: num_experts is {size}, and a token of layer {index} visits {least}",
                    fix=f"keep at least {least}",
                )
            stay.append(tuple(range(size)))
        if not any(stay):
            raise SpecError(f"{self.kind}: no layer of the model has experts", fix="use kind=width or kind=depth")
        return tuple(stay)

    def check_layer(self, config: ModelConfig, index: int, experts: dict[str, LinearSpec]) -> None:
        """Raises SpecError where what layer `index` declares does not say what leaves with an expert."""
        layer, linears = config.layers[index], config.linears(index)
        what = f"{self.kind}: the feed-forward '{layer.feed_forward.kind}' of layer {index}"
        counts = {one.experts for one in experts.values()}
        if counts != {getattr(layer.feed_forward, "num_experts", None)}:
            raise SpecError(
                f"{what} has {', '.join(map(str, sorted(counts)))} experts, which no field num_experts says",
                fix=_OTHERWISE,
            )
        groups = getattr(getattr(layer.feed_forward, "router", None), "num_groups", 1)
        if groups > 1:
            raise SpecError(
                f"{what} chooses among {groups} groups of neighbours, which would be others without some",
                fix=_OTHERWISE,
            )
        if not any(one.residual for one in experts.values()):
            raise SpecError(f"{what} has no linear of experts that writes to the residual stream", fix=_OTHERWISE)
        if not any(is_router(linears, path) for path in linears):
            raise SpecError(
                f"{what} declares no router: no linear has a row for each expert and reads what they read",
                fix=_OTHERWISE,
            )


def experts_of(config: ModelConfig, index: int) -> dict[str, LinearSpec]:
    """The linears of layer `index` that hold a matrix for each expert."""
    return {path: one for path, one in config.linears(index).items() if one.experts is not None}


def visited(linear: LinearSpec) -> int:
    """Experts that a token visits."""
    return round((linear.experts or 0) * linear.share)
