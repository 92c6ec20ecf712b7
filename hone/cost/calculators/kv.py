"""`hone cost kv`: bytes of keys and values, of multi-head, multi-query, grouped and latent attention."""

from __future__ import annotations

from pydantic import Field

from hone.base.errors import SpecError
from hone.cost.cache import BYTES
from hone.cost.calculators.model import Sized
from hone.cost.calculators.sheet import Sheet

VASWANI = "Vaswani et al. 2017, arXiv:1706.03762"
SHAZEER = "Shazeer 2019, arXiv:1911.02150"
AINSLIE = "Ainslie et al. 2023, arXiv:2305.13245"
DEEPSEEK = "DeepSeek-V2, arXiv:2405.04434"


class KV(Sized):
    """The cache of keys and values."""

    dtype: str = Field("bfloat16", description="Number format of the cache.")
    tokens: int = Field(2048, ge=1, description="Tokens of a sequence.")
    sequences: int = Field(1, ge=1, description="Sequences at once.")
    window: int = Field(0, ge=0, description="Positions that each layer keeps at most; 0: all.")

    def sheet(self) -> Sheet:
        """Numbers a token of each kind of attention, and the bytes of the model's own."""
        at = self.sized("layers", *(("latent_dim", "rope_dim") if self.latent_dim else ("heads", "head_dim")))
        assert isinstance(at, KV)
        found = Sheet(f"cache of keys and values: {at.layers} layers, {at.attention}")
        b = bytes_of(self.dtype)
        if at.heads and at.head_dim:
            sizes = {"L": at.layers, "d": at.head_dim}
            found.add("MHA: numbers a token", "2 * L * heads * d", source=VASWANI, heads=at.heads, **sizes)
            found.add("MQA: numbers a token", "2 * L * d", source=SHAZEER, **sizes)
            if at.kv_heads not in (1, at.heads):
                value = at.dims().kv_values_per_token
                found.add("GQA: numbers a token", "2 * L * kv_heads * d", source=AINSLIE, value=value, kv_heads=at.kv_heads, **sizes)  # fmt: skip
        if at.latent_dim:
            latent = {"L": at.layers, "r": at.latent_dim, "d_rope": at.rope_dim}
            found.add("MLA: numbers a token", "L * (r + d_rope)", source=DEEPSEEK, **latent)
        each = found[f"{at.attention}: numbers a token"]
        most = found.lines[0].value
        found.add("bytes a token", "values * b", "B", values=each, b=b)
        kept = min(at.tokens, at.window or at.tokens)
        found.add("bytes of a sequence", "per_token * tokens", "B", per_token=each * b, tokens=kept)
        if at.sequences > 1:
            found.add("bytes of all sequences", "n * per_sequence", "B", n=at.sequences, per_sequence=each * b * kept)
        if each != most:
            found.add("times smaller than MHA", "mha / own", mha=most, own=each)
        return found


def bytes_of(dtype: str) -> float:
    """Bytes of a number. Raises SpecError for a dtype that hone's caches do not have."""
    if dtype not in BYTES:
        raise SpecError(f"no dtype '{dtype}'", fix=f"use one of {', '.join(BYTES)}")
    return BYTES[dtype]
