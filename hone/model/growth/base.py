"""The base of growths: a technique says the larger model's config, and from which tensors of the smaller one its own are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.base.table import Technique

if TYPE_CHECKING:
    from hone.model.config import ModelConfig
    from hone.model.growth.checkpoint import Recipe
    from hone.model.weights.model import ModelSource

files = lazy("hone.model.growth.checkpoint")


class Growth(Technique):
    """Base of growths; a subclass writes `exact`, `grow` and `recipes`. Config and checks never import torch; tensors are made one
    at a time, as a checkpoint reads them."""

    @property
    def exact(self) -> bool:
        """Whether the larger model computes the smaller one's logits, but for rounding."""
        raise NotImplementedError

    def grow(self, config: ModelConfig) -> ModelConfig:
        """The config of the larger model. Raises SpecError when a model of `config` cannot be grown so."""
        raise NotImplementedError

    def recipes(self, config: ModelConfig, seed: int) -> Mapping[str, Recipe]:
        """How each tensor of the larger model is made of those of a model of `config`; `seed` is that of random numbers."""
        raise NotImplementedError


def grown_config(config: ModelConfig, growths: Sequence[Growth]) -> ModelConfig:
    """The config after all `growths`, in turn. Raises SpecError as `Growth.grow` does."""
    if config.adapters and growths:
        raise SpecError(
            "a model with adapters cannot be grown: a larger one has no linears of their shape",
            fix="merge the adapters into the weights first",
        )
    for growth in growths:
        config = growth.grow(config)
    return config


def grown_checkpoint(source: ModelSource, growths: Sequence[Growth], seed: int = 0) -> ModelSource:
    """The checkpoint of the model that `growths` make of `source`, in turn. Nothing is in memory: a tensor is made, in float32,
    when it is read, from the one or two tensors of `source` that it needs.

    Raises ArtifactError when `source` has not the tensors of its config, SpecError as `grown_config` does.
    """
    grown_config(source.config, growths)
    if source.quantization is not None:
        raise SpecError(
            f"{source.folder} has quantized weights, of which no larger model can be made",
            fix="grow the model it was compressed from",
        )
    source.empty()  # checks that its files have its tensors
    for number, growth in enumerate(growths):
        config = source.config
        source = files.grown(source, growth.grow(config), growth.recipes(config, seed + number))
    return source


def must_grow(what: str, now: int, wanted: int) -> None:
    """Raises SpecError unless `wanted` is more than there is `now`."""
    if wanted <= now:
        raise SpecError(f"{what} {wanted} is no growth: the smaller model has {now}", fix=f"give more than {now}")


def silencing(config: ModelConfig, index: int) -> dict[str, float]:
    """What makes layer `index` add zero, by path, and the number that all its entries are: the norms of its blocks' outputs, less
    their offset, or where there are none the linears that write to the residual stream (a norm of zeros has gradients of 1 / sqrt(eps)).

    Raises SpecError for a block whose linears do not say which of them write there.
    """
    layer = config.layers[index]
    found: dict[str, float] = {}
    for block in ("mixer", "feed_forward"):
        if layer.norms != "pre":
            found[f"{block}_post_norm.weight"] = -config.norm_offset
            continue
        writers = [path for path, one in config.linears(index).items() if one.residual and path.startswith(f"{block}.")]
        if not writers:
            raise SpecError(
                f"layers.{index}.{block} declares no linear that writes to the residual stream, so that it cannot add zero",
                fix="set residual=True on its LinearSpec, or use kind: stack",
            )
        found |= dict.fromkeys(writers, 0.0)
    return found
