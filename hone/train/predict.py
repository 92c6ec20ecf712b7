"""What a training should cost, said before it begins: seconds, peak memory, tokens/s, size of the result."""

from __future__ import annotations

from typing import Any, NamedTuple

from hone.base.errors import FitError
from hone.base.figure import Estimate, human_bytes
from hone.cost.facts import ModelFacts
from hone.cost.memory import train_bytes
from hone.cost.steps import forward_seconds, train_step_seconds
from hone.measure.machine import Machine
from hone.ops.loss.api import kernel_rows
from hone.ops.loss.reference import chunk_rows
from hone.train.activation_checkpointing import Segment, live_layers
from hone.train.precision import TORCH_NAMES, Precision


class Plan(NamedTuple):
    """A training in numbers: `batch_rows` rows of `seq_len` a step, cut into `gradient_accumulation_steps` micro-batches."""

    facts: ModelFacts
    steps: int
    batch_rows: int
    seq_len: int
    gradient_accumulation_steps: int
    precision: Precision
    segments: tuple[Segment, ...]
    eval_sequences: int = 0
    """Rows evaluated in all, every evaluation counted."""
    teacher: ModelFacts | None = None
    packed: bool = True
    """Whether rows hold several documents, which costs attention masks."""

    @property
    def step_tokens(self) -> int:
        return self.batch_rows * self.seq_len


def predict(plan: Plan, machine: Machine, start_memory_bytes: int) -> dict[str, Estimate]:
    """Estimates of time_s, tokens_per_s, peak_memory_bytes and model_bytes; `start_memory_bytes` is in use already."""
    step = step_seconds(plan, machine)
    evaluation = 0.0
    if plan.eval_sequences:
        evaluation = _forward(plan.facts, plan, machine, rows=plan.batch_rows) * plan.eval_sequences / plan.batch_rows
    time_s = plan.steps * step.value + evaluation
    growth = growth_bytes(plan, device=machine.device)
    width = 4 if plan.precision == "fp32" else 2
    return {
        "time_s": Estimate(
            value=time_s,
            unit="s",
            formula=f"{plan.steps} steps x {step.value:.3g} s + evaluation {evaluation:.3g} s; step: {step.formula}",
            bound=step.bound,
        ),
        "tokens_per_s": Estimate(
            value=plan.step_tokens / step.value,
            unit="tokens/s",
            formula=f"{plan.step_tokens} tokens / {step.value:.3g} s a step",
            bound=step.bound,
        ),
        "peak_memory_bytes": Estimate(
            value=start_memory_bytes + growth.value,
            unit="B",
            formula=f"in use before {human_bytes(start_memory_bytes)} + {growth.formula}",
            tolerance=0.2,
        ),
        "model_bytes": Estimate(
            value=float(width * plan.facts.num_params),
            unit="B",
            formula=f"{plan.facts.num_params:,} parameters x {width} bytes",
            tolerance=0.02,
        ),
    }


def must_fit(peak: Estimate, machine: Machine) -> None:
    """Raises FitError when the predicted peak is more than the device has."""
    has = machine.ram_bytes
    if machine.device.startswith("cuda"):
        has = machine.gpus[int(machine.device.partition(":")[2] or 0)].memory_bytes
    if peak.value > has:
        raise FitError(
            f"training needs about {human_bytes(peak.value)}, {machine.processor} has {human_bytes(has)} "
            f"({peak.formula})",
            fix="raise gradient_accumulation_steps, set activation_checkpointing: every_nth, or take a smaller model or seq_len",
        )


def step_seconds(plan: Plan, machine: Machine) -> Estimate:
    """Seconds of one optimizer step, the teacher's forward pass included."""
    recomputed = {layer for part in plan.segments if part.recompute for layer in range(part.start, part.stop)}
    step = train_step_seconds(
        plan.facts,
        machine,
        batch_tokens=plan.step_tokens // plan.gradient_accumulation_steps,
        seq_len=plan.seq_len,
        dtype=TORCH_NAMES[plan.precision],
        micro_batches=plan.gradient_accumulation_steps,
        recomputed=recomputed,
    )
    if plan.teacher is None:
        return step
    extra = _forward(plan.teacher, plan, machine, rows=plan.batch_rows)
    return step.model_copy(
        update={"value": step.value + extra, "formula": f"{step.formula} + teacher's forward {extra:.3g} s"}
    )


def growth_bytes(plan: Plan, device: str) -> Estimate:
    """Bytes that the training adds at its peak to what was in memory before."""
    facts = plan.facts
    recomputed = [part for part in plan.segments if part.recompute]
    batch_tokens, on_gpu = plan.step_tokens // plan.gradient_accumulation_steps, device.startswith("cuda")
    growth = train_bytes(
        facts,
        batch_tokens=batch_tokens,
        seq_len=plan.seq_len,
        dtype=TORCH_NAMES[plan.precision],
        accumulate=plan.gradient_accumulation_steps > 1,
        packed=plan.packed,
        kept_layers=live_layers(plan.segments),
        kept_inputs=len(recomputed),
        loss_chunk=kernel_rows(batch_tokens) if on_gpu else chunk_rows("cpu", facts.vocab_size),
        kernels=on_gpu,
        device=device,
    )
    if plan.teacher is None:
        return growth
    width = 4 if plan.precision == "fp32" else 2
    extra = width * (plan.teacher.num_params + batch_tokens * plan.teacher.hidden_size)
    return growth.model_copy(
        update={"value": growth.value + extra, "formula": f"{growth.formula} + teacher {human_bytes(extra)}"}
    )


def _forward(facts: ModelFacts, plan: Plan, machine: Machine, *, rows: int) -> float:
    estimate: Any = forward_seconds(
        facts, machine, tokens=rows * plan.seq_len, seq_len=plan.seq_len, dtype=TORCH_NAMES[plan.precision]
    )
    return estimate.value
