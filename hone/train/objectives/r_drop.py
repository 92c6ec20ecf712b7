"""R-Drop objective: a text is computed twice with other dropout, and the two distributions are drawn together.

Legend: B sequences of a micro-batch, S tokens of one, T tokens of one pass, V vocabulary, D width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.cost.chunks import default_chunk_tokens
from hone.train.objectives.base import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from hone.feed.load import Batch
    from hone.model.config import ModelConfig
    from hone.model.decoder import Decoder
    from hone.train.objectives.base import Setting
    from hone.train.passes import Preparer, Trained

np, torch = lazy("numpy"), lazy("torch")
functional, recomputation = lazy("torch.nn.functional"), lazy("torch.utils.checkpoint")


class RDrop(Objective):
    """Mean cross entropy of two passes with other dropout + alpha / 4 (KL(p || q) + KL(q || p)) of their distributions: half of the paper's loss, which adds the passes up. Liang et al. 2021, arXiv:2106.14448."""

    paper: ClassVar[str] = "arXiv:2106.14448"
    views: ClassVar[int] = 2
    prepares: ClassVar[bool] = True
    alpha: float = Field(1.0, ge=0, description="Weight of the divergences beside the cross entropies.")

    def preparer(self, setting: Setting | None) -> Preparer:
        return Repeated(self.views)

    def total(
        self, model: Decoder, x: Tensor, targets: Tensor, teacher: Decoder | None, teacher_hidden: Tensor | None
    ) -> Tensor:
        """Nats summed over the valid targets of both passes: rows 2 i and 2 i + 1 of x [B, S, D] are of one sequence. Gradients are of
        both sides of the divergences. Logits of a chunk of tokens are computed again in the backward pass."""
        views = model.head_input(x).unflatten(0, (-1, 2)).transpose(0, 1).flatten(1, 2)  # [2, T, D]
        total, once = torch.zeros((), dtype=torch.float32, device=x.device), targets[::2].flatten()
        size = default_chunk_tokens(x.device.type, len(model.head_weight))
        for part, own in zip(views.split(size, 1), once.split(size), strict=True):
            given = part, model.head_weight, own, self.alpha, model.config.logits_softcap
            total = total + recomputation.checkpoint(_of_chunk, *given, use_reentrant=False, preserve_rng_state=False)
        return total


class Repeated:
    """Prepares batches: each sequence `views` times, side by side, so that a micro-batch has all of them: dropout differs from sequence to sequence."""

    def __init__(self, views: int) -> None:
        self.views = views
        self.parts: int | None = None
        self.row: dict[str, float] = {}

    def prepare(self, trained: Trained, batch: Batch) -> Batch:
        return type(batch)(*(np.repeat(array, self.views, axis=0) for array in batch))

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        pass


def _of_chunk(views: Tensor, weight: Tensor, targets: Tensor, alpha: float, softcap: float | None) -> Tensor:
    """The loss of T tokens whose normed hidden states are `views` [2, T, D], with the head's weight [V, D]."""
    logits = (views @ weight.T).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p, log_q = logits.log_softmax(-1)
    text = sum(functional.nll_loss(one, targets, reduction="sum") for one in (log_p, log_q))
    apart = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1)  # the sum of both divergences
    return text + alpha / 2 * apart.masked_fill(targets < 0, 0).sum()


def check_views(spec: Any, config: ModelConfig) -> None:
    """Raises SpecError where nothing makes the passes of R-Drop differ."""
    if spec.objective.views > 1 and not any(getattr(one, "dropout", 0) for one in config.adapters):
        what = "the adapter has none" if config.adapters else "only adapters have it"
        raise SpecError(
            f"objective {spec.objective.kind} compares two passes with other dropout, and {what}: they would be equal",
            fix="train an adapter with dropout, such as --adapter.kind=lora --adapter.dropout=0.1, or take objective: next_token",
        )
