"""Depth pruning: whole decoder layers are removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.base.run import Run
from hone.compress.structured.base import Size, StructuredPruner, largest, size_of
from hone.cost.compress.compression import Passes

if TYPE_CHECKING:
    from hone.compress.capture import Flow
    from hone.compress.structured.cut import Cut
    from hone.model.config import ModelConfig
    from hone.model.weights.model import ModelSource

cuts = lazy("hone.compress.structured.cut")
importances = lazy("hone.compress.structured.importance")


class Depth(StructuredPruner):
    """Removes the layers that change the hidden states, or the loss, least. Men et al. 2024 (ShortGPT), arXiv:2403.03853."""

    paper: ClassVar[str] = "arXiv:2403.03853"

    num_layers: Size = Field(0.75, description="Layers that stay; below 1 the fraction of them, rounded down.")
    importance: Literal["block_influence", "loss"] = Field(
        "block_influence",
        description="Of a layer: 1 - cos of its input and output, in one pass, or the loss that the model gains without it "
        "(Minitron), in as many passes as half the layers.",
    )
    layers: tuple[int, ...] = Field(
        (), description="The layers that stay, from 0, instead of the most important ones; needs no calibration inputs."
    )

    @model_validator(mode="after")
    def _ascending(self) -> Depth:
        if any(after <= before for before, after in zip((-1, *self.layers), self.layers)):
            raise ValueError(f"layers {list(self.layers)} must ascend, from 0")
        usual = {name: type(self).model_fields[name].default for name in ("num_layers", "importance")}
        if self.layers and any(getattr(self, name) != value for name, value in usual.items()):
            raise ValueError("layers names the layers that stay: drop num_layers and importance")
        return self

    def reshape(self, config: ModelConfig) -> ModelConfig:
        count = config.num_layers
        if self.layers:
            if self.layers[-1] >= count or len(self.layers) == count:
                raise SpecError(
                    f"depth: layers {list(self.layers)} of a model with {count}",
                    fix=f"name fewer than {count}, from 0 to {count - 1}",
                )
            return cuts.Cut(self.layers).config(config)
        size = size_of(self.num_layers, count, "depth: num_layers")
        unlike = next((index for index in range(count) if _shapes(config, index) != _shapes(config, 0)), None)
        if unlike is not None:
            raise SpecError(
                f"depth: layer {unlike} has other weights than layer 0, so that the result's size depends on the calibration",
                fix="name the layers that stay: layers=[0, 1, ...]",
            )
        return cuts.Cut(tuple(range(size))).config(config)

    def choose(self, checkpoint: ModelSource, flow: Flow | None, run: Run) -> tuple[Cut, dict[str, Any]]:
        if flow is None:
            return cuts.Cut(self.layers), {"layers": list(self.layers)}
        measure = importances.block_influence if self.importance == "block_influence" else importances.added_losses
        scores = measure(checkpoint, flow, run)
        stay = largest(scores, self.reshape(checkpoint.config).num_layers)
        leave = [index for index in range(len(scores)) if index not in stay]
        said = ", ".join(f"{index} ({scores[index]:.3g})" for index in leave)
        run.say(
            f"depth: layers {said} leave, by {self.importance}; the least of the others is {min(scores[index] for index in stay):.3g}"
        )
        return cuts.Cut(stay), {"layers": list(stay), "scores": scores}

    def passes(self, config: ModelConfig) -> Passes | None:
        count = config.num_layers
        if self.layers:
            return None
        if self.importance == "block_influence":
            return Passes(1.0, observed=4 * config.hidden_size * count)  # inputs, outputs and their products
        return Passes((count + 1) / 2, logits=count + 1, variants=count + 1)


def _shapes(config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    """The sizes of every linear and other parameter of layer `index`."""
    linears = config.linears(index).items()
    found = {path: (one.out_features, one.in_features, one.experts or 0, int(one.bias)) for path, one in linears}
    return found | {path: one.shape for path, one in config.parameters(index).items()}
