"""The distillation loss over two heads, chunk by chunk: the logits of student and teacher are never in memory as a whole.

Legend: T tokens, V vocabulary, D the student's width, E the teacher's.
"""

from __future__ import annotations

from torch import Tensor

from hone.cost.chunks import default_chunk_tokens
from hone.feed.load import IGNORE
from hone.ops import linear_cross_entropy
from hone.ops.loss.divergence import FORWARD_KL, Divergence
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
    divergence: Divergence = FORWARD_KL,
    softcaps: tuple[float | None, float | None] = (None, None),
    divided: tuple[Axis, int] | None = None,
) -> Tensor:
    """alpha t^2 D(softmax(teacher / t), softmax(student / t)) + (1 - alpha) cross entropy, summed over valid targets.

    Where one head has more rows, which pad its vocabulary, D is that of the distributions over the ids that both have; the cross
    entropy is over all of the student's. Only alike tokenizers have ids that mean the same: the train stage compares them.
    `softcaps` are those of the student's and the teacher's logits. `x_TD` and `teacher_TE` are normed hidden states in any
    floating dtype, targets int64 with -100 for no target.
    `divided`: the heads' weights are rows of a tensor-parallel rank, from the second number on.
    A float32 scalar in nats (float64 for float64 inputs), differentiable in `x_TD` and `weight_VD`. arXiv:1503.02531.
    """
    softcap, teacher_softcap = softcaps
    if divided is not None:
        rows = vocabulary.Teacher(teacher_TE, teacher_VE, alpha, temperature, teacher_softcap, divergence)
        return vocabulary.vocabulary_cross_entropy(
            x_TD, weight_VD, targets_T, *divided, ignore_index=IGNORE, softcap=softcap, teacher=rows
        )
    sizes = len(weight_VD), len(teacher_VE)
    shared = None if sizes[0] == sizes[1] else min(sizes)
    teacher = Teacher(teacher_TE, teacher_VE, alpha, temperature, teacher_softcap, divergence, shared)
    chunk_tokens = None if x_TD.is_cuda else default_chunk_tokens(x_TD.device.type, len(weight_VD))
    return linear_cross_entropy(
        x_TD, weight_VD, targets_T, reduction="sum", ignore_index=IGNORE, teacher=teacher, softcap=softcap,
        chunk_tokens=chunk_tokens,
    )  # fmt: skip
