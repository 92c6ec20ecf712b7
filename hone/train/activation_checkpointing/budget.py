"""Memory-budgeted recomputation: the fastest of all techniques that fits, chosen when the training is planned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from hone.base.errors import FitError
from hone.base.figure import human_bytes
from hone.train.activation_checkpointing.base import ActivationCheckpointing, Segments, Sizes, said
from hone.train.activation_checkpointing.offload import Offload
from hone.train.activation_checkpointing.optimal import Optimal
from hone.train.activation_checkpointing.selective import Selective
from hone.train.activation_checkpointing.uniform import EveryNth, Full, KeepAll, SquareRoot


class MemoryBudget(ActivationCheckpointing):
    """The fastest of none, every_nth, sqrt, full, selective, optimal and offload that fits given bytes or the device's free memory. Beaumont et al. 2019, arXiv:1911.13214."""

    paper: ClassVar[str] = "arXiv:1911.13214"
    memory_bytes: float | None = Field(
        None, gt=0, description="Bytes that the whole training may add to the device's memory; empty: what is free."
    )
    selective: bool = Field(True, description="Whether recomputation by operation may be chosen.")

    def segments(self, num_layers: int, sizes: Sizes | None = None) -> Segments:
        """Those of the fastest candidate that fits. Raises FitError where none fits `memory_bytes`."""
        return self._chosen(num_layers, self.needed(sizes))[1]

    def notes(self, num_layers: int, sizes: Sizes) -> tuple[str, ...]:
        """The choice, and every candidate with its bytes and seconds."""
        name = self._chosen(num_layers, sizes)[0]
        lines = [f"activation_checkpointing {self.kind}: {name} for {human_bytes(self._budget(sizes))}"]
        for other, segments in self._candidates(num_layers, sizes):
            fits = "" if sizes.growth(segments) <= self._budget(sizes) else ", does not fit"
            lines.append(f"  {other}: {said(segments, sizes)}{fits}")
        return tuple(lines)

    def check(self, *, compile: bool, stages: int) -> None:
        """A compiled layer cannot be recomputed selectively."""
        super().check(compile=compile, stages=stages)
        if compile and self.selective:
            raise ValueError(f"compile does not work with activation_checkpointing {self.kind} and selective: true")

    def _budget(self, sizes: Sizes) -> float:
        return sizes.free_bytes if self.memory_bytes is None else self.memory_bytes

    def _chosen(self, num_layers: int, sizes: Sizes) -> tuple[str, Segments]:
        candidates = list(self._candidates(num_layers, sizes))
        fitting = [one for one in candidates if sizes.growth(one[1]) <= self._budget(sizes)]
        if fitting:
            return min(fitting, key=lambda one: sizes.seconds(one[1]))
        least = min(candidates, key=lambda one: sizes.growth(one[1]))
        if self.memory_bytes is None:
            return least  # the plan says that it does not fit
        raise FitError(
            f"activation_checkpointing.memory_bytes {self.memory_bytes:.4g} is {human_bytes(self.memory_bytes)}; the least "
            f"this training can do with is {human_bytes(sizes.growth(least[1]))} ({least[0]})",
            fix=sizes.ways(least[1], self.memory_bytes),
        )

    def _candidates(self, num_layers: int, sizes: Sizes) -> Iterator[tuple[str, Segments]]:
        """Every technique's segments, the simplest first: of equally fast ones the first is taken."""
        techniques: list[tuple[str, ActivationCheckpointing]] = [("none", KeepAll())]
        techniques += [(f"every_nth n={n}", EveryNth(n=n)) for n in (8, 4, 3, 2) if n < num_layers]
        techniques += [("sqrt", SquareRoot()), ("full", Full())]
        if self.selective:
            techniques.append(("selective", Selective()))
        techniques.append(("optimal", Optimal(selective=self.selective)))
        if sizes.elsewhere:
            techniques.append(("offload", Offload()))
        for name, one in techniques:
            if isinstance(one, Optimal) and self.memory_bytes is not None:
                try:
                    found = one.model_copy(update={"memory_bytes": self.memory_bytes}).segments(num_layers, sizes)
                except FitError:
                    continue  # said of all candidates together
            else:
                found = one.segments(num_layers, sizes)
            yield name, found
