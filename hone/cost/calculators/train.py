"""`hone cost train`: memory of a training on a device, by layout: states, activations, logits, with each kind of recomputation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hone.base.errors import SpecError
from hone.base.figure import human_bytes
from hone.cost.calculators.model import Sized
from hone.cost.calculators.sheet import Sheet
from hone.cost.catalogue.read import catalogue

ZERO = "Rajbhandari et al. 2020, arXiv:1910.02054"
PAPER = "Korthikanti et al. 2022, arXiv:2205.05198"
FLASH = "Dao et al. 2022, arXiv:2205.14135"


class TrainMemory(Sized):
    """Memory of a device."""

    seq_len: int = Field(2048, ge=1, description="Tokens of a sequence.")
    micro_batch: int = Field(1, ge=1, description="Sequences of a micro-batch.")
    microbatches: int = Field(0, ge=0, description="Micro-batches of a step; 0: as many as pipeline stages.")
    data: int = Field(1, ge=1, description="Data-parallel ranks.")
    tensor: int = Field(1, ge=1, description="Tensor-parallel ranks.")
    pipeline: int = Field(1, ge=1, description="Pipeline stages.")
    stages_per_rank: int = Field(1, ge=1, description="Stages of a rank (interleaved).")
    context: int = Field(1, ge=1, description="Ranks that share a sequence.")
    zero: Literal[0, 1, 2, 3] = Field(0, description="ZeRO stage over the data-parallel ranks.")
    sequence_parallel: bool = Field(False, description="Whether tensor-parallel ranks share norms and residuals.")
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="Recomputed: nothing, attention's scores, or whole layers."
    )
    flash: bool = Field(False, description="Whether attention keeps no scores (FlashAttention).")
    dropout: bool = Field(True, description="Whether layers have dropout, whose masks are kept.")
    gradient_bytes: float = Field(2, gt=0, description="Bytes of a gradient: 2, or 4 where they are summed in float32.")
    optimizer_bytes: float = Field(12, ge=0, description="Bytes of the optimizer a weight, with its float32 weights.")
    fused_loss: bool = Field(False, description="Whether logits exist in parts alone.")
    accelerator: str = Field("", description="Device in whose memory it is to fit.")

    def sheet(self) -> Sheet:
        """States, activations of the first stage and logits of the last, in bytes of one device."""
        at = self.sized("layers", "hidden_size", "heads", "vocab_size")
        assert isinstance(at, TrainMemory)
        self._check(at)
        dims = at.dims()
        found = Sheet(
            f"training {dims.num_params / 1e9:,.1f} billion weights on {self.data} x {self.tensor} x {self.pipeline} = "
            f"{self.data * self.tensor * self.pipeline:,} devices (data x tensor x pipeline)"
        )
        states = self._states(found, dims.num_params)
        layer = self._layer(found, at)
        held = {"layer": layer, "L": at.layers, "p": self.pipeline, "v": self.stages_per_rank}
        alive = min(self.microbatches or self.pipeline, self.pipeline)
        if self.stages_per_rank > 1:
            kept = found.add(
                "activations of the first stage", "layer * L * (1 + (p - 1) / (p * v))", "B", PAPER, **held
            )
        else:
            kept = found.add("activations of the first stage", "layer * L / p * alive", "B", PAPER, layer=layer, L=at.layers, p=self.pipeline, alive=alive)  # fmt: skip
        logits = 0.0
        if not self.fused_loss:
            shared = {"s": self.seq_len, "b": self.micro_batch, "V": at.vocab_size, "t": self.tensor, "c": self.context}
            logits = found.add("logits and their gradient, last stage", "2 * 4 * s * b * V / (t * c)", "B", **shared)
        # Stages have different parts: the first one the most activations, the last one the logits and one micro-batch.
        last = kept / (alive if self.pipeline > 1 else 1) + logits
        moving = max(kept, last) if self.pipeline > 1 else kept + logits
        total = found.add("a device at the peak", "states + moving", "B", states=states, moving=moving)
        self._verdict(found, total)
        return found

    def _states(self, found: Sheet, num_params: float) -> float:
        """Adds weights, gradients and optimizer; returns their bytes on a device."""
        psi = found.add("weights of a device", "N / (t * p)", "", N=num_params, t=self.tensor, p=self.pipeline)
        ranks = [1 if self.zero < stage else self.data for stage in (3, 2, 1)]
        rows = zip(
            ("weights", "gradients", "optimizer"), (2.0, self.gradient_bytes, self.optimizer_bytes), ranks, strict=True
        )
        parts = [
            found.add(f"bytes of {name}", "b * psi / n", "B", ZERO if n > 1 else "", b=each, psi=psi, n=n)
            for name, each, n in rows
        ]
        return found.add("bytes of states", "w + g + k", "B", ZERO, w=parts[0], g=parts[1], k=parts[2])

    def _layer(self, found: Sheet, at: TrainMemory) -> float:
        """Adds activations of a layer of one micro-batch; returns their bytes on a device.

        Bytes of the paper's section 4 in 16 bits: undivided 2 norms, 2 inputs and 2 masks (10 s b h with dropout, 8 without);
        divided by t queries, keys, values and the result (4 + 4 g, g key heads of a query head's) and the feed-forward (4 f / h,
        with a gate 6 f / h: gate, up and their product); scores a s (5 with dropout's mask and result, 2 without).
        """
        whole = {"s": self.seq_len / self.context, "b": self.micro_batch, "h": at.hidden_size}
        if self.recompute == "full":
            t = self.tensor if self.sequence_parallel else 1
            return found.add("activations of a layer", "2 * s * b * h / t", "B", PAPER, t=t, **whole)
        split = {"t": self.tensor, "g": at.kv_heads / at.heads, "f": at.intermediate_size}
        u, w = (10 if self.dropout else 8), (6 if at.gated else 4)
        apart = "/ t " if self.sequence_parallel else ""
        formula = f"s * b * h * (u {apart}+ (4 + 4 * g + w * f / h) / t)"
        kept = found.add("activations of a layer without scores", formula, "B", PAPER, u=u, w=w, **split, **whole)
        if self.flash or self.recompute == "selective":
            why = "FlashAttention keeps no scores" if self.flash else "scores are recomputed"
            found.verdicts.append(f"{why} ({FLASH if self.flash else PAPER})")
            return kept
        x = 5 if self.dropout else 2
        scores = found.add("scores of a layer", "x * a * s ** 2 * b / t", "B", PAPER, x=x, a=at.heads, t=self.tensor, s=whole["s"], b=whole["b"])  # fmt: skip
        return found.add("activations of a layer", "kept + scores", "B", PAPER, kept=kept, scores=scores)

    def _check(self, at: TrainMemory) -> None:
        if at.heads % self.tensor:
            raise SpecError(
                f"tensor = {self.tensor} does not divide heads = {at.heads}", fix="each rank has whole heads"
            )
        if at.layers % (self.pipeline * self.stages_per_rank):
            raise SpecError(
                f"pipeline x stages_per_rank = {self.pipeline * self.stages_per_rank} does not divide layers = {at.layers}",
                fix="the formulas are of equal stages; hone train --plan --mesh plans unequal ones",
            )
        if at.experts:
            raise SpecError("the formulas are of dense layers", fix="hone train --plan --mesh plans experts")

    def _verdict(self, found: Sheet, total: float) -> None:
        if not self.accelerator:
            return
        row = catalogue().accelerator(self.accelerator)
        if row.memory_bytes is None:
            found.verdicts.append(f"whether it fits is unknown: the memory of {row.name} is")
            return
        fits = "fits" if total <= row.memory_bytes else "does not fit"
        found.verdicts.append(
            f"{human_bytes(total)} {fits} the {human_bytes(row.memory_bytes)} of {row.name}; CUDA's context, NCCL and gaps take some GiB more"
        )
