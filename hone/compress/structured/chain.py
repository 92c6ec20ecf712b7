"""The structured pruners of a stage, in order: each measures the model that the one before it leaves, and is done once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.base.durable import write_atomic
from hone.base.lazy import lazy
from hone.base.run import Run
from hone.compress.structured.base import StructuredPruner
from hone.cost.compress import Compression, Passes

if TYPE_CHECKING:
    from hone.base.artifact import Draft
    from hone.compress.capture import Flow
    from hone.model.config import ModelConfig
    from hone.model.weights.model import ModelSource

cuts = lazy("hone.compress.structured.cut")


def shrink(config: ModelConfig, steps: Iterable[StructuredPruner]) -> ModelConfig:
    """The config after all `steps`. Raises SpecError for one that cannot make such a model."""
    for step in steps:
        config = step.shrink(config)
    return config


def measured(
    config: ModelConfig, steps: Iterable[StructuredPruner], num_sequences: int, seq_len: int, **options: Any
) -> tuple[tuple[Compression, Passes], ...]:
    """The passes that measure importances, each with the model on which it runs; `options` are `Compression`'s."""
    found = []
    for step in steps:
        passes = step.passes(config)
        if passes is not None:
            layers = ((),) * config.num_layers
            sequences = {"num_sequences": num_sequences, "seq_len": seq_len}
            found.append((Compression(config.facts(), layers, (), **sequences, **options), passes))
        config = step.shrink(config)
    return tuple(found)


def cut(
    checkpoint: ModelSource, steps: Iterable[StructuredPruner], flow: Flow | None, draft: Draft, run: Run
) -> tuple[ModelSource, list[dict[str, Any]]]:
    """The checkpoint that `steps` leave of `checkpoint`, and what each says of itself.

    What stays is durable as soon as a step has measured it: an interrupted stage measures it again only when it was killed
    while it did, because going back to the middle of a pass would take the pass itself.
    """
    said = []
    for number, step in enumerate(steps):
        path = draft.state / f"cut-{number}.json"
        entry = run.mesh.from_leader(partial(_kept, path))
        if entry is None:
            made, words = step.choose(checkpoint, flow if step.passes(checkpoint.config) else None, run)
            entry = {"cut": made.to_json(), "said": words}
            if run.mesh.leads:
                write_atomic(path, json.dumps(entry).encode())
                draft.keep_time()
        checkpoint = cuts.cut_model(checkpoint, cuts.Cut.of_json(entry["cut"]))
        said.append(entry["said"])
    return checkpoint, said


def _kept(path: Path) -> dict[str, Any] | None:
    """What an interrupted run kept at `path`."""
    return json.loads(path.read_text(encoding="utf8")) if path.exists() else None
