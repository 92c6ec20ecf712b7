"""Base of the conversions: how a step says which layers it changes, and how its model is made of the given one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.base.run import Run
from hone.compress.step import ModelStep, Step, Targets
from hone.model.config import LayerSpec, ModelConfig

if TYPE_CHECKING:
    from pathlib import Path

    from hone.compress.capture import Flow
    from hone.model.weights.model import ModelSource

tensors = lazy("hone.compress.conversions.tensors")


class Conversion(ModelStep):
    """A step that changes how layers compute; a subclass writes `convert` and `recipe`, or `rewrite` where it measures something first.

    The result is another model, which a short training heals: `hone train` with `from: {model: ...}`, best with the given model as
    its teacher (`objective: distill`).
    """

    reshapes: ClassVar[bool] = True
    converts: ClassVar[bool] = True
    targeted: ClassVar[bool] = False
    wanted: ClassVar[str] = "softmax attention (mixer attention)"
    """What a layer has that it converts."""

    def too_late(self, other: Step) -> str:
        return f"{self.kind} changes the model that {other.kind} reads: put it before {other.kind}"

    def convert(self, index: int, layer: LayerSpec, config: ModelConfig) -> LayerSpec | None:
        """What becomes of `layer`, the one at `index` of `config`; None where it stays. Raises SpecError where it cannot be converted."""
        raise NotImplementedError

    def converted(self, config: ModelConfig) -> dict[int, LayerSpec]:
        """The layers that change. Raises SpecError where none does."""
        found = {index: self.convert(index, layer, config) for index, layer in enumerate(config.layers)}
        changed = {index: layer for index, layer in found.items() if layer is not None}
        if not changed:
            kinds = ", ".join(sorted({layer.mixer.kind for layer in config.layers}))
            raise SpecError(
                f"{self.kind}: none of {config.num_layers} layers is one that it converts; they mix with {kinds}",
                fix=f"give a model with {self.wanted}",
            )
        return changed

    def reshape(self, config: ModelConfig) -> ModelConfig:
        return with_layers(config, self.converted(config))

    def recipe(self, index: int, made: Any, source: ModelConfig, config: ModelConfig) -> Any:
        """How the tensor `made` of layer `index` of `config` is made of those of `source`; None: it is a copy of the one with its path."""
        raise NotImplementedError

    def rewrite(
        self, checkpoint: ModelSource, flow: Flow | None, targets: Targets, state: Path, run: Run
    ) -> tuple[ModelSource, dict[str, Any]]:
        return tensors.converted(checkpoint, self.reshape(checkpoint.config), self.recipe), {}


def with_layers(config: ModelConfig, layers: dict[int, LayerSpec], **more: Any) -> ModelConfig:
    """`config` with other layers at some places, validated again: a layer that reuses the keys of one that is converted is refused."""
    values = [layers.get(index, layer).model_dump(mode="json") for index, layer in enumerate(config.layers)]
    return ModelConfig.read({**config.model_dump(mode="json"), "layers": values, **more})


def must_be_plain(kind: str, index: int, mixer: Any, *options: str) -> None:
    """Raises SpecError where the attention of layer `index` has one of `options`, which the converted layer has not."""
    for name in options:
        if getattr(mixer, name, None):
            raise SpecError(
                f"{kind}: the attention of layer {index} has {name}={getattr(mixer, name)!r}, which a converted layer cannot compute",
                fix=f"give a model without {name}, or leave the layer out with layers",
            )
