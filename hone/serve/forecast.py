"""What a serving run should take: time, tokens/s and peak memory, said before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from hone.base.figure import Estimate
from hone.base.run import Run
from hone.cost.cache import LayerCache, page_bytes
from hone.cost.decode import decode_step_seconds, decode_step_starts
from hone.cost.facts import ModelFacts
from hone.cost.memory import BYTES, serve_bytes
from hone.cost.roofline import seconds
from hone.cost.steps import forward_seconds
from hone.measure.machine import Machine, describe
from hone.measure.memory import resident_bytes
from hone.model.folder import weights_bytes
from hone.model.hf import Checkpoint
from hone.ops.dispatch import Where, choose, triton_version
from hone.serve.runner import MOST_SEQS
from hone.serve.sizing import cache_pages, cache_tensors, sized, step_threads, work_bytes
from hone.serve.spec import EngineSpec
from hone.serve.workload import Workload

_LOAD_BYTES_PER_S = 1e9  # reading, fusing and placing weights; files are usually in the page cache
_STEP_S = 3e-4  # Python around one step: scheduling, sampling, text
_OPS_PER_ROW = 60  # Python around one row of a step: its choice, its text, its pages, in starts of an operation
_OPS_PER_LAYER = 40  # what modules, pages and masks cost beside a layer's own operations, in starts of an operation

# The same where a GPU's kernels read pages in place (benchmarks/ledger/serve.jsonl, Llama-3-8B's shape, one H200).
_REPLAY_ROW_S = 2e-5  # Python around one row; 1e-5 was measured without text
# Starts that a layer equals when its kernels are launched one by one, out of Python: 31 to 34 ms a step were measured.
_LAUNCHED_PER_LAYER = 200


def forecast(
    spec: EngineSpec, concurrency: int, workload: Workload, folders: Sequence[Path], run: Run
) -> dict[str, Estimate]:
    """Estimates of time_s, tokens_per_s and peak_memory_bytes. `folders`: the model's and, with a drafter's, the draft's.

    Requests go in waves of `concurrency`: every decode step has as many rows, at the mean context. A static batch
    lasts as long as its longest request. With a drafter the speed-up is unknown before (acceptance): none is assumed.
    """
    machine = Machine.model_validate(run.machine) if run.machine else describe(run.device)
    spec = sized(spec, machine)
    facts = Checkpoint(folders[0]).config.facts()
    dtype = str(Checkpoint(folders[0]).dtype).removeprefix("torch.")
    tokens = sum(workload.output_tokens)
    prompt_tokens = sum(map(len, workload.prompts))
    if spec.enable_prefix_caching:
        prompt_tokens -= (len(workload.prompts) - 1) * workload.shared_prefix
    rows = min(concurrency, spec.max_num_seqs, len(workload.prompts))
    steps = -(-tokens // rows)
    if spec.batching == "static":
        lengths = workload.output_tokens
        steps = sum(max(lengths[start : start + rows]) for start in range(0, len(lengths), rows))
    mean_context = sum(map(len, workload.prompts)) / len(workload.prompts) + tokens / len(workload.prompts) / 2
    in_place = reads_in_place_on(machine, cache_tensors(Checkpoint(folders[0]).config), dtype)
    weights = sum(map(weights_bytes, folders))
    setting = _Setting(spec, facts, machine, dtype, in_place, _read_weights(facts, dtype, weights_bytes(folders[0])))
    decode_s, bound = _decode_step(setting, rows, mean_context)
    prefill_s = _prefill(setting, prompt_tokens // len(workload.prompts), int(mean_context))
    serving_s = steps * decode_s + len(workload.prompts) * prefill_s
    sample_tokens = 64 * len(workload.sample_prompts) + workload.output_tokens[0]
    one, _ = _decode_step(setting, 1, 64)
    total_s = weights / _LOAD_BYTES_PER_S + serving_s + sample_tokens * one
    formula = f"{steps} steps of {rows} rows x {decode_s * 1e3:.2f} ms + {len(workload.prompts)} prefills x {prefill_s * 1e3:.2f} ms"
    return {
        "time_s": Estimate(value=total_s, unit="s", formula=f"load + {formula} + samples", bound=bound),
        "tokens_per_s": Estimate(value=tokens / serving_s, unit="tokens/s", formula=formula, bound=bound),
        "peak_memory_bytes": _peak(spec, concurrency, workload, folders, run),
    }


class _Setting(NamedTuple):
    """What all of a run's steps have in common."""

    spec: EngineSpec
    facts: ModelFacts
    machine: Machine
    dtype: str
    in_place: bool
    """Pages are read by a GPU's kernels where they lie."""
    weights_bytes: float | None
    """What a step reads of the weights when they are smaller than in `dtype`."""


def _decode_step(setting: _Setting, rows: int, context: float) -> tuple[float, bool]:
    """Seconds of one engine step, and whether that is only a bound.

    To the model's own work come modules, pages and masks, which are Python, and Python around the step. Rates were
    calibrated on all threads; a small model's steps run on one, so what is not the start of an operation takes longer.
    On a GPU that reads pages in place a step is the replay of a graph, unless a drafter guesses or there are too many
    rows; then Python launches its kernels.
    """
    spec, facts, machine, dtype = setting[:4]
    if setting.in_place:
        captured = spec.drafter is None and rows <= MOST_SEQS
        work = decode_step_seconds(
            facts,
            machine,
            rows=rows,
            context=int(context),
            dtype=dtype,
            weights_bytes=setting.weights_bytes,
            in_place=True,
            captured=captured,
        )
        launched = 0.0 if captured else _launched_s(setting)
        return max(work.value, launched) + rows * _REPLAY_ROW_S + _STEP_S, work.bound
    work = decode_step_seconds(facts, machine, rows=rows, context=int(context), dtype=dtype)
    around = seconds(machine, num_ops=_OPS_PER_LAYER * facts.num_layers + _OPS_PER_ROW * rows, dtype=dtype)
    value = work.value
    calibration = machine.calibration
    if calibration is not None and not machine.device.startswith("cuda"):
        starts = decode_step_starts(facts) * calibration.op_s
        shared = calibration.threads / step_threads(spec, facts.num_params, rows, calibration.threads)
        value = starts + (value - starts) * shared
    return value + around.value + _STEP_S, work.bound


def _prefill(setting: _Setting, tokens: int, seq_len: int) -> float:
    """Seconds of a step that takes in one prompt of `tokens`."""
    work = forward_seconds(
        setting.facts, setting.machine, tokens=max(1, tokens), seq_len=seq_len, dtype=setting.dtype, logit_tokens=1
    )
    return max(work.value, _launched_s(setting)) if setting.in_place else work.value


def _launched_s(setting: _Setting) -> float:
    """Seconds in which Python launches a step's kernels one by one; the GPU works meanwhile."""
    return seconds(setting.machine, num_ops=_LAUNCHED_PER_LAYER * setting.facts.num_layers, dtype=setting.dtype).value


def _read_weights(facts: ModelFacts, dtype: str, stored: float) -> float | None:
    """Bytes of quantized weights that a step reads, of `stored` ones; None when they are stored in `dtype`."""
    if stored >= 0.9 * BYTES[dtype] * facts.num_params:
        return None
    embedding = 0 if facts.tie_embeddings else BYTES[dtype] * facts.vocab_size * facts.hidden_size
    return stored - embedding


def reads_in_place_on(machine: Machine, tensors: Sequence[LayerCache], dtype: str) -> bool:
    """Whether `machine` is a GPU whose kernels read pages of `dtype` where they lie; `tensors`: `cache_tensors` of the model."""
    if not machine.device.startswith("cuda"):
        return False
    gpu = machine.gpus[int(machine.device.partition(":")[2] or 0)]
    major, minor = map(int, gpu.capability.split("."))
    where = Where("cuda", (major, minor), gpu.num_multiprocessors, triton_version())
    page = {"dtype": getattr(torch, dtype), "page_dtype": getattr(torch, dtype), "rows": 1}
    for layer in tensors:
        widths = {one.name: one.shape[-1] for one in layer}
        if layer and set(widths) != {"k", "v"}:
            return False
        if layer and choose("attend_paged", where, head_dim=widths["k"], v_dim=widths["v"], **page).backend != "triton":
            return False
    return True


def _peak(spec: EngineSpec, concurrency: int, workload: Workload, folders: Sequence[Path], run: Run) -> Estimate:
    """Memory in use now + weights + the pages that the run touches + one step's work."""
    configs = [Checkpoint(folder).config for folder in folders]
    facts = configs[0].facts()
    dtype = Checkpoint(folders[0]).dtype
    tensors = [layer for config in configs for layer in cache_tensors(config)]
    one = page_bytes(tensors, spec.block_size, str(dtype).removeprefix("torch."))
    longest = spec.max_model_len or configs[0].max_seq_len
    device = torch.device(run.device)
    weights = sum(map(weights_bytes, folders))
    work = work_bytes(facts, spec, str(dtype).removeprefix("torch."), run.device)
    pages = cache_pages(spec, one, device, longest, weights=weights, work=work)
    if device.type == "cpu":  # memory that nobody touches is not resident
        pages = min(pages, touched_pages(spec, concurrency, workload))
    most = max(map(len, workload.prompts)) + max(workload.output_tokens)
    growth = serve_bytes(
        facts,
        weights_bytes=weights,
        kv_bytes=pages * one,
        max_tokens=min(spec.max_num_batched_tokens, concurrency * most),
        max_rows=min(concurrency, spec.max_num_seqs),
        context_tokens=min(concurrency, spec.max_num_seqs) * most,
        dtype=str(dtype).removeprefix("torch."),
        device=run.device,
    )
    start = resident_bytes() if device.type == "cpu" else torch.cuda.memory_allocated(device)
    return growth.model_copy(
        update={"value": growth.value + start, "formula": f"in use before {start / 2**20:.0f} MiB + {growth.formula}"}
    )


def touched_pages(spec: EngineSpec, concurrency: int, workload: Workload) -> int:
    """Pages that the run ever uses: all full ones with a prefix cache (shared ones once), else those used at a time."""
    size, rows = spec.block_size, min(concurrency, spec.max_num_seqs)
    totals = [len(prompt) + length for prompt, length in zip(workload.prompts, workload.output_tokens)]
    if not spec.enable_prefix_caching:
        return sum(sorted((-(-total // size) for total in totals), reverse=True)[:rows])
    shared = workload.shared_prefix // size
    return shared + sum(total // size - shared for total in totals) + rows
