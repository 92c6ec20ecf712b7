"""Selective recomputation by operation: results of matmuls and of attention are saved, everything else is computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from hone.cost.activations.segments import Segment
from hone.train.activation_checkpointing.base import ActivationCheckpointing, Segments, Sizes

SAVED = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::_scaled_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "hone::attend",
        "hone::fp8_linear",
        "hone::scan",
        "hone::sparse_linear",
    }
)
"""Operations whose results are saved: dear to compute, and small beside what is computed from them."""


class Selective(ActivationCheckpointing):
    """Saves the results of matmuls and attention, recomputes norms, rotations, masks and gates. Korthikanti et al. 2022, arXiv:2205.05198."""

    paper: ClassVar[str] = "arXiv:2205.05198"

    def segments(self, num_layers: int, sizes: Sizes | None = None) -> Segments:
        """One segment per layer, all recomputed from the results of their matmuls."""
        return tuple(Segment(layer, layer + 1, True, saves="products") for layer in range(num_layers))

    def check(self, *, compile: bool, stages: int) -> None:
        """A compiled layer is one graph, of which the operations cannot be asked."""
        super().check(compile=compile, stages=stages)
        if compile:
            raise ValueError("compile does not work with activation_checkpointing selective: take every_nth or sqrt")


def contexts(layers: Sequence[Any]) -> Callable[[], Any]:
    """The `context_fn` of torch.utils.checkpoint for `layers`, of which the results of `SAVED` are kept.

    The last matmul of a layer is not saved: the residual sum alone reads it, and torch stops computing again before it.
    """
    from torch import Tensor
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    last = layers[-1]
    down = getattr(getattr(last.feed_forward, "down", None), "weight", None) if getattr(last, "usual", False) else None

    def policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name, _, overload = operation.name().partition(".")
        if (
            name not in SAVED or overload == "out"
        ):  # what is written into another tensor cannot be kept: that changes later
            return CheckpointPolicy.PREFER_RECOMPUTE
        if down is not None and any(isinstance(one, Tensor) and one.data_ptr() == down.data_ptr() for one in args):
            return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    return lambda: create_selective_checkpoint_contexts(policy)
