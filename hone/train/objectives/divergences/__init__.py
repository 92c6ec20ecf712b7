"""Divergences of distillation: how far a student's distribution is from its teacher's."""

from hone.base.table import Table

DIVERGENCES = Table(
    "divergence",
    {
        "forward_kl": "hone.train.objectives.divergences.kl:ForwardKL",
        "reverse_kl": "hone.train.objectives.divergences.kl:ReverseKL",
        "jsd": "hone.train.objectives.divergences.jsd:JSD",
        "skew_kl": "hone.train.objectives.divergences.skew:SkewKL",
        "skew_reverse_kl": "hone.train.objectives.divergences.skew:SkewReverseKL",
    },
)
