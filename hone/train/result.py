"""A finished training: its model in the dtype to save, with what rounding loses, and its figures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hone.base.artifact import Draft
from hone.base.durable import read_jsonl
from hone.base.table import Technique
from hone.cost.train.training import CHECKPOINTS
from hone.measure.window import Window
from hone.model.config import ModelConfig
from hone.train import OBJECTIVES
from hone.train.continuation.plan import TrainPlan
from hone.train.mask import sparsity
from hone.train.precision import TORCH_NAMES, Precision
from hone.train.watch import Watch

if TYPE_CHECKING:
    from torch import Tensor

    from hone.train.loop import Trainer


class Rounding(NamedTuple):
    """What saving the masters in `dtype` changed: `error` is the norm of the change divided by that of the weights."""

    dtype: str
    computed: str
    """The dtype with which the model was trained and evaluated."""
    error: float

    @property
    def note(self) -> str:
        """For the figure of the model's bytes."""
        said = f"saved in {self.dtype}"
        if self.dtype != "float32":
            said += ", rounded from float32 masters, which are not kept; checkpoint.export_dtype: float32 saves them"
        return said if self.dtype == self.computed else f"{said}; losses are those of the weights in {self.computed}"


def rounding_of(trainer: Trainer, precision: Precision, dtype: str) -> Rounding:
    """What is rounded where the masters of all ranks, which all call it, are saved in `dtype`."""
    error = _error(trainer, getattr(torch, dtype)) if dtype != "float32" else 0.0
    return Rounding(dtype, TORCH_NAMES[precision], error)


def _error(trainer: Trainer, dtype: Any) -> float:
    """The norm of what `dtype` takes from the masters of all ranks, relative to theirs."""
    weights, sums = trainer.update.weights, torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for name, master in weights.masters.items():
            if weights.holds(name):
                lost = master.detach() - master.detach().to(dtype).float()
                sums += torch.stack([one.double().square().sum() for one in (lost, master.detach())]).cpu()
    with trainer.ranks.mesh.transfers():
        lost, whole = trainer.ranks.mesh.sum(sums).tolist()
    return (lost / whole) ** 0.5 if whole else 0.0


_JUDGED = {"val_accuracy": "fraction", "val_margin": "nats"}
"""Units of what an objective on answers is evaluated by beside its loss: the share of pairs in which the chosen answer has the higher reward
(of labelled answers that with a reward on their label's side), and by how much."""


def record(
    draft: Draft,
    watch: Watch,
    config: ModelConfig,
    window: Window,
    *,
    objective: str,
    tokens_before: int,
    step_positions: int,
    seq_len: int,
    sequences: int,
    rounding: Rounding,
    best_step: int | None,
    paused_j: float = 0.0,
    heads: int | None = None,
) -> None:
    """Records the figures of the model in `draft`, from the logs of its steps and what `window` measured.

    `objective` is the kind of loss, `tokens_before` those that its steps.jsonl counts and an earlier training read,
    `step_positions` those that a step computes, padding included, `seq_len` and `sequences` the size of an evaluation,
    `rounding` what the saved weights lost, `best_step` that of a model that is not the last, `paused_j` what devices took in pauses,
    `heads` the parameters of draft heads, where these alone are trained and saved.
    """
    rows = read_jsonl(draft.folder / "steps.jsonl")
    steps = [row for row in rows if "loss" in row]
    tail = [row["loss"] for row in steps[-10:] if row["loss"] is not None] or [math.nan]
    note = "" if heads is None else f"of the draft heads; the {config.num_params:,} of their model are frozen"
    draft.record("num_params", heads or config.num_params, "parameters", note=note)
    if config.adapters:
        note = f"{config.trained_params / config.num_params:.3%} of all; the others are frozen"
        draft.record("trained_params", config.trained_params, "parameters", note=note)
    size = sum(path.stat().st_size for path in draft.folder.glob("*.safetensors"))
    draft.record("model_bytes", size, "B", note=rounding.note)
    if rounding.dtype != "float32":
        note = f"norm of what {rounding.dtype} takes from the float32 masters, relative to theirs"
        draft.record("rounding_error", rounding.error, "fraction", note=note)
    tokens = steps[-1]["tokens"] - tokens_before
    positions = sum(row.get("positions", step_positions) for row in steps)
    draft.record("train_tokens", tokens, "tokens", note=f"of {positions} positions computed; the others are padding")
    _record_skipped(draft, steps, tokens_before)
    _record_rewinds(draft, [row["rewound"] for row in rows if "rewound" in row])
    draft.record("padding", 1 - tokens / positions, "fraction", note="of the positions computed")
    note = f"mean of the last {len(tail)} steps" + ("" if objective == "next_token" else f", objective {objective}")
    unit = OBJECTIVES[objective].unit
    draft.record("final_loss", sum(tail) / len(tail), unit, n=len(tail), note=note)
    last = next((row for row in reversed(rows) if "val_loss" in row and best_step in (None, row["step"])), None)
    where = f"first {sequences} sequences of val" if sequences else "all of val"
    where += f", {seq_len} tokens each, documents apart"
    scores = OBJECTIVES[objective].scores_text
    draft.record(
        "val_loss", last and last["val_loss"], unit if scores else "nats/token", note=where if last else "val is empty"
    )
    note = f"{where}; tokens per byte of the whole split" if last else "val is empty"
    if not scores:
        draft.record("val_bits_per_byte", last and last["val_bits_per_byte"], "bits/byte", note=note)
    for name in ("val_preference_loss", "val_accuracy", "val_margin"):
        if last is not None and name in last:
            pairs = "val_pairs" in last
            count, noun = (
                last["val_pairs" if pairs else "val_answers"],
                "pairs of answers" if pairs else "labelled answers",
            )
            draft.record(name, last[name], _JUDGED.get(name, unit), n=int(count), note=f"{noun}, {where}")
    if last is not None and "val_heads_loss" in last:
        draft.record(
            "val_heads_loss", last["val_heads_loss"], "nats/token", note=f"of the draft heads' objective, {where}"
        )
    _record_rewards(draft, steps)
    rate, steps_per_s = watch.rate()
    mfu = watch.mfu(steps_per_s) if rate else None
    note = "of all positions computed, padding included: 6 a weight (4 if it is frozen), head included, plus causal-halved attention; peak as calibrated"
    draft.record(
        "tokens_per_s", rate, "tokens/s", n=max(len(watch.rates), 1), note="without padding; evaluation left out"
    )
    kind = OBJECTIVES[objective]
    none = "not known of draft heads" if kind.trains_heads else "not known of steps that write their own text"
    none = none if kind.trains_heads or kind.writes else "no calibrated peak"
    draft.record("mfu", mfu, "fraction", note=note if mfu else none)
    joules = window.energy_j and (window.energy_j - paused_j) / max(sum(tokens for tokens, _ in watch.rates), 1)
    draft.record("joules_per_token", joules, "J/token", note="" if joules else window.energy_note)


def _record_rewards(draft: Draft, steps: Sequence[dict[str, Any]]) -> None:
    """Records what the answers of the first and the last steps were worth, where the model was trained on its own."""
    found = [row["reward"] for row in steps if "reward" in row]
    for name, some in (("first_reward", found[:10]), ("final_reward", found[-10:])):
        if some:
            note = f"mean of the {'first' if name == 'first_reward' else 'last'} {len(some)} steps' answers"
            draft.record(name, sum(some) / len(some), "reward", n=len(some), note=note)


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
    if plan.pipeline and plan.pipeline[1]:
        (draft.log / "pipeline.json").write_text(json.dumps(plan.pipeline[1]), encoding="utf8")
    if plan.start.notes:
        read = sum(plan.start.at.sources.values())
        draft.record("data_position", read, "sequences", note="; ".join(plan.start.notes))


_NAMED = 20
"""Most skipped steps that a note names."""


def _record_skipped(draft: Draft, steps: Sequence[dict[str, Any]], tokens_before: int) -> None:
    """Records how many steps changed no weight, if any, and which: their batches were read, and not learned from."""
    skipped = [place for place, row in enumerate(steps) if row.get("skipped")]
    if not skipped:
        return
    tokens = sum(steps[place]["tokens"] - (steps[place - 1]["tokens"] if place else tokens_before) for place in skipped)
    named = ", ".join(str(steps[place]["step"]) for place in skipped[:_NAMED])
    more = f" and {len(skipped) - _NAMED} more" if len(skipped) > _NAMED else ""
    spikes = sum("why" in steps[place] for place in skipped)
    why = f"spikes {spikes}, overflows of fp16 {len(skipped) - spikes}"
    note = f"steps {named}{more}; {why}; {tokens} tokens; reasons in steps.jsonl"
    draft.record("skipped_steps", len(skipped), "steps", note=note)


def _record_rewinds(draft: Draft, rewinds: Sequence[dict[str, Any]]) -> None:
    """Records how often the training went back from a spike, if it did, and which batches were left out."""
    if not rewinds:
        return
    said = [
        f"from {one['from']} to {one['to']} (batches {one['first_left_out']} to {one['last_left_out']} left out)"
        for one in rewinds[:_NAMED]
    ]
    more = f" and {len(rewinds) - _NAMED} more" if len(rewinds) > _NAMED else ""
    draft.record("rewinds", len(rewinds), "times", note=f"{', '.join(said)}{more}; reasons in steps.jsonl")
