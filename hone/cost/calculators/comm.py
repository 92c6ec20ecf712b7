"""`hone cost comm`: bytes and seconds that a layout's ranks send in a training step, beside its arithmetic, and which link is the limit."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hone.base.errors import SpecError
from hone.cost.calculators.model import Sized
from hone.cost.calculators.sheet import Sheet
from hone.cost.catalogue.read import catalogue
from hone.cost.catalogue.rows import Accelerator
from hone.cost.ranks import link_bytes_per_s, messages_and_bytes

RING = "Patarasuk and Yuan 2009: a ring"
MEGATRON = "Korthikanti et al. 2022, arXiv:2205.05198"


class Communication(Sized):
    """What travels between ranks in a step."""

    accelerator: str = Field("H100", description="Device, by its name in the catalogue.")
    dtype: str = Field("bfloat16", description="Number format of products and of what is sent.")
    seq_len: int = Field(4096, ge=1, description="Tokens of a sequence.")
    batch: int = Field(256, ge=1, description="Sequences of a step, of all ranks.")
    micro_batch: int = Field(1, ge=1, description="Sequences of a micro-batch.")
    data: int = Field(1, ge=1, description="Data-parallel ranks.")
    tensor: int = Field(1, ge=1, description="Tensor-parallel ranks.")
    pipeline: int = Field(1, ge=1, description="Pipeline stages.")
    expert: int = Field(1, ge=1, description="Ranks that divide experts, among the data-parallel ones.")
    zero: Literal[0, 1, 2, 3] = Field(1, description="ZeRO stage; 3 gathers weights in every pass.")
    utilization: float = Field(0.5, gt=0, le=1, description="Part of the device's rate that products reach.")
    network_gbs: float = Field(
        0, ge=0, description="GB/s a device to other machines; 0: four fifths of the catalogue's port."
    )
    link_gbs: float = Field(
        0, ge=0, description="GB/s a device to its neighbours; 0: two thirds of the catalogue's link."
    )

    def sheet(self) -> Sheet:
        """Bytes that a rank sends by kind of parallelism, the seconds of each on its link, their ratio to the seconds of arithmetic."""
        at = self.sized("layers", "hidden_size", "heads", "vocab_size")
        row = catalogue().accelerator(self.accelerator)
        if self.batch % (self.data * self.micro_batch):
            raise SpecError(
                f"batch = {self.batch} is no multiple of data x micro_batch = {self.data * self.micro_batch}",
                fix="change one of them",
            )
        if self.data % self.expert:
            raise SpecError(
                f"expert = {self.expert} does not divide data = {self.data}", fix="experts divide data-parallel ranks"
            )
        ranks = self.data * self.tensor * self.pipeline
        found = Sheet(
            f"communication of {self.data} x {self.tensor} x {self.pipeline} = {ranks:,} {row.name} (data x tensor x pipeline)"
        )
        computed = self._computed(found, at, row, ranks)
        spent = {**self._inside(found, at, row), **self._between(found, at, row)}
        if not spent:
            found.verdicts.append("one rank sends nothing")
            return found
        moved = found.add("all transfers one after the other", " + ".join(spent), "s", **spent)
        ratio = found.add("communication to computation", "moved / computed", "", moved=moved, computed=computed)
        worst = max(spent, key=lambda name: spent[name])
        inside = _span(self, worst) <= (row.num_linked or 1)
        where = (
            f"{row.link} inside a domain of {row.num_linked}"
            if inside
            else f"the network ({row.network or 'unknown port'})"
        )
        found.verdicts.append(
            f"most is sent by {worst} parallelism, over {where}: {spent[worst] / moved:.0%} of the transfers, "
            f"{spent[worst] / computed:.0%} of the arithmetic"
        )
        found.verdicts.append(
            "the arithmetic can hide all of it"
            if ratio < 1
            else "the interconnect is the limit: no overlap hides more than the arithmetic takes"
        )
        return found

    @property
    def _tokens(self) -> float:
        """Tokens of a micro-batch."""
        return self.micro_batch * self.seq_len

    @property
    def _passes(self) -> int:
        return self.batch // (self.data * self.micro_batch)

    def _computed(self, found: Sheet, at: Sized, row: Accelerator, ranks: int) -> float:
        rate = row.rate(self.dtype)
        if rate is None:
            raise SpecError(
                f"no rate of {row.name} is published in {self.dtype}", fix="name another accelerator or --dtype"
            )
        each = 3 * at.dims().flops_per_token(self.seq_len)
        return found.add(
            "arithmetic of a step", "C * B * s / (ranks * peak * u)", "s", C=each, B=self.batch, s=self.seq_len, ranks=ranks,
            peak=rate[0], u=self.utilization,
        )  # fmt: skip

    def _rate(self, row: Accelerator, kind: str) -> float:
        """Bytes/s of the links of `kind` of parallelism."""
        span = _span(self, kind)
        given = self.link_gbs if span <= (row.num_linked or 1) else self.network_gbs
        return given * 1e9 or link_bytes_per_s("cuda", span, row.name)

    def _inside(self, found: Sheet, at: Sized, row: Accelerator) -> dict[str, float]:
        """Tensor parallelism: forward and backward two all-reduces (or a gather and a scatter each) of a layer and micro-batch."""
        spent = {}
        if self.tensor > 1:
            width = 2 if self.dtype != "float32" else 4
            message = width * self._tokens * at.hidden_size
            _, ring = messages_and_bytes("all_reduce", "ring", self.tensor, message)
            each = found.add("one sum of a layer's tokens", "2 * (n - 1) / n * w * T * h", "B", RING, ring, n=self.tensor, w=width, T=self._tokens, h=at.hidden_size)  # fmt: skip
            sent = found.add("tensor: bytes a rank sends", "4 * L / p * m * each", "B", MEGATRON, L=at.layers, p=self.pipeline, m=self._passes, each=each)  # fmt: skip
            spent["tensor"] = found.add(
                "tensor: seconds", "sent / beta", "s", sent=sent, beta=self._rate(row, "tensor")
            )
        if self.expert > 1 and at.experts:
            width = 2 if self.dtype != "float32" else 4
            sizes = {"k": at.experts_per_token, "T": self._tokens, "h": at.hidden_size, "w": width, "n": self.expert}
            each = found.add("rows of a layer to experts and back", "2 * k * T * h * w * (n - 1) / n", "B", "Lepikhin et al. 2020, arXiv:2006.16668", **sizes)  # fmt: skip
            sent = found.add(
                "expert: bytes a rank sends",
                "2 * L / p * m * each",
                "B",
                L=at.layers,
                p=self.pipeline,
                m=self._passes,
                each=each,
            )
            spent["expert"] = found.add(
                "expert: seconds", "sent / beta", "s", sent=sent, beta=self._rate(row, "expert")
            )
        return spent

    def _between(self, found: Sheet, at: Sized, row: Accelerator) -> dict[str, float]:
        """Pipeline boundaries, and gradients and weights of data-parallel ranks."""
        spent, width = {}, 4 if self.dtype == "float32" else 2
        if self.pipeline > 1:
            sizes = {"w": width, "T": self._tokens, "h": at.hidden_size, "m": self._passes}
            sent = found.add("pipeline: bytes a rank sends", "2 * m * w * T * h", "B", **sizes)
            spent["pipeline"] = found.add(
                "pipeline: seconds", "sent / beta", "s", sent=sent, beta=self._rate(row, "pipeline")
            )
        if self.data > 1:
            part = self._part(found, at)
            times = 3 * self._passes if self.zero == 3 else 2
            formula = "times * (n - 1) / n * w * psi"
            sent = found.add(
                "data: bytes a rank sends", formula, "B", RING, times=times, n=self.data, w=width, psi=part
            )
            spent["data"] = found.add("data: seconds", "sent / beta", "s", sent=sent, beta=self._rate(row, "data"))
        return spent

    def _part(self, found: Sheet, at: Sized) -> float:
        """Adds and returns the weights of a rank whose gradients it sums with others; of experts those of its own part."""
        sizes = {"N": at.dims().num_params, "t": self.tensor, "p": self.pipeline}
        if self.expert == 1 or not at.experts:
            return found.add("weights of a rank", "N / (t * p)", "", **sizes)
        return found.add(
            "weights of a rank", "(N - E + E / e) / (t * p)", "", E=at.expert_params, e=self.expert, **sizes
        )


def _span(at: Communication, kind: str) -> int:
    """Neighbours from the first to the last of a group, tensor-parallel ranks innermost, then data, then pipeline."""
    inner = at.tensor * (at.expert if kind == "expert" else 1)
    return {"tensor": inner, "expert": inner, "data": at.tensor * at.data}.get(kind, at.tensor * at.data * at.pipeline)
