"""Expert pruning: whole experts are removed, with their rows of the router, equally many in every layer that has experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from hone.base.lazy import lazy
from hone.base.run import Run
from hone.compress.structured.base import largest
from hone.compress.structured.fewer_experts import FewerExperts, experts_of, visited
from hone.cost.compress.compression import Passes

if TYPE_CHECKING:
    from hone.compress.capture import Flow
    from hone.compress.structured.cut import Cut
    from hone.model.config import ModelConfig
    from hone.model.weights.model import ModelSource

cuts = lazy("hone.compress.structured.cut")
importances = lazy("hone.compress.structured.importance")


class Experts(FewerExperts):
    """Removes the experts whose outputs, weighted by the router, are smallest. Lasby et al. 2025 (REAP), arXiv:2510.13999."""

    paper: ClassVar[str] = "arXiv:2510.13999"

    importance: Literal["reap", "frequency"] = Field(
        "reap",
        description="Of an expert: the mean over its tokens of the router's weight times the norm of its output, or the number of tokens.",
    )

    def choose(self, checkpoint: ModelSource, flow: Flow | None, run: Run) -> tuple[Cut, dict[str, Any]]:
        assert flow is not None, "experts measures activations"
        config = checkpoint.config
        scores = importances.expert_scores(checkpoint, flow, run, weighted=self.importance == "reap")
        counts = [len(one) for one in self.first_experts(config)]
        stay = tuple(largest(one, count) for one, count in zip(scores, counts, strict=True))
        total, unused = sum(map(len, scores)), sum(score == 0 for one in scores for score in one)
        run.say(f"experts: {total - sum(counts)} of {total} leave, by {self.importance}; {unused} saw no token")
        return cuts.Cut(tuple(range(config.num_layers)), experts=stay), {"experts": [list(one) for one in stay]}

    def passes(self, config: ModelConfig) -> Passes | None:
        each = (one for index in range(config.num_layers) for one in experts_of(config, index).values())
        written = sum(visited(one) * one.out_features for one in each if one.residual)
        return Passes(1.0, observed=2 * written)  # outputs, their gradients
