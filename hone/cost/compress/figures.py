"""What a compression makes and costs: exact sizes, seconds, memory."""

from __future__ import annotations

from typing import Any

from hone.base.figure import Estimate, human_bytes
from hone.base.plan import DISK, MEMORY
from hone.cost.compress.compression import Compression
from hone.cost.compress.memory import compress_bytes
from hone.cost.compress.seconds import compress_seconds
from hone.cost.files import beside_bytes
from hone.measure.machine import Machine


def estimate(
    work: Compression,
    machine: Machine,
    *,
    num_params: int,
    given_params: int,
    vocab_size: int,
    budget: int | None = None,
    limited: bool = False,
) -> dict[str, Estimate]:
    """Estimates of the compression's figures.

    `num_params`: parameters of the compressed model, which had `given_params` before; `budget`: bytes of its files, where bits are
    chosen within them, `limited`: as few as a divergence allows.
    """
    size = float(sum(work.shard_bytes) + work.adapter_bytes)
    beside = beside_bytes(vocab_size)
    options: dict[str, Any] = {"formula": "headers, codes, scales and unchanged tensors", "tolerance": 0.0}
    if budget is not None:
        size = float(budget)
        options = {"formula": "the budget, of which a choice of bits leaves little unused", "tolerance": 0.05}
        if limited:
            options = {"formula": "at most: the fewest bytes are chosen when losses are measured", "bound": True}
    adapter = ", an adapter twice" if work.adapter_bytes else ""
    found = {
        "model_bytes": Estimate(value=size, unit="B", **options),
        "bits_per_weight": Estimate(
            value=8 * size / num_params, unit="bits", **{**options, "formula": "8 x bytes / parameters"}
        ),
        "time_s": compress_seconds(machine, work),
        MEMORY: compress_bytes(machine, work),
        DISK: Estimate(
            value=size + work.adapter_bytes + beside,
            unit="B",
            formula=f"the weights{adapter}; tokenizer, config, index, rows {human_bytes(beside)}",
        ),
    }
    if num_params != given_params:
        found["num_params"] = Estimate(value=num_params, unit="parameters", formula="the new config", tolerance=0.0)
    return found
