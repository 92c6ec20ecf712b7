"""Rotary frequencies of a converted layer: those that its attention had, or some of them, each several times."""

from __future__ import annotations

from typing import Any

import torch

from hone.base.errors import SpecError
from hone.model.rope import Rope


def repeated(rope: Rope, dim: int, fold: int, times: int, max_seq_len: int) -> dict[str, Any]:
    """The rope of times x dim / fold channels that has every `fold`-th frequency of `rope` with `dim` channels, each `times` in a row.

    The same rope where its own frequencies are these; else one that divides others until they are, as longrope does. Raises
    SpecError for frequencies that depend on the length of the sequence and are not these.
    """
    width, same = times * dim // fold, rope.model_dump(mode="json")
    if times == 1 and rope.scaling == "longrope":
        return {**same, **{name: same[name][::fold] for name in ("short_factor", "long_factor")}}
    if width == dim and times == 1:
        return same
    if rope.by_length:
        raise SpecError(
            f"rotary positions with scaling '{rope.scaling}' depend on the length of the sequence, so that no {width} channels have "
            "their frequencies",
            fix="take fold 1 and rope_heads 1",
        )
    wanted = rope.frequencies(dim)[::fold].repeat_interleave(times).double()
    own = rope.frequencies(width).double()
    if torch.allclose(own, wanted, rtol=1e-6, atol=0):
        return same
    plain = Rope(theta=rope.theta).frequencies(width).double()
    divisors = (plain / wanted).tolist()
    made = {"theta": rope.theta, "scaling": "longrope", "short_factor": divisors, "long_factor": divisors}
    return {**made, "original_max_seq_len": max_seq_len, "attention_factor": rope.attention_factor}
