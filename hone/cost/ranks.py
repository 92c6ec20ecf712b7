"""Seconds in which ranks exchange tensors: all-reduces of a tensor-parallel step, logits, and transfers between stages.

The rates are what NVLink GPUs and gloo on one machine are expected to do, and estimates that use them say so. `python -m
benchmarks.serve_ranks --only reduce` measures the first; `torchrun ... hone calibrate` measures collectives (`Transfers`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from hone.base.figure import Estimate
from hone.cost.cache import BYTES
from hone.cost.catalogue.read import catalogue
from hone.cost.dims import ModelDims
from hone.measure.calibration import CollectiveTime
from hone.measure.machine import Machine

LINK_BYTES_PER_S = {"cuda": 3e11, "cpu": 1e9}
"""Bytes/s that a rank receives: two thirds of an H100's or H200's NVLink (450 GB/s each way), also assumed of GPUs that the catalogue
does not have, and gloo over a machine's own sockets."""

NETWORK_BYTES_PER_S = 4e10
"""Bytes/s that a GPU receives from another machine: four fifths of an adapter of 400 Gbit/s for each GPU, as DGX machines have."""

HOST_GPUS = 8
"""GPUs of a machine; ranks further apart exchange over the network."""

OF_LINK, OF_PORT = 2 / 3, 4 / 5
"""What is assumed to be reached of a link between devices and of a port to other machines, of their rates in the catalogue."""

MESSAGE_S = {"cuda": 5e-6, "cpu": 1.5e-4}
"""Seconds of a message beside its bytes."""

ONE_SHOT_BYTES = 512 << 10
"""Largest message that each rank reads from all others at once (`hone.parallel.one_shot.MAX_BYTES`); larger ones go around a ring."""


def link_bytes_per_s(device: str, span: int, processor: str = "") -> float:
    """Bytes/s that a rank receives in a group of ranks that takes `span` neighbours from its first to its last.

    Of a GPU that the catalogue has, named `processor`, by its own links; of others as of H100.
    """
    if not device.startswith("cuda"):
        return LINK_BYTES_PER_S["cpu"]
    near, far, together = _links(processor)
    return far if span > together else near


def _links(processor: str) -> tuple[float, float, int]:
    """(bytes/s between neighbours, bytes/s over the network, GPUs that are neighbours) of the GPU `processor`."""
    row = catalogue().of_processor(processor) if processor else None
    if row is None:
        return LINK_BYTES_PER_S["cuda"], NETWORK_BYTES_PER_S, HOST_GPUS
    link, port = (catalogue().link(name) for name in (row.link, row.network))
    near = OF_LINK * link.bytes_per_s if link is not None and link.bytes_per_s is not None else None
    far = OF_PORT * port.bytes_per_s if port is not None and port.bytes_per_s is not None else NETWORK_BYTES_PER_S
    return near if near is not None else far, far, row.num_linked or 1


BESIDE = 0.15
"""Of transfers beside products, the part of their seconds by which these take longer, where it was not measured: NCCL's
collectives take some 16 to 24 of a GPU's 132 multiprocessors."""


@dataclass(frozen=True)
class Split:
    """How a model is divided: among `tensor` ranks of each of `stages` pipeline stages, of devices like `device`,
    the GPU `processor`."""

    tensor: int = 1
    stages: int = 1
    device: str = "cpu"
    processor: str = ""

    @property
    def _kind(self) -> str:
        return "cuda" if self.device.startswith("cuda") else "cpu"

    def _rate(self, span: int) -> float:
        return link_bytes_per_s(self.device, span, self.processor)

    def all_reduce_s(self, num_bytes: float) -> float:
        """Seconds of the sum of one message over the tensor-parallel ranks."""
        if self.tensor == 1:
            return 0.0
        rate, start, others = self._rate(self.tensor), MESSAGE_S[self._kind], self.tensor - 1
        if num_bytes <= ONE_SHOT_BYTES or self._kind == "cpu":  # gloo: every rank gets all others' tensors
            return start + others * num_bytes / rate
        return 2 * others * start + 2 * others / self.tensor * num_bytes / rate

    def gather_s(self, num_bytes: float) -> float:
        """Seconds in which every rank gets the other parts of a tensor of `num_bytes`."""
        if self.tensor == 1:
            return 0.0
        share = (self.tensor - 1) / self.tensor
        return MESSAGE_S[self._kind] + share * num_bytes / self._rate(self.tensor)

    def step(self, dims: ModelDims, num_tokens: int, num_logits: int, vocab_size: int, dtype: str) -> Estimate:
        """Seconds that a stage (`dims`: its layers) spends on exchanges in a step: two sums a layer, one of embeddings, logits."""
        message = BYTES[dtype] * num_tokens * dims.hidden_size
        sums, logits = 2 * dims.num_layers + 1, BYTES[dtype] * num_logits * vocab_size
        hop = MESSAGE_S[self._kind] + message / self._rate(self.tensor * self.stages) if self.stages > 1 else 0.0
        value = sums * self.all_reduce_s(message) + self.gather_s(logits) + hop
        return Estimate(
            value=value, unit="s", formula=f"exchanges {value * 1e3:.2f} ms (link rates are not calibrated)"
        )


def messages_and_bytes(op: str, algorithm: str, ranks: int, num_bytes: float) -> tuple[float, float]:
    """(messages one after the other, bytes one after the other) of a collective of a tensor of `num_bytes` on `ranks` > 1.

    The formulas of `hone.parallel.collectives`: of one message `alpha` seconds, of one byte `beta` (Hockney 1994).
    """
    n, power = ranks, 1 << ranks.bit_length() - 1
    fold = 2 if power < n else 0  # the ranks beyond the power of two give first and get last
    steps, share = math.log2(power), (n - 1) / n * num_bytes
    if (op, algorithm) == ("all_reduce", "halving"):
        return 2 * steps + fold, 2 * (power - 1) / power * num_bytes + fold * num_bytes
    if (op, algorithm) == ("all_reduce", "doubling"):
        return steps + fold, (steps + fold) * num_bytes
    if (op, algorithm) == ("all_reduce", "tree"):
        return 2 * math.ceil(math.log2(n)), 2 * math.ceil(math.log2(n)) * num_bytes
    if algorithm != "ring":
        raise ValueError(f"no formula for {op} by {algorithm}")
    return (2 * (n - 1), 2 * share) if op == "all_reduce" else (n - 1, share)


class Transfers:
    """Seconds of the backend's collectives between devices like `device` (the GPU `processor`), by the rows of `table` where it has the rank count.

    Neighbours in a group are `stride` ranks apart.
    """

    def __init__(self, device: str, table: Iterable[CollectiveTime] = (), stride: int = 1, processor: str = "") -> None:
        self._device, self._stride, self._processor = device, stride, processor
        self._kind = "cuda" if device.startswith("cuda") else "cpu"
        self._table: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for row in table:
            if row.algorithm == "backend":
                self._table.setdefault((row.op, row.ranks), []).append((row.num_bytes, row.seconds))
        for points in self._table.values():
            points.sort()
        self.assumed: set[str] = set()
        """What was asked for and is not in the table."""

    def seconds(self, op: str, ranks: int, num_bytes: float, apart: int = 1) -> float:
        """Seconds of `op` ('all_reduce', 'reduce_scatter', 'all_gather', 'all_to_all') of a tensor of `num_bytes`; 0 on one rank.

        Neighbours in the group are `apart` strides apart.

        Between two sizes of the table linear; beyond the largest its rate; below the smallest its seconds.
        """
        if ranks == 1:
            return 0.0
        together = _links(self._processor)[2]
        far = self._kind == "cuda" and ranks * apart * self._stride > together
        points = None if far else self._table.get((op, ranks))  # it was measured on one machine
        if not points:
            self.assumed.add(f"{op} on {ranks} ranks")
            _, moved = messages_and_bytes(op, "ring", ranks, num_bytes)
            rate = link_bytes_per_s(self._device, ranks * apart * self._stride, self._processor)
            return MESSAGE_S[self._kind] + moved / rate
        sizes = [size for size, _ in points]
        if num_bytes >= sizes[-1]:
            return points[-1][1] * num_bytes / sizes[-1]
        place = bisect_right(sizes, num_bytes)
        if place == 0:
            return points[0][1]
        (size, before), (larger, after) = points[place - 1 : place + 1]
        return before + (num_bytes - size) / (larger - size) * (after - before)

    def knows(self, ops: Iterable[str], ranks: int) -> bool:
        """Whether all of `ops` between neighbours were measured on so many ranks."""
        return all((op, ranks) in self._table for op in ops)

    @property
    def said(self) -> str:
        """Where the seconds are from, for a formula."""
        if not self.assumed:
            return "measured by hone calibrate"
        return "link rates are not calibrated"


def slowing(machine: Machine) -> float:
    """Of transfers that pass beside products, the part of their seconds by which these take longer, measured or assumed."""
    measured = None if machine.calibration is None else machine.calibration.beside
    return BESIDE if measured is None else measured


def beside_seconds(machine: Machine, computed: float, moved: float, waits: float) -> tuple[float, str]:
    """Seconds of a step on a GPU that computes for `computed` and moves for `moved`, `waits` of them beside nothing; and what a
    formula says of it. Those that pass beside work slow it (`Calibration.beside`)."""
    measured, waits = machine.calibration is not None and machine.calibration.beside is not None, min(waits, moved)
    slowed = slowing(machine) * min(moved - waits, computed)
    said = f", {waits:.3g} s beside nothing, products {slowed:.3g} s longer"
    said += "" if measured else f" (assumed {BESIDE:.0%} of the transfers)"
    return max(computed + slowed, moved - waits) + waits, said
