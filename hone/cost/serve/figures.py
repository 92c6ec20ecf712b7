"""What a measured serving run costs: its seconds and rate, its cache and its memory."""

from __future__ import annotations

from dataclasses import dataclass

from hone.base.figure import Estimate
from hone.base.plan import MEMORY
from hone.cost.dims import ModelDims
from hone.cost.memory import BYTES, serve_bytes
from hone.cost.serve.schedule import Batching, StepKind, Traffic
from hone.cost.serve.serving import Serving, serving_seconds, touched_pages
from hone.measure.machine import Machine

HELD_24, READ_24 = 6 / 16, 7 / 16
"""Shares of a 2:4 linear's dense bytes that are not held in memory, and not read by a decode step."""
_LOAD_BYTES_PER_S = 1e9  # reading, fusing and placing weights; files are usually in the page cache


@dataclass(frozen=True)
class Measured:
    """A run of `traffic` on an engine that is opened for it, and of the samples that it writes after it."""

    serving: Serving
    traffic: Traffic
    batching: Batching
    weights_bytes: float
    """Of the weights on the device."""
    read_bytes: float
    """Of the files that are loaded."""
    num_pages: int
    """Of the KV cache, without the null page."""
    page_bytes: int
    sample_tokens: int
    """Tokens that are written one sequence at a time."""
    widened_bytes: float = 0.0
    """Codes of experts that a step widens at a time."""


def estimate(run: Measured, machine: Machine) -> dict[str, Estimate]:
    """Estimates of time_s, tokens_per_s, kv_cache_bytes and memory_growth_bytes."""
    timed = serving_seconds(run.serving, run.traffic, run.batching)
    samples_s = run.sample_tokens * run.serving.step_seconds(StepKind(1, 64, (), 1, 1)).value
    load_s = run.read_bytes / _LOAD_BYTES_PER_S
    total = f"load {load_s:.2f} s + {timed.formula} + samples {samples_s:.2f} s"
    tokens = sum(run.traffic.outputs)
    return {
        "time_s": Estimate(value=load_s + timed.value + samples_s, unit="s", formula=total, bound=timed.bound),
        "tokens_per_s": Estimate(value=tokens / timed.value, unit="tokens/s", formula=timed.formula, bound=timed.bound),
        "kv_cache_bytes": Estimate(
            value=float((run.num_pages + 1) * run.page_bytes),
            unit="B",
            formula=f"{run.num_pages} pages and the null page",
        ),
        MEMORY: growth_bytes(run, machine),
    }


def growth_bytes(run: Measured, machine: Machine) -> Estimate:
    """Weights + the pages that the run touches + the activations of one step."""
    traffic, batching, pages = run.traffic, run.batching, run.num_pages
    if not machine.device.startswith("cuda"):  # untouched memory is not resident
        pages = min(pages, touched_pages(traffic, batching))
    most = max(prompt + output for prompt, output in zip(traffic.prompts, traffic.outputs))
    seqs = min(traffic.concurrency, batching.max_num_seqs)
    return serve_bytes(
        run.serving.dims,
        weights_bytes=run.weights_bytes,
        kv_bytes=pages * run.page_bytes,
        max_tokens=min(batching.max_num_batched_tokens, traffic.concurrency * most),
        max_num_seqs=seqs,
        context_tokens=seqs * most,
        dtype=run.serving.dtype,
        device=machine.device,
        compiled=run.serving.compiled,
        widened_bytes=run.widened_bytes,
    )


def read_weights(dims: ModelDims, dtype: str, stored: float, width: float | None = None) -> float | None:
    """Bytes of quantized weights that a step reads, of `stored` ones; None when they are stored in `dtype`.

    `width`: bytes of a number of the embedding, of which a step reads a few rows; None: `dtype`'s.
    """
    if stored >= 0.9 * BYTES[dtype] * dims.num_params:
        return None
    width = BYTES[dtype] if width is None else width
    return stored - (0 if dims.tie_embeddings else width * dims.vocab_size * dims.hidden_size)
