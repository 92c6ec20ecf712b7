"""Figures of merit of an accelerator, from its row of the catalogue: ridge point, dollars and joules of arithmetic, decode bound."""

from __future__ import annotations

from dataclasses import dataclass

from hone.base.errors import SpecError
from hone.cost.catalogue.read import Catalogue
from hone.cost.catalogue.rows import Accelerator


@dataclass(frozen=True)
class Decode:
    """A decode to bound: a model of `params` weights, `params_read` of them for a token, at `bits` each, `batch` sequences at once."""

    params: float
    bits: float = 16
    batch: int = 1
    kv_bytes: float = 0.0
    """Bytes of one sequence's cache that a step reads."""
    active: float | None = None
    """Weights that one token is multiplied with; None: all."""

    @property
    def weight_bytes(self) -> float:
        return self.params * self.bits / 8


@dataclass(frozen=True)
class Merit:
    """One accelerator's figures. None is unknown."""

    accelerator: Accelerator
    ridge: float | None
    """FLOP a byte at which arithmetic takes as long as reading memory (Williams et al. 2009, Roofline)."""
    usd_per_pflop_h: float | None
    """Lowest dollars on demand of an hour at 1 PFLOP/s of the data sheet's rate."""
    j_per_tflop: float | None
    """Joules of 1e12 operations at the data sheet's rate and power."""
    tokens_per_s: float | None
    """Most tokens/s of the decode on one device; None where it does not fit or a figure is unknown."""
    devices: int | None
    """Devices that hold the weights and the caches."""
    why: str
    """How `tokens_per_s` came about, or why it is None."""


def merit(catalogue: Catalogue, row: Accelerator, dtype: str, decode: Decode) -> Merit:
    """The figures of `row` for products of `dtype` and for `decode`.

    A decode step reads its weights once and each sequence's cache, and multiplies every sequence with the weights:
    max(bytes / bandwidth, FLOP / rate). It is a bound of the data sheet; what is reached is 60 to 90 % of it.
    """
    found = row.rate(dtype)
    rate = found[0] if found is not None else None
    prices = catalogue.prices_of(row, "on_demand")
    usd = min((one.usd_per_h for one in prices), default=None)
    tokens, devices, why = decode_bound(row, dtype, decode)
    return Merit(
        accelerator=row,
        ridge=None if rate is None or row.bytes_per_s is None else rate / row.bytes_per_s,
        usd_per_pflop_h=None if rate is None or usd is None else usd / (rate / 1e15),
        j_per_tflop=None if rate is None or row.power_w is None else row.power_w / (rate / 1e12),
        tokens_per_s=tokens,
        devices=devices,
        why=why,
    )


def decode_bound(row: Accelerator, dtype: str, decode: Decode) -> tuple[float | None, int | None, str]:
    """(tokens/s at most of all sequences, devices that hold it, how) of `decode` on as many devices of `row` as hold it."""
    if min(decode.params, decode.bits, decode.batch) <= 0:
        raise SpecError(
            f"a decode of {decode.params:g} weights of {decode.bits:g} bits and {decode.batch} sequences is none",
            fix="give positive sizes: --params=8e9 --bits=16 --batch=1",
        )
    if row.bytes_per_s is None or row.memory_bytes is None:
        return None, None, "its memory is unknown"
    held = decode.weight_bytes + decode.batch * decode.kv_bytes
    devices = max(1, -(-int(held) // int(row.memory_bytes)))
    share = (decode.active or decode.params) / decode.params
    touched = min(1.0, 1 - (1 - share) ** decode.batch) if share < 1 else 1.0
    read = decode.weight_bytes * touched + decode.batch * decode.kv_bytes
    memory_s = read / (devices * row.bytes_per_s)
    rate = row.rate(dtype)
    if rate is None:
        return None, devices, "its rate of arithmetic is unknown"
    flops = 2 * (decode.active or decode.params) * decode.batch
    compute_s = flops / (devices * rate[0])
    step = max(memory_s, compute_s)
    why = f"max({read:.3g} B / {devices} x {row.bytes_per_s / 1e12:.2f} TB/s, {flops:.3g} FLOP / {devices} x {rate[0] / 1e12:,.0f} TFLOP/s)"
    return decode.batch / step, devices, f"{why} = {step * 1e3:.3g} ms a step; links are free"
