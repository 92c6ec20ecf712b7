"""The kernels of a layer of experts in the interpreter against plain torch: every kind of weights, every way to find an expert's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hone.ops import choose_experts, expert_swiglu
from hone.ops.moe import launch_experts
from hone.ops.moe.local import LocalExperts
from hone.ops.moe.triton_widen import widened
from hone.ops.moe.weights import ExpertWeights, Rounding, pack_pairs
from tests.ops.agree import agree

FP8 = torch.float8_e4m3fn


def weights_of(kind: str, experts: int, rows: int, columns: int, groups: int) -> ExpertWeights:
    draw = torch.Generator().manual_seed(rows + columns)
    values = torch.randn(experts, rows, columns, generator=draw) / columns**0.5
    if kind == "dense":
        return ExpertWeights(values)
    if kind == "mxfp4":
        codes = torch.randint(-8, 8, values.shape, generator=draw, dtype=torch.int8)
        exponents = torch.randint(120, 126, (experts, columns // 32, rows), generator=draw, dtype=torch.uint8)
        return ExpertWeights(pack_pairs(codes, 32), exponents)
    scales = torch.rand(experts, groups, rows, generator=draw) * 0.02 + 0.01
    if kind == "fp8":
        return ExpertWeights((values * 30).to(FP8), scales)
    most = 7 if kind == "int4" else 127
    codes = (values * most).round().clamp(-most - 1, most).to(torch.int8)
    if kind == "int8":
        return ExpertWeights(codes, scales)
    block = ExpertWeights(codes, scales).block
    return ExpertWeights(pack_pairs(codes, block), scales)


@pytest.mark.parametrize(
    ("score", "normalize", "tokens", "experts", "top_k", "biased"),
    [("softmax", True, 3, 20, 3, False), ("sigmoid", True, 1, 16, 2, True), ("softmax", False, 70, 5, 1, False)],
)
def test_choice(score: str, normalize: bool, tokens: int, experts: int, top_k: int, biased: bool) -> None:
    x, weight = torch.randn(tokens, 272), torch.randn(experts, 272) / 16
    bias = torch.linspace(-1, 1, experts) if biased else None
    of_logits = torch.linspace(1, -1, experts) if top_k == 3 else None

    def run(backend: str) -> list[torch.Tensor]:
        options = {"score": score, "normalize": normalize, "scale": 1.5, "bias": bias, "logit_bias": of_logits}
        return list(choose_experts(x, weight, top_k, **options, backend=backend))  # type: ignore[arg-type]

    agree(run)


def test_a_token_that_is_not_finite_chooses_experts_that_exist() -> None:
    x = torch.full((2, 64), float("nan"))
    ids, weights = choose_experts(x, torch.randn(6, 64), 4, backend="triton")
    assert ((ids >= 0) & (ids < 6)).all() and weights.isnan().all()


@pytest.mark.parametrize("tokens", [1, 66])
@pytest.mark.parametrize(("copies", "counted", "padded"), [(1, False, False), (3, True, False), (2, True, True)])
def test_choice_of_a_rank(tokens: int, copies: int, counted: bool, padded: bool) -> None:
    """Ids are the rank's slots, by copies of an expert; visits of real tokens are counted."""
    x, weight = torch.randn(tokens, 64), torch.randn(9, 64)
    slots = torch.randint(0, 5, (9, copies), dtype=torch.int32)  # 4 is nobody

    def run(backend: str) -> list[torch.Tensor]:
        local = LocalExperts(
            slots, torch.arange(9, dtype=torch.int32) % copies + 1, 4,
            torch.arange(tokens) * 7 if copies > 1 else None, torch.ones(9, dtype=torch.int64) if counted else None,
            torch.arange(tokens) % 3 > 0 if padded else None,
        )  # fmt: skip
        found = choose_experts(x, weight, 3, local=local, backend=backend)
        return [*found, *([local.counts] if local.counts is not None else [])]

    agree(run)
    ids = run("triton")[0]
    assert ids.unique().tolist() == sorted(set(slots.flatten().tolist())) or tokens == 1
    if counted:
        real = sum(at % 3 > 0 for at in range(tokens)) if padded else tokens
        assert int(run("triton")[2].sum()) == 9 + 3 * real


KINDS = ["dense", "int4", "int8", "fp8"]
WAYS = [(1, True), (3, True), (3, False), (20, False)]
"""(tokens, whether they are served alone, each with its experts' rows)."""


# Every kind with every way and every number of groups, every way with every number of groups.
@pytest.mark.parametrize(
    ("kind", "groups", "tokens", "alone"),
    [(kind, 1 + (at + way) % 2, *WAYS[way]) for at, kind in enumerate(KINDS) for way in range(len(WAYS))],
)
def test_experts(kind: str, groups: int, tokens: int, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_experts, "ALONE", dict.fromkeys((True, False), 99 if alone else 0))
    x = torch.randn(tokens, 64)
    ids = torch.stack([torch.randperm(7)[:2] for _ in range(tokens)])
    ids[ids == 3] = 4  # an expert without tokens, and one that may come twice
    shares = torch.rand(tokens, 2)
    inner = 24 if kind == "dense" else 64
    gate_up, down = weights_of(kind, 7, 2 * inner, 64, groups), weights_of(kind, 7, 64, inner, 2)
    agree(lambda backend: [expert_swiglu(x, ids, shares, gate_up, down, backend=backend)])


@pytest.mark.parametrize(("tokens", "alone"), [(1, True), (10, False)])
@pytest.mark.parametrize(("kind", "limit", "width"), [("dense", 1.0, 96), ("mxfp4", 1.0, 96), ("int8", None, 32)])
def test_biases_and_a_clamped_gate(
    kind: str, limit: float | None, width: int, tokens: int, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss's, with others' experts beside; 96 columns are read in steps that do not divide them."""
    monkeypatch.setattr(launch_experts, "ALONE", dict.fromkeys((True, False), 99 if alone else 0))
    x, ids, shares = torch.randn(tokens, width), torch.rand(tokens, 4).topk(3, -1).indices, torch.rand(tokens, 3)
    gate_up, down = (
        weights_of(kind, 3, *shape, 1)._replace(bias=torch.randn(3, shape[0])) for shape in ((64, width), (width, 32))
    )
    options = {"limit": limit, "local_share": 0.7}  # of the fourth expert nobody is here
    agree(lambda backend: [expert_swiglu(x, ids, shares, gate_up, down, **options, backend=backend)])  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "groups", "rounding"), [("int8", 1, "int8"), ("int4", 2, "int8"), ("fp8", 2, "fp8")])
@pytest.mark.parametrize(("tokens", "alone", "searched"), [(2, True, 99), (20, False, 8)])
def test_rounded_inputs(
    kind: str, groups: int, rounding: Rounding, tokens: int, alone: bool, searched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W8A8: what the products of rounded values give in float32, on one rank of two, but for codes of h that a rounding error moves."""
    monkeypatch.setattr(launch_experts, "ALONE", dict.fromkeys((True, False), 99 if alone else 0))
    monkeypatch.setattr(launch_experts, "SEARCHED", searched)
    x, ids, shares = 3 * torch.randn(tokens, 64), torch.rand(tokens, 6).topk(3, -1).indices, torch.rand(tokens, 3)
    gate_up, down = weights_of(kind, 3, 64, 64, groups), weights_of(kind, 3, 64, 32, 1)
    here = ids.clamp(max=3)  # others' are nobody's

    def run(backend: str) -> list[torch.Tensor]:
        return [expert_swiglu(x, here, shares, gate_up, down, local_share=0.5, rounding=rounding, backend=backend)]

    (found,), (wanted,) = run("triton"), run("reference")
    assert (found - wanted).abs().max() < 5e-3 * wanted.abs().max()
    plain = expert_swiglu(x, here, shares, gate_up, down, local_share=0.5, backend="reference")
    assert 1e-3 < (plain - wanted).norm() / wanted.norm() < 0.1  # inputs were rounded


@pytest.mark.parametrize(
    ("kind", "columns", "groups"), [("int4", 96, 3), ("int8", 64, 1), ("fp8", 160, 5), ("mxfp4", 96, 3)]
)
def test_widened_codes_are_the_dequantized_ones(kind: str, columns: int, groups: int) -> None:
    weights = weights_of(kind, 3, 48, columns, groups)
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(widened(weights, dtype), weights.dequantize(dtype))


def test_four_bit_floats_are_what_the_format_says() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(2)[None, None].repeat(1, 16, 1)
    weights = ExpertWeights(pack_pairs(codes, 32), torch.full((1, 1, 16), 128, dtype=torch.uint8))
    plain = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert weights.dequantize(torch.float32)[0, 0, :16].tolist() == [
        2 * one for one in (*plain, *(-one for one in plain))
    ]
    assert weights.kind == "mxfp4" and weights.sizes == (1, 16, 32)


@pytest.mark.parametrize(
    ("tokens", "alone", "searched"), [(2, True, 99), (2, False, 99), (20, False, 99), (20, False, 8)]
)
def test_ranks_sum_to_the_layer(tokens: int, alone: bool, searched: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of three ranks has two of six experts; visits of others' are nobody's, of which nothing is read or added."""
    monkeypatch.setattr(launch_experts, "ALONE", dict.fromkeys((True, False), 99 if alone else 0))
    monkeypatch.setattr(launch_experts, "SEARCHED", searched)
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    kind = "int8" if searched == 8 else "dense"
    x, shares, ids = torch.randn(tokens, 32), torch.rand(tokens, 3), torch.rand(tokens, 6).topk(3, -1).indices
    ids[0] = torch.tensor([1, 0, 5])  # none for the rank in the middle
    gate_up, down = weights_of(kind, 6, 32, 32, 1), weights_of(kind, 6, 32, 16 if kind == "dense" else 32, 1)
    if kind == "int8":
        gate_up = weights_of(kind, 6, 64, 32, 1)
    total = torch.zeros(tokens, 32)
    for rank in range(3):
        part = [
            ExpertWeights(*(None if one is None else one[2 * rank : 2 * rank + 2] for one in own))  # type: ignore[arg-type]
            for own in (gate_up, down)
        ]
        here = torch.where(ids // 2 == rank, ids % 2, 2)
        found, wanted = (
            expert_swiglu(x, here, shares, *part, local_share=1 / 3, backend=name) for name in ("triton", "reference")
        )
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        total += found
    wanted = expert_swiglu(x, ids, shares, gate_up, down, backend="reference")
    torch.testing.assert_close(total, wanted, atol=1e-4, rtol=1e-4)


def poisoned(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.empty` full of what no sum may have."""

    def made(*given: Any, **options: Any) -> torch.Tensor:
        found = empty(*given, **options)
        return found.fill_(float("nan")) if found.is_floating_point() else found

    return made


def test_listed_visits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_experts, "SEARCHED", 8)
    x, shares = torch.randn(40, 32), torch.rand(40, 3)
    ids = torch.randint(0, 4, (40, 3))
    ids[:, 0] = 2  # more than a tile holds
    gate_up, down = weights_of("int8", 6, 64, 32, 1), weights_of("int8", 6, 32, 32, 1)
    agree(lambda backend: [expert_swiglu(x, ids, shares, gate_up, down, backend=backend)])
