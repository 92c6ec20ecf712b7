"""What a conversion of the layers changes in decoding: bytes kept of a token, and bytes that a step reads."""

from __future__ import annotations

from hone.base.figure import Estimate, human_bytes
from hone.cost.dims import ModelDims

KEPT = "kv_bytes_per_token"
"""The figure's name."""


def kept_per_token(before: ModelDims, after: ModelDims, width: int) -> Estimate:
    """Bytes of one token in the cache of the model `after`, `width` bytes a number."""
    now, then = after.kv_values_per_token, before.kv_values_per_token
    formula = f"{now} numbers of {width} B in all layers; {then} before"
    return Estimate(value=float(now * width), unit="B", formula=formula, tolerance=0.0)


def decoding_note(before: ModelDims, after: ModelDims, width: int) -> str:
    """What a decoding step of one sequence at the model's full length reads before and after: it cannot be faster by more."""
    length = after.max_seq_len
    kept = [width * one.state_values(length) for one in (before, after)]
    read = [width * one.read_params(1) + bytes_ for one, bytes_ in zip((before, after), kept, strict=True)]
    return (
        f"a sequence of {length:,} tokens keeps {human_bytes(kept[1])}, before {human_bytes(kept[0])}; a decoding step of one reads "
        f"{human_bytes(read[1])}, before {human_bytes(read[0])} (modelled): at best {read[0] / read[1]:.2f} times as fast"
    )
