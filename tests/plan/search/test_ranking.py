"""Rankings against published ones: of the variants of one training the search's first is within 5 % of the best that was measured."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from hone.cost import ranks
from hone.plan.search.goal import Goal
from hone.plan.search.machines import Fleet
from hone.plan.search.shapes import candidates_of
from hone.plan.search.training.bounds import priced
from hone.plan.search.training.rates import Rates
from hone.plan.search.training.space import Trainings
from tests.cost.published import machine, rates

LLAMA_8B = {
    "hidden_size": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
}
LLAMA_405B = {
    "hidden_size": 16384,
    "num_layers": 126,
    "num_heads": 128,
    "num_kv_heads": 8,
    "head_dim": 128,
    "intermediate_size": 53248,
}
TITAN = rates(390e12, 0.8 * 2.4e12, 450e12, 110e12)
"""As in tests/cost/test_published.py: torchtitan's H100, its rate of products fitted to one row."""
A100 = rates(0.8 * 312e12, 0.8 * 2.039e12, 24e12, 8.65e12, passes=2.5)


def seconds(
    model: dict[str, Any], sheet: str, gpus: int, calibration: Any, **fields: Any
) -> dict[tuple[Any, ...], float]:
    """Seconds of a step of all configurations of a goal, by (precision, schedule, recomputation)."""
    space = {
        "micro_batch": [1],
        "tensor_parallel": [1],
        "pipeline_parallel": [1],
        "context_parallel": [1],
        **fields.pop("space"),
    }
    shape = {**model, "max_seq_len": fields["seq_len"], "tie_embeddings": False}
    goal = Goal.read({"goal": "train", "model": shape, "tokens": [1e9], "vocab_size": 128256, "space": space, **fields})
    on = machine(sheet, gpus, calibration)
    fleet = Fleet(sheet, gpus, on, 1e15, None, None, None, "assumed")
    (candidate,) = candidates_of(goal)
    of = Trainings(goal, candidate, fleet)
    (block,) = of.blocks(Counter())
    found = priced(Rates(of), block).step_s
    each = [of.product.at(block, row) for row in range(len(found))]
    return {
        (at["precision"], at["schedule"][0], at["recomputation"]): float(one)
        for at, one in zip(each, found, strict=True)
    }


def within(found: dict[tuple[Any, ...], float], published: dict[tuple[Any, ...], float]) -> None:
    """The variant that is ranked first has at least 95 % of the best published rate."""
    assert set(published) <= set(found), f"all variants are in the space: {sorted(found)}"
    first = min(published, key=lambda variant: found[variant])
    assert published[first] >= 0.95 * max(published.values())


@pytest.mark.parametrize(("gpus", "bf16", "fp8"), [(8, 6667, 8532), (128, 6514, 8380)])
def test_precisions_of_torchtitan(gpus, bf16, fp8):
    """Llama 3 8B, tables 1 and 3 of its benchmarks of December 2024, tokens/s a GPU, compiled: and their ratio within 5 %."""
    space = {
        "data_parallel": ["zero3"],
        "micro_batch": [2],
        "recomputation": ["selective"],
        "precision": ["bf16", "fp8"],
    }
    found = seconds(LLAMA_8B, "H100", gpus, TITAN, seq_len=8192, batch_size=[2 * gpus], space=space)
    variants = {("bf16", "1f1b", "selective"): bf16, ("fp8", "1f1b", "selective"): fp8}
    within(found, variants)
    one, other = variants
    assert found[one] / found[other] == pytest.approx(fp8 / bf16, rel=0.05)


def test_schedules_of_torchtitan():
    """Llama 3 405B on 512 H100: interleaved stages 128 tokens/s a GPU, 1F1B 100."""
    space = {"data_parallel": ["zero1"], "tensor_parallel": [8], "pipeline_parallel": [8], "recomputation": ["full"], "precision": ["fp8"], "schedules": ["1f1b", "interleaved"], "stages_per_rank": [2]}  # fmt: skip
    found = seconds(LLAMA_405B, "H100", 512, TITAN, seq_len=8192, batch_size=[64], space=space)
    within(found, {("fp8", "1f1b", "full"): 100, ("fp8", "interleaved", "full"): 128})


@pytest.mark.parametrize(
    ("h", "layers", "heads", "stages", "v", "batch", "full", "selective"),
    [(6144, 48, 64, 1, 1, 4, 1.42, 1.10), (12288, 96, 96, 8, 3, 64, 18.13, 13.75)],
)
def test_recomputation_of_megatron(h, layers, heads, stages, v, batch, full, selective, monkeypatch):
    """Table 5 of arXiv:2205.05198 on A100: everything recomputed, or next to nothing with sequence parallelism; seconds of an iteration."""
    monkeypatch.setitem(ranks.LINK_BYTES_PER_S, "cuda", 235e9)
    model = {"hidden_size": h, "num_layers": layers, "num_heads": heads, "num_kv_heads": heads, "head_dim": h // heads, "intermediate_size": round(8 * h / 3 / 128) * 128}  # fmt: skip
    space = {"tensor_parallel": [8], "pipeline_parallel": [stages], "recomputation": ["full", "none"], "precision": ["bf16"], "data_parallel": ["ddp"], "schedules": ["interleaved" if v > 1 else "1f1b"], "stages_per_rank": [v], "micro_batch": [1 if stages > 1 else 4]}  # fmt: skip
    found = seconds(model, "A100", 8 * stages, A100, seq_len=2048, batch_size=[batch], space=space)
    kind = "interleaved" if v > 1 else "1f1b"
    within(found, {("bf16", kind, "full"): 1 / full, ("bf16", kind, "none"): 1 / selective})
