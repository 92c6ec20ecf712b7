"""Expert merging: experts that do alike become one, an average of them, and with them their rows of the router."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.base.run import Run
from hone.compress.structured.fewer_experts import FewerExperts, experts_of
from hone.cost.compress.compression import Passes

if TYPE_CHECKING:
    from pathlib import Path

    from hone.compress.capture import Flow
    from hone.compress.step import Targets
    from hone.model.config import ModelConfig
    from hone.model.linear_spec import LinearSpec
    from hone.model.weights.model import ModelSource

merging = lazy("hone.compress.structured.merging")


class ExpertMerging(FewerExperts):
    """Merges experts of like outputs into their average, weighted by how often each is visited. Chen et al. 2024 (HC-SMoE), arXiv:2410.08589.

    M-SMoE (Li et al. 2023, arXiv:2310.01334) is `grouping: dominant` with `similarity: router` and `router: dominant`.
    """

    paper: ClassVar[str] = "arXiv:2410.08589"

    similarity: Literal["outputs", "router"] = Field(
        "outputs",
        description="Experts are alike by the distance of their mean outputs over all calibration tokens, or by the cosine of the scores "
        "that the router gives them.",
    )
    grouping: Literal["hierarchical", "dominant"] = Field(
        "hierarchical",
        description="The two nearest groups become one again and again (average linkage), or each expert joins the nearest of the most visited ones.",
    )
    align: bool = Field(
        True,
        description="Channels of an expert are first put in the order in which they fit those of its group's most visited one.",
    )
    router: Literal["average", "dominant", "fitted"] = Field(
        "average",
        description="A group's row of the router: the members' average, that of the most visited one, or that whose scores are, by least "
        "squares over the calibration tokens, those of all members together.",
    )

    def check_layer(self, config: ModelConfig, index: int, experts: dict[str, LinearSpec]) -> None:
        super().check_layer(config, index, experts)
        spec = config.layers[index].feed_forward
        if spec.kind == "moe" and (spec.biases or spec.swiglu_limit is not None):
            raise SpecError(
                f"{self.kind}: experts of layer {index} have biases or a clamped gate (biases, swiglu_limit), with which hone does not "
                "know how experts are merged",
                fix="use kind=experts, which removes experts",
            )
        if spec.kind != "moe" or spec.router.kind not in ("softmax", "sigmoid", "switch", "gshard"):
            what = spec.kind if spec.kind != "moe" else f"moe' with router '{spec.router.kind}"
            raise SpecError(
                f"{self.kind}: the feed-forward of layer {index} is '{what}', of which hone does not know how experts are merged",
                fix="use kind=experts, which removes experts",
            )

    def rewrite(
        self, checkpoint: ModelSource, flow: Flow | None, targets: Targets, state: Path, run: Run
    ) -> tuple[ModelSource, dict[str, Any]]:
        config = checkpoint.config
        known = merging.read(state, run.mesh)
        if known is None:
            assert flow is not None, "expert_merging measures activations"
            counts = [len(one) for one in self.first_experts(config)]
            known = merging.measure(checkpoint, flow, run, self, counts)
            if run.mesh.leads:
                merging.write(known, state)
            groups = [len(group) for layer in known for group in layer.groups]
            run.say(f"expert_merging: {sum(groups)} experts in {len(groups)} groups, at most {max(groups)} in one")
        made = merging.merged(checkpoint, self.reshape(config), known)
        return made, {"groups": [[list(group) for group in layer.groups] for layer in known]}

    def passes(self, config: ModelConfig) -> Passes | None:
        every = matmuls = 0
        for index in range(config.num_layers):
            first = [one for one in experts_of(config, index).values() if not one.residual]
            every += sum((one.experts or 0) * one.out_features * one.in_features for one in first)
            matmuls += sum(rows * columns for rows, columns in config.dims().layers[index].matmuls)
        read = sum(
            (one.experts or 0) + one.in_features
            for i in range(config.num_layers)
            for one in experts_of(config, i).values()
        )
        return Passes(1 + (every / matmuls if self.similarity == "outputs" else 0), variants=2, observed=read)
