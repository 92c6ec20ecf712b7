"""The amount of work of a training and its cost: seconds of a step, bytes of memory and disk."""

from __future__ import annotations

from dataclasses import dataclass

from hone.base.errors import FitError
from hone.base.figure import Estimate, human_bytes
from hone.base.plan import DISK, MEMORY, Plan, Shortage
from hone.cost.facts import ModelFacts
from hone.cost.files import beside_bytes, commit_seconds
from hone.cost.memory import BYTES, train_bytes
from hone.cost.steps import forward_seconds, train_step_seconds
from hone.cost.update import UpdateCost
from hone.measure.machine import Machine
from hone.train.activation_checkpointing import Segment, live_layers

CHECKPOINTS = "checkpoint_bytes"
"""The figure of the bytes that checkpoints have on disk at most, while the stage runs."""

WAYS = {
    MEMORY: (
        "raise gradient_accumulation_steps",
        "set activation_checkpointing: every_nth",
        "use a smaller model or seq_len, or optimizer: adamw_8bit",
    )
}
"""Ways out when memory or disk is too small."""

DRAW_S = 12e-9
"""Seconds of one thread to draw a normal number and scale it (two-core AMD EPYC); up to eight threads draw."""

LOG_BYTES = 700
"""Bytes that a step adds to steps.jsonl, timing.jsonl and TensorBoard's events."""


@dataclass(frozen=True)
class Work:
    """A training whose steps are batches of `batch_size` sequences of `seq_len`, in `gradient_accumulation_steps` micro-batches."""

    model: ModelFacts
    steps: int
    batch_size: int
    seq_len: int
    dtype: str
    segments: tuple[Segment, ...]
    update: UpdateCost
    gradient_accumulation_steps: int = 1
    eval_sequences: int = 0
    """Sequences of all evaluations together."""
    teacher: ModelFacts | None = None
    packed: bool = True
    """Whether sequences hold several documents, which requires attention masks."""
    num_checkpoints: int = 0
    """Checkpoints on disk at once."""

    @property
    def step_tokens(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def micro_batch_tokens(self) -> int:
        return self.step_tokens // self.gradient_accumulation_steps


class TrainPlan(Plan):
    """A plan with the number of steps; checkpoints need disk beside the finished folder."""

    steps: int
    wanted_steps: int
    """Steps without a time budget."""

    def shortages(self, capacity: dict[str, float]) -> list[Shortage]:  # type: ignore[override]
        """As `Plan.shortages`, including the checkpoints."""
        found = super().shortages(capacity)
        if CHECKPOINTS in self.estimates and DISK in capacity and all(one.name != DISK for one in found):
            kept, folder = self.estimates[CHECKPOINTS], self.estimates[DISK]
            if kept.value + folder.value > capacity[DISK]:
                formula = f"checkpoints {kept.formula} + the finished folder {human_bytes(folder.value)}"
                ways = (
                    "lower checkpoint.keep_latest_k",
                    "raise checkpoint.interval above steps",
                    "write to another disk: --out or --work",
                )
                found.append(Shortage(DISK, kept.value + folder.value, capacity[DISK], formula, ways))
        return found


def estimate(work: Work, machine: Machine) -> dict[str, Estimate]:
    """Estimates of the training's figures."""
    step = step_seconds(work, machine)
    evaluation, around = _evaluation_s(work, machine), _around_s(work, machine)
    num_params, width = work.model.num_params, BYTES[work.dtype]
    tokens = work.steps * work.step_tokens
    beside = beside_bytes(work.model.vocab_size)
    weights = f"{num_params:,} parameters x {width} bytes"
    found = {
        "time_s": Estimate(
            value=work.steps * step.value + evaluation + around,
            unit="s",
            formula=f"{work.steps} steps x {step.value:.3g} s + evaluation {evaluation:.3g} s + first weights and files "
            f"{around:.3g} s; step: {step.formula}",
            bound=step.bound,
        ),
        "tokens_per_s": Estimate(
            value=work.step_tokens / step.value,
            unit="tokens/s",
            formula=f"{work.step_tokens} tokens / {step.value:.3g} s a step",
            bound=step.bound,
        ),
        MEMORY: growth_bytes(work, machine.device),
        "num_params": Estimate(value=float(num_params), unit="parameters", formula="config", tolerance=0.0),
        "train_tokens": Estimate(
            value=float(tokens), unit="tokens", formula=f"{work.steps} steps x {work.step_tokens}", tolerance=0.0
        ),
        "model_bytes": Estimate(value=float(width * num_params), unit="B", formula=weights, tolerance=0.02),
        DISK: Estimate(
            value=float(width * num_params + beside + LOG_BYTES * work.steps),
            unit="B",
            formula=f"{weights} + tokenizer and manifest {human_bytes(beside)} + logs {human_bytes(LOG_BYTES * work.steps)}",
        ),
    }
    if work.num_checkpoints:
        one = 4 * num_params + work.update.state_bytes
        found[CHECKPOINTS] = Estimate(
            value=work.num_checkpoints * one,
            unit="B",
            formula=f"{work.num_checkpoints} x (float32 weights {human_bytes(4 * num_params)} + optimizer "
            f"{human_bytes(work.update.state_bytes)})",
            tolerance=0.05,
        )
    return found


def affordable_steps(work: Work, time_budget_s: float | None, machine: Machine) -> int:
    """The steps of `work`, or fewer, but at least one, so that they and their evaluations take `time_budget_s` on `machine`."""
    if time_budget_s is None:
        return work.steps
    step_s, others_s = step_seconds(work, machine).value, _evaluation_s(work, machine) + _around_s(work, machine)
    return max(1, min(work.steps, int((time_budget_s - others_s) / step_s)))


def step_seconds(work: Work, machine: Machine) -> Estimate:
    """Seconds of one optimizer step, including the teacher's forward pass."""
    step = train_step_seconds(
        work.model,
        machine,
        batch_tokens=work.micro_batch_tokens,
        seq_len=work.seq_len,
        dtype=work.dtype,
        micro_batches=work.gradient_accumulation_steps,
        recomputed={layer for part in work.segments if part.recompute for layer in range(part.start, part.stop)},
        update=work.update,
    )
    if work.teacher is None:
        return step
    extra = _forward_s(work.teacher, work, machine)
    return step.model_copy(
        update={"value": step.value + extra, "formula": f"{step.formula} + teacher's forward {extra:.3g} s"}
    )


def growth_bytes(work: Work, device: str) -> Estimate:
    """Bytes that the training adds at its peak to the memory in use before."""
    from hone.ops.loss.api import kernel_chunk_tokens
    from hone.ops.loss.reference import default_chunk_tokens

    tokens, on_gpu = work.micro_batch_tokens, device.startswith("cuda")
    growth = train_bytes(
        work.model,
        batch_tokens=tokens,
        seq_len=work.seq_len,
        dtype=work.dtype,
        update=work.update,
        accumulate=work.gradient_accumulation_steps > 1,
        packed=work.packed,
        kept_layers=live_layers(work.segments),
        kept_inputs=sum(part.recompute for part in work.segments),
        loss_chunk=kernel_chunk_tokens(tokens) if on_gpu else default_chunk_tokens("cpu", work.model.vocab_size),
        kernels=on_gpu,
        device=device,
    )
    if work.teacher is None:
        return growth
    extra = BYTES[work.dtype] * (work.teacher.num_params + tokens * work.teacher.hidden_size)
    return growth.model_copy(
        update={"value": growth.value + extra, "formula": f"{growth.formula} + teacher {human_bytes(extra)}"}
    )


def out_of_memory(error: BaseException, device: str, step: int) -> FitError | None:
    """The error for the user when `error` of step `step` is one of torch's several out-of-memory errors; else None."""
    if "out of memory" not in str(error) and "can't allocate memory" not in str(error):
        return None
    return FitError(
        f"{device} is out of memory at step {step}: {str(error).splitlines()[0]}", fix="; or ".join(WAYS[MEMORY])
    )


def _around_s(work: Work, machine: Machine) -> float:
    """Seconds in which the first weights are drawn and the last ones written, hashed and made durable."""
    drawn = DRAW_S * work.model.num_params / min(8, machine.num_threads)
    return drawn + commit_seconds(machine, BYTES[work.dtype] * work.model.num_params)


def _evaluation_s(work: Work, machine: Machine) -> float:
    """Seconds of all evaluations."""
    if not work.eval_sequences:
        return 0.0
    return _forward_s(work.model, work, machine) * work.eval_sequences / work.batch_size


def _forward_s(model: ModelFacts, work: Work, machine: Machine) -> float:
    """Seconds of a forward pass of `model` over a step's sequences."""
    return forward_seconds(model, machine, tokens=work.step_tokens, seq_len=work.seq_len, dtype=work.dtype).value
