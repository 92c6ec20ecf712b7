"""The figures of a finished training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hone.base.artifact import Draft
from hone.base.durable import read_jsonl
from hone.base.table import Technique
from hone.measure.window import Window
from hone.model.config import ModelConfig
from hone.model.folder import weights_bytes
from hone.train.mask import sparsity
from hone.train.watch import Watch
from hone.train.work import CHECKPOINTS, TrainPlan

if TYPE_CHECKING:
    from torch import Tensor


def record(
    draft: Draft,
    watch: Watch,
    config: ModelConfig,
    window: Window,
    *,
    objective: str,
    num_tokens: int,
    tokens_before: int,
    seq_len: int,
    sequences: int,
    best_step: int | None,
) -> None:
    """Records the figures of the model in `draft`, from the logs of its steps and what `window` measured.

    `objective` is the kind of loss, `num_tokens` those of the data, `tokens_before` those that its steps.jsonl counts and an
    earlier training read, `seq_len` and `sequences` the size of an evaluation, `best_step` that of a model that is not the last.
    """
    rows = read_jsonl(draft.folder / "steps.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    tail = losses[-10:]
    draft.record("num_params", config.num_params, "parameters")
    draft.record("model_bytes", weights_bytes(draft.folder), "B")
    tokens = [row["tokens"] for row in rows if "tokens" in row][-1] - tokens_before
    draft.record("train_tokens", tokens, "tokens", note=f"{tokens / max(num_tokens, 1):.2f} epochs")
    note = f"mean of the last {len(tail)} steps" + ("" if objective == "next_token" else f", objective {objective}")
    draft.record("final_loss", sum(tail) / len(tail), "nats/token", n=len(tail), note=note)
    last = next((row for row in reversed(rows) if "val_loss" in row and best_step in (None, row["step"])), None)
    where = f"first {sequences} sequences of val" if sequences else "all of val"
    where += f", {seq_len} tokens each, documents apart"
    draft.record("val_loss", last and last["val_loss"], "nats/token", note=where if last else "val is empty")
    note = f"{where}; tokens per byte of the whole split" if last else "val is empty"
    draft.record("val_bits_per_byte", last and last["val_bits_per_byte"], "bits/byte", note=note)
    rate = watch.tokens_per_s()
    mfu = watch.mfu(rate) if rate else None
    note = "6 a weight, head included, plus causal-halved attention; peak as calibrated"
    draft.record("tokens_per_s", rate, "tokens/s", n=max(len(watch.rates), 1), note="evaluation left out")
    draft.record("mfu", mfu, "fraction", note=note if mfu else "no calibrated peak")
    joules = window.energy_j and window.energy_j / max(sum(tokens for tokens, _ in watch.rates), 1)
    draft.record("joules_per_token", joules, "J/token", note="" if joules else window.energy_note)


def record_how(
    draft: Draft,
    plan: TrainPlan,
    techniques: Mapping[str, Technique],
    *,
    steps: int,
    said: str,
    ranks: tuple[int, str],
    zeros: Mapping[str, Tensor],
    largest_bytes: int,
) -> None:
    """Records what was done: `techniques` by slot, the `steps` with what is `said` of them, `ranks` (number, in words),
    the `zeros` of a mask, the bytes of checkpoints, and where it started."""
    for slot, technique in techniques.items():
        if technique.kind != "none":
            draft.did({"slot": slot, **technique.model_dump(mode="json")})
    if plan.start.step:
        said = f"{plan.start.step} of them by {plan.start.where}" + (f"; {said}" if said else "")
    draft.record("num_steps", steps, "steps", note=said)
    number, how = ranks
    if number > 1:
        note = f"{how}; time is of all, memory and energy are of rank 0's device"
        draft.record("num_ranks", number, "processes", note=note)
    if zeros:
        note = "zeros in the layers' linears, fixed by the mask"
        draft.record("sparsity", sparsity(zeros), "fraction", note=note)
    if CHECKPOINTS in plan.estimates:
        draft.record(CHECKPOINTS, largest_bytes, "B", note="on disk at once; gone at the end")
    if plan.start.notes:
        read = sum(plan.start.at.sources.values())
        draft.record("data_position", read, "sequences", note="; ".join(plan.start.notes))
