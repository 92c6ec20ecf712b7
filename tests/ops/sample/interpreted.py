"""Sampling kernels in the interpreter against plain torch."""

from __future__ import annotations

import pytest
import torch

from hone.base.errors import SpecError
from hone.ops import linear_cross_entropy, rms_norm, rope_write, sample
from hone.ops.sample.noise import noise_keys
from tests.ops.agree import agree

MIXED = {
    "top_k": [0, 1, 3, 300, 7, 50],
    "top_p": [1.0, 0.5, 0.2, 0.0, 0.99, 0.7],
    "min_p": [0.0, 0.1, 0.2, 0.0, 0.5, 0.01],
}


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32),
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
    for seed in range(3):
        keys = noise_keys(range(seed, seed + 6), range(6))
        for heat in (1.0, [0.0, 0.5, 1.3, 2.0, 0.0, 1.0]):
            agree(lambda backend, h=heat, k=keys: [sample(logits, h, **options, keys=k, backend=backend)])


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
