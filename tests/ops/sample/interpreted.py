"""Sampling kernels in the interpreter against plain torch."""

from __future__ import annotations

import pytest
import torch

from hone.base.errors import SpecError
from hone.ops import (
    apply_token_bitmask,
    count_tokens,
    linear_cross_entropy,
    penalize,
    rms_norm,
    rope_write,
    sample,
    token_logprobs,
)
from hone.ops.sample import triton_kernels as kernels
from hone.ops.sample.api import floor_shape
from hone.ops.sample.noise import noise_keys
from hone.ops.sample.reference import filter_logits
from tests.ops.agree import agree

HEATS = [0.0, 0.5, 1.3, 2.0, 0.0, 1.0]
MIXED = {
    "top_k": [0, 1, 3, 300, 7, 50],
    "top_p": [1.0, 0.5, 0.2, 0.0, 0.99, 0.7],
    "min_p": [0.0, 0.1, 0.2, 0.0, 0.5, 0.01],
}


def assert_kept(logits: torch.Tensor, heat: float, options: dict) -> None:
    """The kernel's threshold keeps exactly the tokens that sorting keeps, whatever is drawn of them."""
    rows, vocab = logits.shape
    given = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    given = {name: value if isinstance(value, list) else [value] * rows for name, value in given.items()}
    columns = [torch.tensor(value, dtype=torch.int32 if name == "top_k" else None) for name, value in given.items()]
    on, floors = {name.upper(): name in options for name in given}, torch.full((rows,), float("nan"))
    kernels.floors[(rows,)](
        logits, torch.full((rows,), heat), *columns, floors, logits.stride(0), vocab, **on,
        BLOCK=floor_shape(vocab).block, STAGES=1,
    )  # fmt: skip
    wanted = filter_logits(logits.float(), [heat] * rows, given["min_p"], given["top_k"], given["top_p"])
    scaled = logits.float() * torch.tensor(heat).reciprocal()
    assert torch.equal((scaled >= floors[:, None]) & (scaled > -float("inf")), wanted > -float("inf"))


@pytest.mark.parametrize("heat", [1.0, HEATS])
def test_draws_without_filters(heat: float | list[float]) -> None:
    logits = torch.randn(6, 300) * 3
    for seed in range(3):
        keys = noise_keys(range(seed, seed + 6), range(6))
        agree(lambda backend, k=keys: [sample(logits, heat, keys=k, backend=backend)])


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"top_k": 5}, torch.float32),
        ({"top_p": 0.9}, torch.float32),
        ({"min_p": 0.05}, torch.float32),
        (MIXED, torch.float32),
        (MIXED, torch.float16),
    ],
)
def test_sample(options: dict, dtype: torch.dtype) -> None:
    logits = (torch.randn(6, 300) * 3).to(dtype)
    logits[:, 7] = logits[:, 9]  # equal values stay or go together
    assert_kept(logits, 1.3, options)
    keys = noise_keys(range(6), range(6))
    agree(lambda backend: [sample(logits, HEATS, **options, keys=keys, backend=backend)])


@pytest.mark.parametrize(("vocab", "several"), [(300, 4), (2050, 3), (16, 16), (4096, 2)])
def test_several_draws_of_a_row(vocab: int, several: int) -> None:
    """2050: the second part has two tokens, fewer than are drawn."""
    logits, keys = torch.randn(6, vocab) * 3, noise_keys(range(6), range(6))
    agree(lambda backend: [sample(logits, HEATS, keys=keys, several=several, backend=backend)])
    one = sample(logits, HEATS, keys=keys, backend="triton")
    assert torch.equal(sample(logits, HEATS, keys=keys, several=several, backend="triton")[:, 0], one)
    logits[:, 1:] = float("-inf")
    some = sample(logits, HEATS, keys=keys, several=several, backend="triton")
    assert (some[:, 0] == 0).all() and ((some >= 0) & (some < vocab)).all()


@pytest.mark.parametrize(("vocab", "dtype"), [(1, torch.float32), (300, torch.float16), (9000, torch.float32)])
def test_bitmask(vocab: int, dtype: torch.dtype) -> None:
    words = -(-vocab // 32)
    masks = torch.randint(-(2**31), 2**31, (3, words), dtype=torch.int64).int()
    logits = torch.randn(5, vocab + 3).to(dtype)[:, :vocab]  # rows apart

    def run(backend: str) -> list[torch.Tensor]:
        mine = torch.full((5, vocab + 3), 7.0, dtype=dtype)
        mine[:, :vocab] = logits
        apply_token_bitmask(mine[:, :vocab], masks, torch.tensor([2, -1, 0, 2, -1]), backend=backend)
        return [mine]

    agree(run)


def test_strided_inputs_are_read_as_what_they_are() -> None:
    x, weight = torch.randn(6, 8), torch.rand(16)[::2]
    agree(lambda backend: [rms_norm(x, weight, 1e-5, backend=backend)], "torch")
    labels, head = torch.randint(0, 9, (6, 2)), torch.randn(9, 8)
    agree(lambda backend: [linear_cross_entropy(x, head, labels[:, 1], backend=backend)])
    keys = torch.stack((noise_keys(range(6), range(6)),) * 2, 1)[:, 1]
    agree(lambda backend: [sample(x, 1.0, keys=keys, backend=backend)])
    cos, sin, places = *torch.randn(2, 6, 1, 4), torch.tensor([[4, 0], [5, 1], [3, 2], [0, 3], [1, 0], [2, 1]])

    def write(backend: str) -> list[torch.Tensor]:
        q, (k, v) = x.view(6, 1, 8).clone(), torch.randn(2, 6, 8, 2, generator=torch.Generator().manual_seed(1)).mT
        made = torch.zeros(2, 6, 2, 4, 8)
        rope_write(q, k, v, cos, sin, *made, places[:, 0], places[:, 1], backend=backend)
        return [q, made]

    agree(write)
    with pytest.raises(SpecError, match="q with strides"):
        rope_write(
            torch.randn(6, 8, 2).mT, *torch.randn(2, 6, 2, 8), cos, sin, *torch.zeros(2, 6, 2, 4, 8), *places.T,
            backend="triton",
        )  # fmt: skip


def test_seeds_give_their_keys_and_peaks_are_the_largest_logits() -> None:
    logits = torch.randn(4, 300)
    seeds, positions = torch.tensor([3, -5, 2**62, 0]), torch.tensor([0, 9, 1000, 4])
    for heat in (1.0, [0.0, 1.0, 0.5, 0.0]):
        agree(lambda backend, h=heat: [sample(logits, h, keys=noise_keys(seeds, positions), backend=backend)])
        both = sample(logits[:2], heat if heat == 1.0 else heat[:2], keys=(seeds[:2], positions[:2]), backend="triton")
        alone = sample(logits[:2], heat if heat == 1.0 else heat[:2], keys=noise_keys(seeds, positions)[:2])
        assert torch.equal(both, alone)
    logits[2, 7] = float("nan")
    tokens, peaks = sample(logits, 1.0, keys=noise_keys(seeds, positions), peaks=True, backend="triton")
    assert torch.equal(peaks[[0, 1, 3]], logits[[0, 1, 3]].amax(-1)) and peaks[2].isnan()
    assert tokens[2] != 7


def test_thresholds_of_wild_rows() -> None:
    """Ties, huge ranges, banned tokens and rows of one kept token: the search ends and finds what a sort finds."""
    rows = torch.stack(
        (
            torch.zeros(40), torch.arange(40.0), torch.full((40,), -1e30).index_fill_(0, torch.tensor([3, 5]), 2.0),
            torch.full((40,), -float("inf")).index_fill_(0, torch.tensor([8]), -1e5), torch.randn(40) * 1e-6,
            torch.randn(40).half().float() * 8,
        )
    )  # fmt: skip
    every = {"top_k": 20, "top_p": 0.5, "min_p": 0.01}
    for options in ({"top_k": 3}, {"top_p": 0.6}, every, {"top_p": 0.0}):
        assert_kept(rows, 0.9, options)
    keys = noise_keys(range(6), range(6))
    agree(lambda backend: [sample(rows, 0.9, **every, keys=keys, backend=backend)])


def test_penalties_and_counts() -> None:
    logits = (torch.randn(5, 70) * 3).half()
    made = {}
    for backend in ("triton", "reference"):
        counts = torch.zeros(3, 70, dtype=torch.int32)
        prompt, some = torch.randint(0, 70, (2, 30), generator=torch.Generator().manual_seed(1))
        count_tokens(counts, torch.arange(30) % 3, prompt, prompt=True, backend=backend)
        count_tokens(counts, torch.arange(30) % 4 - 1, some, backend=backend)
        options = torch.tensor([[0.5, 0.0, 1.0, 0.0, 2.0], [0.1, 1.0, 0.0, 0.0, 0.3], [1.2, 1.0, 0.8, 3.0, 1.0]])
        made[backend] = penalize(logits, counts, torch.tensor([0, 2, -1, 1, 1]), *options, backend=backend), counts
    assert torch.equal(made["triton"][1], made["reference"][1])
    torch.testing.assert_close(made["triton"][0], made["reference"][0])


@pytest.mark.parametrize("top", [0, 1, 7])
def test_logprobs(top: int) -> None:
    for width in (11, 4500):
        logits = torch.randn(3, width) * 2
        logits[1, :] = -float("inf")
        logits[1, [4, 2]] = 1.0
        if width > 4096 or top < 3:
            tokens = torch.tensor([1, 2, width - 1])
            found = token_logprobs(logits, tokens, top, backend="triton")
            plain = token_logprobs(logits, tokens, top)
            for ours, theirs in zip(found[:2], plain[:2], strict=True):
                torch.testing.assert_close(ours, theirs)
            assert torch.equal(found[2][[0, 2]], plain[2][[0, 2]])
            if top:
                assert found[2][1, :2].tolist() == [2, 4][:top]
                first = token_logprobs(logits, found[2][:, 0].contiguous(), top, backend="triton")
                assert torch.equal(first[0], first[1][:, 0])
