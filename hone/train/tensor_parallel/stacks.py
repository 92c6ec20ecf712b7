"""The weights of all experts of a layer, one tensor each, and the part of them that a rank has where ranks divide the experts."""

from __future__ import annotations

from collections.abc import Mapping

from hone.model.config import ModelConfig
from hone.model.linear_spec import LinearSpec
from hone.parallel.cut import Cut


def stacks(config: ModelConfig) -> dict[str, LinearSpec]:
    """The linears that have experts, by path."""
    return {
        f"layers.{index}.{path}": linear
        for index in range(config.num_layers)
        for path, linear in config.linears(index).items()
        if linear.experts is not None
    }


def expert_cuts(
    config: ModelConfig, rank: int, num_ranks: int, inner: Mapping[str, Cut] | None = None
) -> dict[str, Cut]:
    """The parts of the experts' parameters that `rank` of `num_ranks` holds; all others are whole.

    `inner`: of those the parts that this rank has, where ranks divide each expert, too; a bias that it does not name is another rank's.
    """
    found = {}
    for name, linear in stacks(config).items() if num_ranks > 1 else ():
        count = linear.experts // num_ranks  # type: ignore[operator]
        own = ((rank * count, (rank + 1) * count),)
        shape = (linear.experts, linear.out_features, linear.in_features)
        shapes = {f"{name}.weight": shape} | ({f"{name}.bias": shape[:2]} if linear.bias else {})
        for path, one in shapes.items():
            if inner is None or path in inner:
                found[path] = Cut(one, 0, own, None if inner is None else inner[path])  # type: ignore[arg-type]
    return found
