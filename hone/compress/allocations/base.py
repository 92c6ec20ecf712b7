"""Base of the bit allocations: a budget, candidate bits, and the choice among them.

Shapes: N rows, K columns of a matrix, H [K, K] mean of x x^T of its inputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from hone.base.durable import write_atomic
from hone.base.errors import FitError, SpecError
from hone.base.figure import Estimate, human_bytes
from hone.base.table import Technique
from hone.cost.work import Work
from hone.solvers.knapsack import choose, smallest
from hone.solvers.pairwise.problem import Pairwise

if TYPE_CHECKING:
    from hone.base.artifact import Draft
    from hone.base.run import Run
    from hone.compress.capture import Flow
    from hone.compress.engine.job import Job
    from hone.compress.quantizers.base import Quantizer

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
HEAD_TOKENS = 512
"""Tokens whose logits are computed at once."""
FILE = "allocation.json"
SENSITIVITIES = "sensitivities.json"
"""In a compressed folder: what each matrix loses and takes with each of the allocation's bits."""

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def read_bytes(value: str) -> int:
    """Bytes of '6GB', '5.5 GiB' or '800000000'. Raises ValueError for anything else."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
    if found is None or found[2].upper().rstrip("B") not in {unit.rstrip("B") for unit in UNITS}:
        raise ValueError(f"'{value}' is no size: write a number and KB, MB, GB, KiB, MiB or GiB, as in 6GB")
    unit = found[2].upper()
    return round(float(found[1]) * UNITS[unit if unit in UNITS else f"{unit}B"])


def read_seconds(value: str) -> float:
    """Seconds of '8ms', '0.01s' or '500us'. Raises ValueError for anything else."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|ms|us)\s*", value)
    if found is None:
        raise ValueError(f"'{value}' is no time: write a number and s, ms or us, as in 8ms")
    return float(found[1]) * SECONDS[found[2]]


HEADER_BYTES = 512
"""Bytes of a shard's header that another choice of bits may add: shapes and offsets are numbers of other lengths."""


class Candidates(NamedTuple):
    """A matrix to choose bits for: its name, the bytes it takes with each of the allocation's bits, and its number of weights."""

    name: str
    sizes: tuple[int, ...]
    weights: int = 0


class Budget(NamedTuple):
    """What an allocation chooses from: the matrices, the bytes they may take together, and those of everything else."""

    matrices: tuple[Candidates, ...]
    most: int
    outside: int

    @property
    def model_bytes(self) -> int:
        """Bytes of the folder's weights if the budget is used up."""
        return self.outside + min(self.most, sum(max(one.sizes) for one in self.matrices))


PairLosses = dict[tuple[str, str], list[list[float]]]
"""By two names in the order of the budget's matrices."""


class Allocated(NamedTuple):
    """Bits of every matrix by name, and the sum of their losses."""

    bits: dict[str, int]
    loss: float


class Allocation(Technique):
    """Gives each matrix one of the candidate bits; a subclass writes `losses`."""

    needs: ClassVar[frozenset[str]] = frozenset({"hessian"})

    bits: tuple[int, ...] = Field((2, 3, 4, 5, 6, 8), description="Candidate bits of a matrix.")
    bits_per_weight: float | None = Field(
        None, gt=0, description="Budget: mean bits of the compressed matrices, scales included."
    )
    model_bytes: str | None = Field(
        None, description="Budget: bytes of all weights of the folder, as in 6GB or 5.5GiB; or give bits_per_weight."
    )
    max_kl: float | None = Field(
        None,
        gt=0,
        description="Divergence in nats a token that is predicted at most: the fewest bytes within it, in place of all of a budget.",
    )
    num_sequences: int = Field(32, gt=0, description="Calibration sequences that the losses are measured on.")

    most_share: ClassVar[float | None] = None
    """Largest divergence that was measured, over the sum of losses; None: the losses predict no divergence."""

    @field_validator("bits")
    @classmethod
    def _candidates(cls, bits: tuple[int, ...]) -> tuple[int, ...]:
        if not bits or any(not 2 <= one <= 8 for one in bits):
            raise ValueError("candidate bits are from 2 to 8")
        return tuple(sorted(set(bits)))

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if self.bits_per_weight is not None and self.model_bytes is not None:
            raise ValueError("give one budget: bits_per_weight or model_bytes, not both")
        if self.model_bytes is not None:
            read_bytes(self.model_bytes)
        return self

    def check(self, quantizer: Quantizer | None) -> None:
        """Raises SpecError without a budget, or without a quantizer that has bits to choose."""
        candidates(quantizer, self.bits)
        if getattr(quantizer, "rules", ()):
            raise SpecError(
                f"allocation {self.kind} chooses the bits of every matrix that is quantized, and rules of {quantizer.kind} give them",
                fix="use one of the two: rules, or the allocation, with the matrices of other bits left out by ignore",
            )
        if self.max_kl is not None and self.most_share is None:
            raise SpecError(
                f"allocation {self.kind} predicts no divergence, which max_kl={self.max_kl} limits",
                fix="use the allocation kl or hessian, or give bits_per_weight or model_bytes alone",
            )
        if self.bits_per_weight is None and self.model_bytes is None and self.max_kl is None:
            raise SpecError(
                f"allocation {self.kind} has no budget", fix="set bits_per_weight=3.5, model_bytes=6GB or max_kl=0.05"
            )

    def probes(self, num_matrices: int) -> int:
        """Sequences that the whole model, held in memory, computes to measure so many matrices; 0: none."""
        return 0

    @property
    def differentiated(self) -> int:
        """Sequences on which the whole model, held in memory, is differentiated, one at a time; 0: none."""
        return 0

    def losses(self, job: Job, flow: Flow, run: Run) -> dict[str, dict[int, float]]:
        """The loss of every matrix with each of `bits`, by its name; only sums of them are compared."""
        raise NotImplementedError

    def predicted(self, loss: float) -> Estimate | None:
        """The divergence from the given model in nats a token that a sum of losses predicts; None where none is known."""
        return None

    def work(self, rows: int, columns: int) -> Work:
        """Measuring one matrix: for each candidate its rounding and a product with H."""
        tries = len(self.bits)
        return Work(flops=2.0 * tries * rows * columns**2, num_bytes=60.0 * tries * rows * columns, num_ops=20 * tries)

    def budget(self, matrices: Sequence[Candidates], weights: int, lowest_bytes: int, where: str) -> Budget:
        """The budget of `matrices` with `weights` weights, when the folder's shards take `lowest_bytes` with the lowest bits.

        Raises FitError when even the lowest bits exceed it.
        """
        least = sum(min(one.sizes) for one in matrices)
        outside = lowest_bytes - least + HEADER_BYTES * len({one.name.split(".")[1] for one in matrices})
        if self.bits_per_weight is not None:
            most, name = int(self.bits_per_weight * weights / 8), "bits_per_weight"
        elif self.model_bytes is None:
            most, name = sum(max(one.sizes) for one in matrices), "max_kl"
        else:
            most, name = read_bytes(str(self.model_bytes)) - outside, "model_bytes"
        if least > most:
            raise FitError(
                f"{where}: {min(self.bits)} bits a weight take {human_bytes(least)}, beside {human_bytes(outside)} that stay as "
                f"they are; the budget leaves {human_bytes(max(most, 0))} for them",
                fix=f"raise {name}, allow fewer bits, a larger group_size, or rest_dtype=bfloat16 for a float32 embedding",
            )
        return Budget(tuple(matrices), most, outside)

    def allocate(self, budget: Budget, job: Job, flow: Flow, draft: Draft, run: Run) -> Allocated:
        """The bits of every matrix; measured once, then read from the draft's state."""
        path = draft.state / FILE
        kept = run.mesh.from_leader(lambda: json.loads(path.read_text(encoding="utf8")) if path.exists() else None)
        if kept is not None:
            return Allocated(**kept)
        losses = self.losses(job, flow, run)
        pairs = self.pairs(losses, job, flow, run)
        return run.mesh.from_leader(lambda: self._choose(budget, losses, pairs, path, draft.folder, run))

    def pairs(self, losses: dict[str, dict[int, float]], job: Job, flow: Flow, run: Run) -> PairLosses:
        """What two matrices lose together beyond the sum of their losses, by their names, a row for each of the first one's bits."""
        return {}

    def picked(self, problem: Pairwise, run: Run) -> list[int] | None:
        """The place of an option for each matrix, within the budget; None where nothing fits."""
        return choose(problem.sizes, problem.losses, problem.budget)

    def _smallest(self, problem: Pairwise) -> list[int]:
        """The fewest bytes of which no more than `max_kl` is predicted. Raises FitError where that is more than the budget."""
        assert self.max_kl is not None and self.most_share is not None, "checked by the spec"
        most = self.max_kl / self.most_share
        picked = smallest(problem.sizes, problem.losses, most)
        if picked is None:
            least = self.most_share * sum(map(min, problem.losses))
            raise FitError(
                f"no choice of {', '.join(map(str, self.bits))} bits is predicted to lose at most {self.max_kl:g} nats a token: "
                f"the most bits lose up to {least:.3g}",
                fix="raise max_kl, allow more bits, smaller groups, or leave sensitive matrices out by ignore",
            )
        size = problem.size(picked)
        if size > problem.budget:
            raise FitError(
                f"matrices that lose at most {self.max_kl:g} nats a token take {human_bytes(size)}, more than the "
                f"{human_bytes(problem.budget)} that the budget leaves them",
                fix="raise max_kl or the budget",
            )
        return picked

    def _choose(
        self,
        budget: Budget,
        losses: dict[str, dict[int, float]],
        pairs: PairLosses,
        path: Path,
        folder: Path,
        run: Run,
    ) -> Allocated:
        """The bits of least loss within the budget, kept at `path`; what was measured for them is written to `folder`."""
        table = [[losses[one.name][bits] for bits in self.bits] for one in budget.matrices]
        places = {one.name: place for place, one in enumerate(budget.matrices)}
        both = {(places[one], places[other]): np.array(values) for (one, other), values in pairs.items()}
        problem = Pairwise([one.sizes for one in budget.matrices], table, both, budget.most)
        picked = self.picked(problem, run) if self.max_kl is None else self._smallest(problem)
        assert picked is not None, "a budget below the smallest size is refused by the plan"
        found = {one.name: self.bits[option] for one, option in zip(budget.matrices, picked, strict=True)}
        allocated = Allocated(found, problem.loss(picked))
        if self.most_share is not None:
            rows = {
                one.name: {"weights": one.weights, "bytes": one.sizes, "losses": values}
                for one, values in zip(budget.matrices, table, strict=True)
            }
            kept = {"allocation": self.model_dump(mode="json"), "loss": allocated.loss, "matrices": rows}
            write_atomic(folder / SENSITIVITIES, json.dumps(kept).encode())
        write_atomic(path, json.dumps(allocated._asdict()).encode())
        return allocated


def candidates(template: Quantizer | None, bits: Sequence[int]) -> dict[int, Quantizer]:
    """The quantizer with each of `bits`. Raises SpecError when there is none, or none that has bits to choose."""
    if template is None or "bits" not in type(template).model_fields:
        named = "no step quantizes" if template is None else f"{template.kind} has one width"
        raise SpecError(f"an allocation chooses bits, but {named}", fix="add a step that has bits: rtn or gptq")
    return {one: template.model_copy(update={"bits": one}) for one in bits}
