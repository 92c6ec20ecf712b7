"""The steps of the phase "model", in order: each measures the model that the one before it leaves, and is done once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hone.base.run import Run
from hone.compress.step import ModelStep, Targets
from hone.cost.compress.compression import Compression, Passes

if TYPE_CHECKING:
    from hone.base.artifact import Draft
    from hone.compress.capture import Flow
    from hone.model.config import ModelConfig
    from hone.model.weights.model import ModelSource


def reshape(config: ModelConfig, steps: Iterable[ModelStep]) -> ModelConfig:
    """The config after all `steps`. Raises SpecError for one that cannot make such a model."""
    for step in steps:
        config = step.reshape(config)
    return config


def rewrite(
    checkpoint: ModelSource, steps: Iterable[ModelStep], flow: Flow | None, targets: Targets, draft: Draft, run: Run
) -> tuple[ModelSource, list[dict[str, Any]]]:
    """The checkpoint that `steps` leave of `checkpoint`, and what each says of itself."""
    said = []
    for number, step in enumerate(steps):
        state = draft.state / f"cut-{number}.json"
        known = state.exists()
        checkpoint, words = step.rewrite(checkpoint, flow, targets, state, run)
        if run.mesh.leads and state.exists() and not known:
            draft.keep_time()
        said.append(words)
    return checkpoint, said


def measured(
    config: ModelConfig, steps: Iterable[ModelStep], num_sequences: int, seq_len: int, **options: Any
) -> tuple[tuple[Compression, Passes], ...]:
    """The passes that measure importances, each with the model on which it runs; `options` are `Compression`'s."""
    found = []
    for step in steps:
        passes = step.passes(config)
        if passes is not None:
            layers = ((),) * config.num_layers
            sequences = {"num_sequences": num_sequences, "seq_len": seq_len}
            found.append((Compression(config.dims(), layers, (), **sequences, **options), passes))
        config = step.reshape(config)
    return tuple(found)
