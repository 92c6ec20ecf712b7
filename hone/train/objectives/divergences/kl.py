"""The two Kullback-Leibler divergences between teacher and student."""

from __future__ import annotations

from typing import ClassVar

from hone.train.objectives.divergences.base import Divergence


class ForwardKL(Divergence):
    """KL(p || q): the student covers all that the teacher finds likely. Hinton et al. 2015, arXiv:1503.02531."""

    paper: ClassVar[str] = "arXiv:1503.02531"


class ReverseKL(Divergence):
    """KL(q || p): the student avoids what the teacher finds unlikely. Gu et al. 2023 (MiniLLM), arXiv:2306.08543."""

    paper: ClassVar[str] = "arXiv:2306.08543"
