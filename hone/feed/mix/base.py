"""The base of mixtures, which give every source of training text its weight, with the reason, under a cap on epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from hone.base.errors import SpecError
from hone.base.figure import Estimate
from hone.base.table import Technique
from hone.feed.mix.simplex import fill


class Source(NamedTuple):
    """One source of text: its name, its tokens in the training split, and how to read some of its documents.

    `sample(count)` returns that many texts (fewer when there are fewer), always the same ones. `positions` are those of
    one epoch of its sequences, padding included; None: as many as tokens.
    """

    name: str
    tokens: int
    sample: Callable[[int], list[str]] | None = None
    positions: int | None = None

    @property
    def size(self) -> int:
        """Positions of one epoch, in which weights and budgets count: a weight is a share of the sequences."""
        return self.tokens if self.positions is None else self.positions


class Share(NamedTuple):
    """The share of one source. `weight` is its fraction of all sequences, `epochs` how often its text is used.

    `wanted` is the weight before caps; `capped` tells whether the cap on epochs reduced it; `utility` is the method's
    estimate of its use, None for a method that only uses sizes; `reason` explains the weight in words.
    """

    source: str
    tokens: int
    wanted: float
    weight: float
    epochs: float
    capped: bool
    utility: float | None
    reason: str

    def row(self) -> dict[str, Any]:
        """As JSON."""
        return self._asdict()


class Chosen(NamedTuple):
    """The result of a mixture: a share for every source, and `notes` (JSON) on how they were computed."""

    shares: list[Share]
    notes: dict[str, Any]

    @property
    def weights(self) -> dict[str, float]:
        return {share.source: share.weight for share in self.shares}

    def row(self) -> dict[str, Any]:
        """As JSON, the inverse of `read`."""
        return {"shares": [share.row() for share in self.shares], "notes": self.notes}

    @classmethod
    def read(cls, row: dict[str, Any]) -> Chosen:
        """From the JSON of `row`."""
        return cls([Share(**share) for share in row["shares"]], row["notes"])


class Mixture(Technique):
    """Weights for sources. A subclass implements `wants`; the cap on epochs is applied here."""

    max_epochs: float = Field(
        4.0, gt=0, description="Most epochs of any source; up to 4 cost little (arXiv:2305.16264)."
    )

    by: str = Field(
        "group",
        min_length=1,
        description="Column of the documents that names their source, for a single data input.",
    )

    def wants(self, sources: Sequence[Source], budget: float) -> tuple[np.ndarray, list[float | None], list[str]]:
        """(weight, utility, reason) of every source before caps; the weights need not sum to one."""
        raise NotImplementedError

    def weigh(self, sources: Sequence[Source], budget: float) -> Chosen:
        """The share of every source in a training of `budget` positions. Weights sum to 1 and respect every cap.

        Raises SpecError when the caps leave less text than the budget, or a method's table does not match the sources.
        """
        caps = self.caps(sources, budget)
        wanted, utilities, reasons = self.wants(sources, budget)
        if (room := caps[wanted > 0].sum()) < 1 - 1e-9:
            chosen = ", ".join(source.name for source, weight in zip(sources, wanted) if weight > 0)
            raise SpecError(
                f"mixture.max_epochs = {self.max_epochs:g} limits {chosen} to {room:.1%} of the training",
                fix=f"raise max_epochs to at least {more(self.max_epochs / room)}, or train on fewer tokens",
            )
        return Chosen(shares(sources, budget, wanted, fill(wanted, caps), caps, utilities, reasons), {})

    def caps(self, sources: Sequence[Source], budget: float) -> np.ndarray:
        """The largest weight each source may have, float64 [n]. Raises SpecError when they sum to less than one."""
        check_sources(sources)
        tokens = sizes(sources)
        caps = self.max_epochs * tokens / budget
        if caps.sum() < 1 - 1e-12:
            most = budget / tokens.sum()
            raise SpecError(
                f"mixture.max_epochs = {self.max_epochs:g} of {tokens.sum():.0f} positions in {len(sources)} sources "
                f"allows {self.max_epochs * tokens.sum():.0f} positions, but the training takes {budget:.0f}",
                fix=f"raise max_epochs to at least {more(most)}, train on fewer tokens, or give more text",
            )
        return np.minimum(caps, 1.0)

    def files(self) -> dict[str, Path]:
        """Field names and files whose content the weights depend on: part of the identity of the training."""
        return {}

    def estimates(self, shares: Sequence[Share] = ()) -> dict[str, Estimate]:
        """Epochs of each source: its weight x the budget / its size."""
        return {
            f"epochs_{share.source}": Estimate(
                value=share.epochs, unit="epochs", formula="weight x sequences / sequences of the source"
            )
            for share in shares
            if share.weight > 0
        }


def sizes(sources: Sequence[Source]) -> np.ndarray:
    """Positions of an epoch of every source, float64 [n]."""
    return np.array([source.size for source in sources], float)


def more(epochs: float) -> str:
    """A number of epochs as text, rounded up."""
    return f"{math.ceil(epochs * 100) / 100:g}"


def check_sources(sources: Sequence[Source]) -> None:
    """Raises SpecError for no source, a repeated name, or a source without text."""
    names = [source.name for source in sources]
    if not names:
        raise SpecError("a mixture needs at least one source", fix="give the data stage text")
    if len(set(names)) < len(names):
        raise SpecError(f"two sources have the same name, among {', '.join(names)}", fix="give each its own name")
    for source in sources:
        if source.tokens < 2 or not source.size:
            raise SpecError(
                f"source '{source.name}' has {source.tokens} tokens: there is no text to train on",
                fix="leave it out of the data",
            )


def shares(
    sources: Sequence[Source],
    budget: float,
    wanted: np.ndarray,
    weights: np.ndarray,
    caps: np.ndarray,
    utilities: Sequence[float | None],
    reasons: Sequence[str],
) -> list[Share]:
    """The shares of a mixture, one per source; all arrays [n]."""
    total = float(np.sum(wanted))
    weights = weights / weights.sum()
    rows = []
    for index, source in enumerate(sources):
        weight = float(weights[index])
        capped = weight > 0 and weight >= caps[index] * (1 - 1e-6) and caps[index] < 1  # relative: caps may be 1e-9
        reason = reasons[index]
        if capped:
            reason += f"; reduced to the cap of {caps[index] * budget / source.size:g} epochs"
        rows.append(
            Share(
                source.name,
                source.tokens,
                float(wanted[index]) / total,
                weight,
                weight * budget / source.size,
                bool(capped),
                utilities[index],
                reason,
            )
        )
    return rows


def by_source(table: Mapping[str, Any], sources: Sequence[Source], what: str) -> list[Any]:
    """The entries of `table` in the order of `sources`. Raises SpecError unless it names exactly the sources."""
    names = [source.name for source in sources]
    missing = [name for name in names if name not in table]
    extra = [name for name in table if name not in names]
    if missing or extra:
        parts = [f"does not name {', '.join(missing)}"] if missing else []
        parts += [f"names {', '.join(extra)}, which are not in the data"] if extra else []
        raise SpecError(f"{what} {' and '.join(parts)}", fix=f"name exactly the sources: {', '.join(names)}")
    return [table[name] for name in names]
