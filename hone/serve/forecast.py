"""What a serving run should take: time, tokens/s and peak memory, said before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hone.base.figure import Estimate
from hone.base.run import Run
from hone.cost.memory import serve_bytes
from hone.cost.steps import decode_step_seconds, forward_seconds
from hone.measure.machine import Machine, describe
from hone.measure.memory import resident_bytes
from hone.model.hf import Checkpoint
from hone.serve.pages import page_bytes
from hone.serve.sizing import cache_pages, kv_shapes

if TYPE_CHECKING:
    from hone.serve.stage import Serve, Workload

_LOAD_BYTES_PER_S = 1e9  # reading, fusing and placing weights; files are usually in the page cache
_STEP_S = 3e-4  # Python around one step: scheduling, sampling, text


def forecast(spec: Serve, workload: Workload, model: Path, draft: Path | None, run: Run) -> dict[str, Estimate]:
    """Estimates of time_s, tokens_per_s and peak_memory_bytes.

    Requests go in waves of `concurrency`: every decode step has as many rows, at the mean context. A static batch
    lasts as long as its longest request. With a drafter the speed-up is unknown before (acceptance): none is assumed.
    """
    machine = Machine.model_validate(run.machine) if run.machine else describe(run.device)
    config = Checkpoint(model).config
    facts = config.facts()
    dtype = "float32" if run.device == "cpu" else "bfloat16"
    tokens = sum(workload.output_tokens)
    prompt_tokens = sum(map(len, workload.prompts))
    if spec.engine.prefix_cache:
        prompt_tokens -= (len(workload.prompts) - 1) * spec.shared_prefix
    rows = min(spec.concurrency, spec.engine.max_rows, len(workload.prompts))
    steps = -(-tokens // rows)
    if spec.engine.batching == "static":
        lengths = workload.output_tokens
        steps = sum(max(lengths[start : start + rows]) for start in range(0, len(lengths), rows))
    mean_context = sum(map(len, workload.prompts)) / len(workload.prompts) + tokens / len(workload.prompts) / 2
    decode = decode_step_seconds(facts, machine, rows=rows, context=int(2 * mean_context), dtype=dtype)
    prefill = forward_seconds(
        facts,
        machine,
        tokens=max(1, prompt_tokens // len(workload.prompts)),
        seq_len=int(mean_context),
        dtype=dtype,
        logit_tokens=1,
    )
    serving_s = steps * (decode.value + _STEP_S) + len(workload.prompts) * prefill.value
    sample_tokens = 64 * len(workload.sample_prompts) + workload.output_tokens[0]
    one = decode_step_seconds(facts, machine, rows=1, context=128, dtype=dtype).value + _STEP_S
    weights = _weights_bytes(model) + (_weights_bytes(draft) if draft else 0)
    total_s = weights / _LOAD_BYTES_PER_S + serving_s + sample_tokens * one
    formula = f"{steps} steps of {rows} rows x {decode.value * 1e3:.2f} ms + {len(workload.prompts)} prefills x {prefill.value * 1e3:.2f} ms"
    return {
        "time_s": Estimate(value=total_s, unit="s", formula=f"load + {formula} + samples", bound=decode.bound),
        "tokens_per_s": Estimate(value=tokens / serving_s, unit="tokens/s", formula=formula, bound=decode.bound),
        "peak_memory_bytes": _peak(spec, workload, model, draft, run),
    }


def _peak(spec: Serve, workload: Workload, model: Path, draft: Path | None, run: Run) -> Estimate:
    """Memory in use now + weights + the pages that the run touches + one step's work."""
    configs = [Checkpoint(folder).config for folder in (model, draft) if folder is not None]
    facts = configs[0].facts()
    dtype = torch.float32 if run.device == "cpu" else torch.bfloat16
    shapes = [shape for config in configs for shape in kv_shapes(config)]
    longest = spec.engine.max_model_len or configs[0].max_seq_len
    device = torch.device(run.device)
    pages = cache_pages(spec.engine, page_bytes(shapes, spec.engine.page_size, dtype), device, longest)
    if device.type == "cpu":  # memory that nobody touches is not resident
        need = sum(
            -(-(len(prompt) + length) // spec.engine.page_size)
            for prompt, length in zip(workload.prompts, workload.output_tokens)
        )
        rows = min(spec.concurrency, spec.engine.max_rows)
        pages = min(pages, need if spec.engine.prefix_cache else -(-need * rows // len(workload.prompts)))
    most = max(map(len, workload.prompts)) + max(workload.output_tokens)
    growth = serve_bytes(
        facts,
        weights_bytes=sum(_weights_bytes(folder) for folder in (model, draft) if folder is not None),
        kv_bytes=pages * page_bytes(shapes, spec.engine.page_size, dtype),
        max_tokens=min(spec.engine.token_budget, spec.concurrency * most),
        max_rows=min(spec.concurrency, spec.engine.max_rows),
        context_tokens=min(spec.concurrency, spec.engine.max_rows) * most,
        dtype="float32" if dtype is torch.float32 else "bfloat16",
        device=run.device,
    )
    start = resident_bytes() if device.type == "cpu" else torch.cuda.memory_allocated(device)
    return growth.model_copy(
        update={"value": growth.value + start, "formula": f"in use before {start / 2**20:.0f} MiB + {growth.formula}"}
    )


def _weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
