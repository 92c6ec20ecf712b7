"""`hone cost flops`: weights, operations of a token, of a training, and its days; attention's squares."""

from __future__ import annotations

from pydantic import Field

from hone.cost.calculators.model import Sized
from hone.cost.calculators.sheet import Sheet
from hone.cost.catalogue.read import catalogue

MEGATRON = "Narayanan et al. 2021, arXiv:2104.04473"
KAPLAN = "Kaplan et al. 2020, arXiv:2001.08361"
CHECKPOINTING = "Chen et al. 2016, arXiv:1604.06174"


class Flops(Sized):
    """Operations of a model."""

    seq_len: int = Field(2048, ge=1, description="Tokens of a sequence.")
    tokens: float = Field(0, ge=0, description="Tokens of a training; 0: none.")
    gpus: int = Field(1, ge=1, description="Devices of the training.")
    accelerator: str = Field("", description="Their name in the catalogue: its rate counts.")
    utilization: float = Field(0.4, gt=0, le=1, description="Part of that rate that model operations reach (MFU).")
    tflops: float = Field(0, ge=0, description="TFLOP/s reached by a device, in place of accelerator and utilization.")
    recomputed: bool = Field(False, description="Whether all layers are recomputed, and the rate counts that work.")
    dtype: str = Field("bfloat16", description="Number format of the rate.")

    def sheet(self) -> Sheet:
        """Weights, operations of a token forward, in training and with all layers recomputed; days of a training."""
        at = self.sized("layers", "hidden_size", "heads", "vocab_size")
        dims = at.dims()
        found = Sheet(f"operations: {dims.num_params / 1e9:,.2f} billion weights, sequences of {self.seq_len:,}")
        s, L = self.seq_len, at.layers
        multiplied = dims.matmul_params if not at.active_params else at.active_params
        found.add("weights that a token is multiplied with", "N", N=multiplied)
        found.add("products of a token, forward", "2 * N", "FLOP", KAPLAN, N=multiplied)
        attended = {"L": L, "a": at.heads, "d": at.head_dim, "s": s}
        mixing = sum(layer.mixing.mixing_flops(s) for layer in dims.layers)
        found.add("attention of a token, causal", "4 * L * a * d * (s + 1) / 2", "FLOP", value=mixing, **attended)
        forward = found.add(
            "a token forward", "products + attention", "FLOP", products=2 * multiplied, attention=mixing
        )
        found.add("a token in training", "3 * forward", "FLOP", KAPLAN, forward=forward)
        found.add("a token, all layers recomputed", "4 * forward", "FLOP", CHECKPOINTING, forward=forward)
        found.add("recomputation takes more", "4 / 3 - 1", "%", CHECKPOINTING)
        found.add("scores of one head", "s ** 2", "numbers", s=s)
        if not at.gated and not at.experts:
            sizes = {"L": L, "h": at.hidden_size, "V": at.vocab_size, "s": s}
            found.add("weights with biases and positions", "12 * L * h ** 2 * (1 + 13 / (12 * h) + (V + s) / (12 * L * h))", source=MEGATRON, **sizes)  # fmt: skip
            found.add("a sequence, recomputed, attention not halved", "96 * s * L * h ** 2 * (1 + s / (6 * h) + V / (16 * L * h))", "FLOP", MEGATRON, **sizes)  # fmt: skip
        if self.tokens:
            self._days(found, forward)
        return found

    def _days(self, found: Sheet, forward: float) -> None:
        """Adds operations and days of a training."""
        passes = {"passes": 4 if self.recomputed else 3}
        total = found.add(
            "the training", "passes * forward * D", "FLOP", KAPLAN, forward=forward, D=self.tokens, **passes
        )
        rate = self.tflops * 1e12
        if not rate and self.accelerator:
            row = catalogue().accelerator(self.accelerator)
            known = row.rate(self.dtype)
            if known is None:
                found.verdicts.append(f"days are unknown: no rate of {row.name} is published in {self.dtype}")
                return
            rate = found.add("rate reached by a device", "peak * mfu", "FLOP/s", peak=known[0], mfu=self.utilization)
        if not rate:
            found.verdicts.append("days: give --accelerator=H100 and --utilization, or --tflops")
            return
        days = found.add("days", "C / (n * rate) / 86400", "days", MEGATRON, C=total, n=self.gpus, rate=rate)
        found.add("device hours", "24 * days * n", "h", days=days, n=self.gpus)
