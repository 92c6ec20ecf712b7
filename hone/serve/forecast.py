"""What a serving run should take: time, tokens/s and peak memory, said before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from hone.base.figure import Estimate
from hone.base.run import Run
from hone.cost.facts import ModelFacts
from hone.cost.memory import serve_bytes
from hone.cost.roofline import seconds
from hone.cost.steps import decode_step_seconds, decode_step_starts, forward_seconds
from hone.measure.machine import Machine, describe
from hone.measure.memory import resident_bytes
from hone.model.folder import weights_bytes
from hone.model.hf import Checkpoint
from hone.serve.pages import page_bytes
from hone.serve.sizing import cache_pages, kv_shapes, step_threads
from hone.serve.spec import EngineSpec
from hone.serve.workload import Workload

_LOAD_BYTES_PER_S = 1e9  # reading, fusing and placing weights; files are usually in the page cache
_STEP_S = 3e-4  # Python around one step: scheduling, sampling, text
_OPS_PER_ROW = 60  # Python around one row of a step: its choice, its text, its pages, in starts of an operation
_OPS_PER_LAYER = 40  # what modules, pages and masks cost beside a layer's own operations, in starts of an operation


def forecast(
    spec: EngineSpec, concurrency: int, workload: Workload, folders: Sequence[Path], run: Run
) -> dict[str, Estimate]:
    """Estimates of time_s, tokens_per_s and peak_memory_bytes. `folders`: the model's and, with a drafter's, the draft's.

    Requests go in waves of `concurrency`: every decode step has as many rows, at the mean context. A static batch
    lasts as long as its longest request. With a drafter the speed-up is unknown before (acceptance): none is assumed.
    """
    machine = Machine.model_validate(run.machine) if run.machine else describe(run.device)
    facts = Checkpoint(folders[0]).config.facts()
    dtype = str(Checkpoint(folders[0]).dtype).removeprefix("torch.")
    tokens = sum(workload.output_tokens)
    prompt_tokens = sum(map(len, workload.prompts))
    if spec.prefix_cache:
        prompt_tokens -= (len(workload.prompts) - 1) * workload.shared_prefix
    rows = min(concurrency, spec.max_rows, len(workload.prompts))
    steps = -(-tokens // rows)
    if spec.batching == "static":
        lengths = workload.output_tokens
        steps = sum(max(lengths[start : start + rows]) for start in range(0, len(lengths), rows))
    mean_context = sum(map(len, workload.prompts)) / len(workload.prompts) + tokens / len(workload.prompts) / 2
    decode_s, bound = _decode_step(spec, facts, machine, rows, mean_context, dtype)
    prefill = forward_seconds(
        facts,
        machine,
        tokens=max(1, prompt_tokens // len(workload.prompts)),
        seq_len=int(mean_context),
        dtype=dtype,
        logit_tokens=1,
    )
    serving_s = steps * decode_s + len(workload.prompts) * prefill.value
    sample_tokens = 64 * len(workload.sample_prompts) + workload.output_tokens[0]
    one, _ = _decode_step(spec, facts, machine, 1, 64, dtype)
    weights = sum(map(weights_bytes, folders))
    total_s = weights / _LOAD_BYTES_PER_S + serving_s + sample_tokens * one
    formula = f"{steps} steps of {rows} rows x {decode_s * 1e3:.2f} ms + {len(workload.prompts)} prefills x {prefill.value * 1e3:.2f} ms"
    return {
        "time_s": Estimate(value=total_s, unit="s", formula=f"load + {formula} + samples", bound=bound),
        "tokens_per_s": Estimate(value=tokens / serving_s, unit="tokens/s", formula=formula, bound=bound),
        "peak_memory_bytes": _peak(spec, concurrency, workload, folders, run),
    }


def _decode_step(
    spec: EngineSpec, facts: ModelFacts, machine: Machine, rows: int, context: float, dtype: str
) -> tuple[float, bool]:
    """Seconds of one engine step, and whether that is only a bound.

    To the model's own work come modules, pages and masks, which are Python, and Python around the step. Rates were
    calibrated on all threads; a small model's steps run on one, so what is not the start of an operation takes longer.
    """
    work = decode_step_seconds(facts, machine, rows=rows, context=int(context), dtype=dtype)
    around = seconds(machine, num_ops=_OPS_PER_LAYER * facts.num_layers + _OPS_PER_ROW * rows, dtype=dtype)
    value = work.value
    calibration = machine.calibration
    if calibration is not None and not machine.device.startswith("cuda"):
        starts = decode_step_starts(facts) * calibration.op_s
        shared = calibration.threads / step_threads(spec, facts.num_params, rows, calibration.threads)
        value = starts + (value - starts) * shared
    return value + around.value + _STEP_S, work.bound


def _peak(spec: EngineSpec, concurrency: int, workload: Workload, folders: Sequence[Path], run: Run) -> Estimate:
    """Memory in use now + weights + the pages that the run touches + one step's work."""
    configs = [Checkpoint(folder).config for folder in folders]
    facts = configs[0].facts()
    dtype = Checkpoint(folders[0]).dtype
    shapes = [shape for config in configs for shape in kv_shapes(config)]
    longest = spec.max_model_len or configs[0].max_seq_len
    device = torch.device(run.device)
    weights = sum(map(weights_bytes, folders))
    pages = cache_pages(spec, page_bytes(shapes, spec.page_size, dtype), device, longest, weights)
    if device.type == "cpu":  # memory that nobody touches is not resident
        pages = min(pages, touched_pages(spec, concurrency, workload))
    most = max(map(len, workload.prompts)) + max(workload.output_tokens)
    growth = serve_bytes(
        facts,
        weights_bytes=weights,
        kv_bytes=pages * page_bytes(shapes, spec.page_size, dtype),
        max_tokens=min(spec.token_budget, concurrency * most),
        max_rows=min(concurrency, spec.max_rows),
        context_tokens=min(concurrency, spec.max_rows) * most,
        dtype=str(dtype).removeprefix("torch."),
        device=run.device,
    )
    start = resident_bytes() if device.type == "cpu" else torch.cuda.memory_allocated(device)
    return growth.model_copy(
        update={"value": growth.value + start, "formula": f"in use before {start / 2**20:.0f} MiB + {growth.formula}"}
    )


def touched_pages(spec: EngineSpec, concurrency: int, workload: Workload) -> int:
    """Pages that the run ever uses: all full ones with a prefix cache (shared ones once), else those used at a time."""
    size, rows = spec.page_size, min(concurrency, spec.max_rows)
    totals = [len(prompt) + length for prompt, length in zip(workload.prompts, workload.output_tokens)]
    if not spec.prefix_cache:
        return sum(sorted((-(-total // size) for total in totals), reverse=True)[:rows])
    shared = workload.shared_prefix // size
    return shared + sum(total // size - shared for total in totals) + rows
