"""Sampling kernels on a GPU against the reference, and in a captured graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops import apply_token_bitmask, count_tokens, penalize, rms_norm, sample, swiglu, token_logprobs
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
        row = sample(  # alone a row is split over many programs, which search its threshold together
            logits[5:6],
            0.7,
            **{k: v if isinstance(v, int | float) else v[5] for k, v in options.items()},
            keys=keys[5:6],
        )
        assert row == ours[5]
        some = sample(logits, heat, **options, keys=keys, several=4)
        assert torch.equal(some[:, 0], ours)
        if not options:
            assert torch.equal(some, sample(logits, heat, keys=keys, several=4, backend="reference"))
        cpu = sample(logits.cpu(), heat, keys=keys.cpu())
        assert options or (cpu == ours.cpu()).all()


@pytest.mark.parametrize("count", [1, 3, 40, 300])
def test_options_on_the_device(count: int) -> None:
    """Programs of a row meet whatever their number, and seeds, positions and peaks are those of the reference."""
    logits = torch.randn(count, 70_000, device="cuda", dtype=torch.bfloat16) * 4
    cycle = torch.arange(count, device="cuda")
    heat = torch.where(cycle % 5 == 4, 0.0, 0.5 + cycle % 3)
    top_k, top_p = (cycle % 7 * 11).int(), 1.0 - cycle % 4 * 0.2
    min_p = (cycle % 3 == 2) * 0.01
    for _ in range(20):
        keys = torch.randint(-(2**62), 2**62, (count,), device="cuda"), cycle
        tokens, peaks = sample(logits, heat, top_k, top_p, min_p, keys=keys, peaks=True)
        plain = sample(logits, heat, top_k, top_p, min_p, keys=keys, backend="reference")
        assert (tokens != plain).float().mean() <= 0.01  # sums of float32 differ at the edge of top-p
        assert torch.equal(peaks, logits.float().amax(-1))
    again = [sample(logits, heat, top_k, top_p, min_p, keys=keys) for _ in range(20)]
    assert all(torch.equal(one, tokens) for one in again)


def test_tables_and_logprobs() -> None:
    logits = torch.randn(5, 128_256, device="cuda", dtype=torch.bfloat16) * 3
    rows = torch.tensor([3, 0, -1, 2, 2], device="cuda")
    made = {}
    for backend in ("triton", "reference"):
        counts = torch.zeros(4, 128_256, dtype=torch.int32, device="cuda")
        places = torch.arange(20_000, device="cuda")
        count_tokens(counts, places % 4, places * 7 % 128_256, prompt=True, backend=backend)
        count_tokens(counts, places % 5 - 1, places // 3 * 11 % 128_256, backend=backend)
        options = torch.full((3, 5), 1.3, device="cuda")
        made[backend] = counts, penalize(logits, counts, rows, *options, backend=backend)
    assert torch.equal(made["triton"][0], made["reference"][0])
    torch.testing.assert_close(made["triton"][1], made["reference"][1])
    tokens = logits.argmax(-1)
    for ours, plain in zip(token_logprobs(logits, tokens, 20)[:2], token_logprobs(logits.double(), tokens, 20)[:2]):
        torch.testing.assert_close(ours.double(), plain.double(), atol=1e-4, rtol=1e-5)
    own, best, ids = token_logprobs(logits, tokens, 20)
    assert torch.equal(own, best[:, 0]) and torch.equal(logits.gather(-1, ids), logits.topk(20).values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1000, 128256])
def test_bitmask(dtype: torch.dtype, vocab: int) -> None:
    logits = torch.randn(12, vocab, device="cuda").to(dtype)
    masks = torch.randint(-(2**31), 2**31, (5, -(-vocab // 32)), device="cuda").int()
    rows = torch.tensor([0, -1, 3, 3, 4, -1, 1, 2, 0, -1, 4, 1], device="cuda")
    plain = logits.clone()
    apply_token_bitmask(plain, masks, rows, backend="reference")
    apply_token_bitmask(logits, masks, rows)
    assert torch.equal(logits, plain)


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
