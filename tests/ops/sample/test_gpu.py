"""Sampling kernels on a GPU against the reference, and in a captured graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops import rms_norm, sample, swiglu
from hone.ops.sample.noise import noise_keys

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1000, 128256])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 50},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"top_k": [0, 1, 40] * 4, "top_p": [1.0, 0.9, 0.3] * 4, "min_p": [0.0, 0.1, 0.02] * 4},
    ],
)
def test_sample(dtype: torch.dtype, vocab: int, options: dict) -> None:
    logits = (torch.randn(12, vocab, device="cuda") * 3).to(dtype)
    heat = [0.0, 0.7, 1.0, 1.5] * 3
    for seed in range(4):
        keys = noise_keys(range(seed, seed + 12), range(12), device="cuda")
        ours = sample(logits, heat, **options, keys=keys)
        assert torch.equal(ours, sample(logits, heat, **options, keys=keys, backend="reference"))
        row = sample(
            logits[5:6],
            0.7,
            **{k: v if isinstance(v, int | float) else v[5] for k, v in options.items()},
            keys=keys[5:6],
        )
        assert row == ours[5]
        cpu = sample(logits.cpu(), heat, keys=keys.cpu())
        assert options or (cpu == ours.cpu()).all()


def test_replays_of_a_graph_allocate_nothing_and_see_new_values() -> None:
    x, residual = torch.randn(2, 64, 512, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(512, device="cuda", dtype=torch.bfloat16)
    seeds, positions = torch.arange(64, device="cuda"), torch.arange(64, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        y, _ = rms_norm(x, weight, 1e-5, residual)
        heat = torch.ones(64, device="cuda")
        return y, sample(swiglu(y), heat, keys=noise_keys(seeds, positions))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, tokens = step()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        x.normal_()
        positions += 1
        graph.replay()
        torch.testing.assert_close(y, F.rms_norm(x + residual, (512,), weight, 1e-5), atol=0.03, rtol=0.02)
        fresh = step()
        assert torch.equal(fresh[0], y) and torch.equal(fresh[1], tokens)
        del fresh
    assert torch.cuda.memory_allocated() == before
