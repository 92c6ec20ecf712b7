"""Where attention over pages runs, and why."""

from __future__ import annotations

import pytest
import torch

from hone.ops.dispatch import Where, choose

HOPPER = Where("cuda", (9, 0), 132, (3, 6))
PAGED = {"dtype": torch.bfloat16, "page_dtype": torch.bfloat16, "head_dim": 128, "v_dim": 128, "rows": 64}
LATENT = {
    "dtype": torch.bfloat16,
    "page_dtype": torch.bfloat16,
    "heads": 128,
    "value_dim": 512,
    "rope_dim": 64,
    "rows": 9,
}


@pytest.mark.parametrize(
    ("where", "case", "backend", "reason"),
    [
        (HOPPER, {}, "triton", "in place"),
        (Where("cuda", (8, 0), 108, (3, 6)), {}, "triton", "in place"),
        (HOPPER, {"page_dtype": torch.float8_e4m3fn}, "triton", "in place"),
        (Where("cuda", (8, 0), 108, (3, 6)), {"page_dtype": torch.float8_e4m3fn}, "reference", "8.9"),
        (HOPPER, {"dtype": torch.float16, "page_dtype": torch.int8}, "triton", "in place"),
        (HOPPER, {"dtype": torch.float32, "page_dtype": torch.float32}, "reference", "16-bit"),
        (HOPPER, {"page_dtype": torch.float16}, "reference", "same or 8 bits"),
        (HOPPER, {"head_dim": 512}, "reference", "up to 256 wide"),
        (HOPPER, {"v_dim": 512}, "reference", "up to 256 wide"),
        (HOPPER, {"page_dtype": torch.int8, "head_dim": 32}, "reference", "multiple"),
        (HOPPER, {"rows": 10000}, "reference", "8192 sequences"),
        (HOPPER, {"softcap": True}, "reference", "no softcap"),
        (Where(), {}, "reference", "no GPU"),
        (Where("cuda", (9, 0), 132), {}, "reference", "not installed"),
    ],
)
def test_paged(where, case, backend, reason):
    choice = choose("attend_paged", where, **{**PAGED, **case})
    assert choice.backend == backend and reason in choice.reason


@pytest.mark.parametrize(
    ("where", "case", "backend", "reason"),
    [
        (HOPPER, {}, "triton", "read once"),
        (HOPPER, {"boxed": True}, "gluon", "compute-bound"),
        (HOPPER, {"heads": 16, "boxed": True}, "triton", "read once"),
        (Where("cuda", (10, 0), 148, (3, 6)), {"boxed": True}, "triton", "read once"),
        (HOPPER, {"heads": 96}, "reference", "multiple of 64"),
        (HOPPER, {"value_dim": 256}, "reference", "512"),
        (HOPPER, {"page_dtype": torch.int8}, "reference", "16-bit"),
        (HOPPER, {"rows": 10000}, "reference", "8192 sequences"),
        (Where(), {}, "reference", "no GPU"),
    ],
)
def test_latent(where, case, backend, reason):
    choice = choose("attend_latent", where, **{**LATENT, **case})
    assert choice.backend == backend and reason in choice.reason
