"""Quality before anything is made: a scaling law's loss with the spread of its published fits; of compressions what was measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.cost.scaling.laws import LAWS

MEASURES = ("kl_to_dense", "kl_to_reference", "loss_increase")
"""Figures of an artifact that say how many nats a token a compression costs, the first that is there."""


class Known(NamedTuple):
    """A quality in nats a token, with half of its interval; `how`: where it is from."""

    value: float
    half: float
    how: str


def trained_loss(num_params: float, tokens: float) -> Known:
    """The loss of `num_params` active parameters after `tokens`: the mean of the published fits (`LAWS`), and half of what lies between them.

    Modelled: of web text in the vocabulary of those papers, with a schedule that ends at `tokens`.
    """
    found = [law.loss(num_params, tokens) for law in LAWS.values()]
    return Known(
        statistics.mean(found),
        (max(found) - min(found)) / 2,
        f"scaling law, {len(LAWS)} published fits of the same runs",
    )


def measured_losses(folders: Iterable[str]) -> dict[str, Known]:
    """What compressions cost in nats a token, by their steps (`key_of`), from the artifacts in `folders`.

    A compression's own `kl_to_dense`, or an evaluation's divergence from its reference with the steps of its model. Raises SpecError for an
    artifact that says neither.
    """
    found: dict[str, Known] = {}
    for folder in folders:
        made = Artifact.read(folder)
        figure = next((made.figures[name] for name in MEASURES if name in made.figures), None)
        spec = _spec(made)
        if figure is None or figure.value is None or spec is None:
            raise SpecError(
                f"{folder} does not say what a compression costs: it has none of the figures {', '.join(MEASURES)}, or is of no "
                "compression",
                fix="give a folder of `hone compress` with calibration inputs, or of `hone eval --from.reference=DENSE`",
            )
        found[key_of(spec["steps"], spec.get("allocation"))] = Known(
            figure.value, figure.interval.half_width if figure.interval else 0.0, f"measured in {folder}"
        )
    return found


def _spec(made: Artifact) -> Mapping[str, Any] | None:
    """The fields of a compression, or of the compression that an evaluation's model came from."""
    if made.kind == "compress":
        return made.manifest["spec"]
    for parent in made.manifest.get("parents", ()):
        if parent.get("role") == "model":
            try:
                return _spec(Artifact.read(parent["path"]))
            except (KeyError, OSError):
                return None
    return None


SAYS = ("kind", "bits", "group_size", "sparsity", "scheme", "uneven", "scale")
"""Fields of a step by which a measured compression is recognized."""


CHOOSES = ("kind", "bits", "bits_per_weight", "model_bytes", "max_kl")
"""Fields of an allocation by which it is."""


def key_of(steps: Iterable[Mapping[str, Any]], allocation: Mapping[str, Any] | None = None) -> str:
    """Equal for the same steps and allocation: their fields that decide the format, in order."""
    said = [{name: step[name] for name in SAYS if name in step} for step in steps]
    if allocation is not None:
        said.append({name: allocation[name] for name in CHOOSES if allocation.get(name) is not None})
    return json.dumps(said, sort_keys=True)
