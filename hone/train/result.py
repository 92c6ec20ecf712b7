"""The figures of a finished training."""

from __future__ import annotations

from hone.base.artifact import Draft
from hone.base.durable import read_jsonl
from hone.measure.window import Window
from hone.model.config import ModelConfig
from hone.model.folder import weights_bytes
from hone.train.watch import Watch


def record(
    draft: Draft,
    watch: Watch,
    config: ModelConfig,
    window: Window,
    *,
    objective: str,
    num_tokens: int,
    seq_len: int,
    sequences: int,
) -> None:
    """Records the figures of the model in `draft`, from the logs of its steps and what `window` measured.

    `objective` is the kind of loss, `num_tokens` those of the data, `seq_len` and `sequences` the size of an evaluation.
    """
    rows = read_jsonl(draft.folder / "steps.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    tail = losses[-10:]
    draft.record("num_params", config.num_params, "parameters")
    draft.record("model_bytes", weights_bytes(draft.folder), "B")
    tokens = [row["tokens"] for row in rows if "tokens" in row][-1]
    draft.record("train_tokens", tokens, "tokens", note=f"{tokens / max(num_tokens, 1):.2f} epochs")
    note = f"mean of the last {len(tail)} steps" + ("" if objective == "next_token" else f", objective {objective}")
    draft.record("final_loss", sum(tail) / len(tail), "nats/token", n=len(tail), note=note)
    last = next((row for row in reversed(rows) if "val_loss" in row), None)
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
