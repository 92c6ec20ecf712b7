"""Width pruning: attention heads, feed-forward channels and hidden channels are removed, equally many in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.base.run import Run
from hone.compress.structured.base import Size, StructuredPruner, aligned, largest, size_of
from hone.cost.compress.compression import Passes
from hone.model.families import FAMILIES

if TYPE_CHECKING:
    from hone.compress.capture import Flow
    from hone.compress.structured.cut import Cut
    from hone.model.config import LayerSpec, ModelConfig
    from hone.model.weights.model import ModelSource

cuts = lazy("hone.compress.structured.cut")
importances = lazy("hone.compress.structured.importance")

_SIZES = ("num_heads", "intermediate_size", "hidden_size")


class Width(StructuredPruner):
    """Removes heads, feed-forward and hidden channels of small activations. Muralidharan et al. 2024 (Minitron), arXiv:2407.14679."""

    paper: ClassVar[str] = "arXiv:2407.14679"

    num_heads: Size | None = Field(
        None,
        description="Query heads that stay in every layer; they leave in groups, with the key/value head that serves them. "
        "Below 1, here and for the other sizes, the fraction.",
    )
    intermediate_size: Size | None = Field(
        None,
        description="Feed-forward channels that stay in every layer; a fraction is rounded down to a multiple of 32.",
    )
    hidden_size: Size | None = Field(
        None,
        description="Channels of the residual stream that stay, in embedding and head too; a fraction is rounded down "
        "to a multiple of 32.",
    )

    def reshape(self, config: ModelConfig) -> ModelConfig:
        given = [name for name in _SIZES if getattr(self, name) is not None]
        if not given:
            raise SpecError("width names nothing to remove", fix=f"set one of {', '.join(_SIZES)}")
        for index, layer in enumerate(config.layers):
            _check(index, layer, config.layers[0], given)
        if self.hidden_size is not None and FAMILIES[config.family].embedding_sqrt:
            raise SpecError(
                f"width: family {config.family} multiplies embeddings by the square root of hidden_size, which would change",
                fix="remove heads, feed-forward channels or layers instead",
            )
        return cuts.Cut(tuple(range(config.num_layers)), *self._stay(config)).config(config)

    def choose(self, checkpoint: ModelSource, flow: Flow | None, run: Run) -> tuple[Cut, dict[str, Any]]:
        assert flow is not None, "width measures activations"
        config = checkpoint.config
        scores = importances.width_scores(checkpoint, flow, run)
        kv_heads, intermediate, hidden = self._stay(config)
        made = cuts.Cut(
            tuple(range(config.num_layers)),
            kv_heads and tuple(largest(one.tolist(), len(kv_heads[0])) for one in scores.kv_heads),
            intermediate and tuple(largest(one.tolist(), len(intermediate[0])) for one in scores.intermediate),
            hidden and largest(scores.hidden.tolist(), len(hidden)),
        )
        return made, {}

    def passes(self, config: ModelConfig) -> Passes | None:
        layers = config.dims().layers
        return Passes(
            1.0, observed=sum(one.widths.mixed + one.intermediate_size + 2 * config.hidden_size for one in layers)
        )

    def _stay(self, config: ModelConfig) -> tuple[Any, Any, Any]:
        """The first groups of heads, feed-forward channels (of every layer) and hidden channels, as many as will stay."""
        layer, count = config.layers[0], config.num_layers
        kv_heads = intermediate = hidden = None
        if self.num_heads is not None:
            served = layer.mixer.num_heads // layer.mixer.num_kv_heads
            heads = size_of(self.num_heads, layer.mixer.num_heads, "width: num_heads", served)
            if heads % served:
                raise SpecError(
                    f"width: num_heads {heads} is no multiple of the {served} query heads that a key/value head serves",
                    fix=f"use {', '.join(map(str, range(served, layer.mixer.num_heads, served)))}",
                )
            kv_heads = (tuple(range(heads // served)),) * count
        if self.intermediate_size is not None:
            whole = layer.feed_forward.intermediate_size
            size = size_of(self.intermediate_size, whole, "width: intermediate_size", aligned(whole))
            intermediate = (tuple(range(size)),) * count
        if self.hidden_size is not None:
            whole = config.hidden_size
            hidden = tuple(range(size_of(self.hidden_size, whole, "width: hidden_size", aligned(whole))))
        return kv_heads, intermediate, hidden


def _check(index: int, layer: LayerSpec, first: LayerSpec, given: list[str]) -> None:
    """Raises SpecError when the layer's parts are none that width can cut, or of another size than the first layer's."""
    mixer, feed_forward = layer.mixer, layer.feed_forward
    if mixer.kind not in ("attention", "sliding_window"):
        raise SpecError(
            f"width: layer {index} mixes with '{mixer.kind}', of which heads and channels cannot be removed",
            fix="use kind=depth",
        )
    if "intermediate_size" in given and feed_forward.kind not in ("swiglu", "geglu"):
        raise SpecError(
            f"width: layer {index} has feed-forward '{feed_forward.kind}', of which channels cannot be removed",
            fix="drop intermediate_size, or use kind=depth; kind=experts removes experts",
        )
    for name, mine, theirs in (
        ("num_heads", (mixer.num_heads, mixer.num_kv_heads), (first.mixer.num_heads, first.mixer.num_kv_heads)),
        ("intermediate_size", *(getattr(one, "intermediate_size", None) for one in (feed_forward, first.feed_forward))),
    ):
        if name in given and mine != theirs:
            raise SpecError(f"width: layer {index} has another {name} than layer 0", fix=f"drop {name}")
