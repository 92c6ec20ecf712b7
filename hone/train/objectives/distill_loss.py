"""The distillation loss over two heads, chunk by chunk: the logits of student and teacher are never in memory as a whole.

Legend: T tokens, V vocabulary, D the student's width, E the teacher's.
"""

from __future__ import annotations

from torch import Tensor

from hone.cost.chunks import default_chunk_tokens
from hone.feed.load import IGNORE
from hone.ops import linear_cross_entropy
from hone.ops.loss.reference import Teacher
from hone.parallel import vocabulary
from hone.parallel.axis import Axis


def distill_loss(
    x_TD: Tensor,
    weight_VD: Tensor,
    teacher_TE: Tensor,
    teacher_VE: Tensor,
    targets_T: Tensor,
    *,
    alpha: float,
    temperature: float,
    softcaps: tuple[float | None, float | None] = (None, None),
    divided: tuple[Axis, int] | None = None,
) -> Tensor:
    """alpha t^2 KL(softmax(teacher / t) || softmax(student / t)) + (1 - alpha) cross entropy, summed over valid targets.

    `softcaps` are those of the student's and the teacher's logits. `x_TD` and `teacher_TE` are normed hidden states in any
    floating dtype, targets int64 with -100 for no target.
    `divided`: the heads' weights are rows of a tensor-parallel rank, from the second number on.
    A float32 scalar in nats (float64 for float64 inputs), differentiable in `x_TD` and `weight_VD`. arXiv:1503.02531.
    """
    softcap, teacher_softcap = softcaps
    if divided is not None:
        rows = vocabulary.Teacher(teacher_TE, teacher_VE, alpha, temperature, teacher_softcap)
        return vocabulary.vocabulary_cross_entropy(
            x_TD, weight_VD, targets_T, *divided, ignore_index=IGNORE, softcap=softcap, teacher=rows
        )
    teacher = Teacher(teacher_TE, teacher_VE, alpha, temperature, teacher_softcap)
    chunk_tokens = None if x_TD.is_cuda else default_chunk_tokens(x_TD.device.type, len(weight_VD))
    return linear_cross_entropy(
        x_TD, weight_VD, targets_T, reduction="sum", ignore_index=IGNORE, teacher=teacher, softcap=softcap,
        chunk_tokens=chunk_tokens,
    )  # fmt: skip
