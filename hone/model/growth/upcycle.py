"""Upcycling: dense feed-forwards become experts, each a copy of them or of a part of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, model_validator

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.base.table import Choice, Technique
from hone.model.balance import BALANCES
from hone.model.balance.aux_loss import AuxLoss
from hone.model.config import LayerSpec, ModelConfig
from hone.model.families.config_json import to_hf
from hone.model.feed_forwards.moe import MoE
from hone.model.growth.base import Growth
from hone.model.routers import ROUTERS
from hone.model.routers.softmax import Softmax

if TYPE_CHECKING:
    from hone.model.growth.checkpoint import Recipe

tensors = lazy("hone.model.growth.expert_tensors")

_WITH_EXPERTS = {"llama": "mixtral", "mistral": "mixtral", "qwen2": "qwen2_moe", "qwen3": "qwen3_moe"}
"""The family that has a dense one's attention, and experts."""


class Upcycle(Growth):
    """Makes every feed-forward a mixture of copies of itself, with a router drawn at random. Komatsuzaki et al. 2022, arXiv:2212.05055.

    With `granularity` G it is cut into G parts of its channels, and experts are copies of these. The G experts that make one copy
    begin with equal rows of the router, so that a token visits whole copies (virtual groups, He et al. 2024, arXiv:2410.07524); down
    projections are multiplied by what the router's weights divide by. A part that a shared expert has too is halved between them.
    """

    paper: ClassVar[str] = "arXiv:2212.05055"

    num_experts: int = Field(8, gt=1, description="Experts among which the router of a layer chooses.")
    granularity: int = Field(
        1,
        gt=0,
        description="Parts into which a feed-forward is cut: experts have 1 / granularity of its width, and each part num_experts / granularity copies.",
    )
    router: Annotated[Technique, Choice(ROUTERS, default="softmax")] = Field(
        Softmax(kind="softmax"), description="How tokens find experts: softmax or sigmoid."
    )
    num_shared_experts: int = Field(
        0, ge=0, description="Copies of the first parts, of the same width, that every token visits."
    )
    shared_gate: bool = Field(
        False,
        description="The shared experts' result is multiplied by a sigmoid of the token, 1/2 at first (Qwen2-MoE).",
    )
    every_nth: int = Field(1, gt=0, description="Every n-th layer gets experts, the last of each n; others stay dense.")
    balance: tuple[Annotated[Technique, Choice(BALANCES)], ...] = Field(
        (AuxLoss(kind="aux_loss"),), description="What keeps the experts equally busy in training."
    )
    capacity_factor: float | None = Field(
        None, gt=0, description="As that of the feed-forward moe: bounds the visits of an expert in training passes."
    )
    noise_std: float = Field(
        0.0, ge=0, description="Noise on the experts, relative to the weights' size; above 0 the model is not exact."
    )
    reinitialize: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Fraction of an expert's channels, others in each expert, that are drawn anew with the mean and the deviation of "
        "what they were (Drop-Upcycling, arXiv:2502.19261: 0.5); above 0 the model is not exact.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Upcycle:
        if self.router.kind not in ("softmax", "sigmoid"):
            raise ValueError(
                f"router '{self.router.kind}' does not let copies of one feed-forward be weighted to it: take router softmax or sigmoid"
            )
        if self.num_experts % self.granularity:
            raise ValueError(
                f"num_experts {self.num_experts} is no multiple of granularity {self.granularity}: each part has as many copies"
            )
        self._moe(1)
        return self

    @property
    def exact(self) -> bool:
        return self.weighs_copies and not self.noise_std and not self.reinitialize

    @property
    def weighs_copies(self) -> bool:
        """Whether the weights of the experts that a token visits add up to a number known beforehand, the same for every part."""
        router = self.router
        whole = router.top_k % self.granularity == 0
        return router.normalize and whole and self.num_experts // router.num_groups % self.granularity == 0

    @property
    def weight_sum(self) -> float:
        """What the weights of the experts that a token visits add up to: without `normalize`, where all scores are equal."""
        router = self.router
        if router.normalize:
            return router.scale
        return router.scale * router.top_k * (1 / self.num_experts if router.kind == "softmax" else 0.5)

    def _moe(self, width: int) -> MoE:
        """The feed-forward of experts of `width` channels. Raises ValueError when its fields do not fit together."""
        names = ("num_experts", "router", "num_shared_experts", "shared_gate", "balance", "capacity_factor")
        return MoE(kind="moe", intermediate_size=width, **{name: getattr(self, name) for name in names})

    def has_experts(self, index: int) -> bool:
        """Whether layer `index` gets experts."""
        return (index + 1) % self.every_nth == 0

    def grow(self, config: ModelConfig) -> ModelConfig:
        if config.num_layers < self.every_nth:
            raise SpecError(
                f"upcycle: every_nth is {self.every_nth}, and the model has {config.num_layers} layers: none would get experts",
                fix=f"give every_nth from 1 to {config.num_layers}",
            )
        layers = [
            self._layer(index, layer) if self.has_experts(index) else layer for index, layer in enumerate(config.layers)
        ]
        values = {**config.model_dump(mode="json"), "layers": [one.model_dump(mode="json") for one in layers]}
        return _in_a_family(values, config.family)

    def _layer(self, index: int, layer: LayerSpec) -> LayerSpec:
        """The layer with experts. Raises SpecError where its feed-forward cannot become some."""
        dense = layer.feed_forward
        if dense.kind != "swiglu" or dense.bias:
            what = (
                "already has experts"
                if dense.kind == "moe"
                else "computes something else than experts, SwiGLUs without biases"
            )
            raise SpecError(
                f"upcycle: '{dense.kind}' of layer {index} {what}",
                fix="start from a dense model with SwiGLU, or use every_nth to leave such layers dense",
            )
        width, left = divmod(dense.intermediate_size, self.granularity)
        if left:
            raise SpecError(
                f"upcycle: layer {index} has {dense.intermediate_size} feed-forward channels, which granularity {self.granularity} does not divide",
                fix=f"give a divisor of {dense.intermediate_size}",
            )
        return layer.model_copy(update={"feed_forward": self._moe(width)})

    def recipes(self, config: ModelConfig, seed: int) -> Mapping[str, Recipe]:
        return tensors.upcycled(config, self.grow(config), self, seed)


def _in_a_family(values: dict[str, Any], family: str) -> ModelConfig:
    """The config of `values` in the family whose transformers class can express it, else in its own, which hone alone reads."""
    own = ModelConfig.read(values)
    if family in _WITH_EXPERTS:
        found = own.model_copy(update={"family": _WITH_EXPERTS[family]})
        try:
            to_hf(found)
        except SpecError:
            return own
        return found
    return own
