"""The fused kernels in the interpreter against plain torch: norm, rotation, gate, loss, experts, sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from hone.base.errors import SpecError
from hone.ops import fused, linear_cross_entropy
from hone.ops.moe import api as grouped
from hone.ops.reference import Lesson
from hone.ops.sample import api as sampling


def agree(run: Callable[[str], Sequence[torch.Tensor]], other: str = "reference", close: float = 1e-4) -> None:
    for ours, plain in zip(run("triton"), run(other), strict=True):
        torch.testing.assert_close(ours, plain, atol=close, rtol=close)


def graded(out: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    """The output and its gradients under an upstream that differs everywhere."""
    flow = torch.arange(out.numel()).cos().view(out.shape)
    return [out, *torch.autograd.grad(out, leaves, flow.to(out.dtype))]


@pytest.mark.parametrize("shape", [(7, 24), (2, 3, 5, 16), (2, 4096)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(shape: tuple[int, ...], with_residual: bool) -> None:
    heads = torch.randn(*shape[:-2], shape[-2] + 2, shape[-1], requires_grad=True)
    weight = torch.rand(shape[-1], requires_grad=True)
    residual = torch.randn(shape, requires_grad=True)

    def run(backend: str) -> list[torch.Tensor]:
        x = heads[..., 1:-1, :]  # heads of a fused projection: rows in runs
        if not with_residual:
            return graded(fused.rms_norm(x, weight, 1e-5, backend=backend), heads, weight)
        y, summed = fused.rms_norm(x, weight, 1e-5, residual, backend=backend)
        return graded(torch.cat((y, summed * 2)), heads, weight, residual)

    agree(run, "lean")


def test_norm_codes() -> None:
    x, residual = torch.randn(2, 9, 24)
    weight = torch.rand(24)
    agree(lambda backend: fused.rms_norm(x, weight, 1e-5, residual, "int8", backend=backend), close=1e-6)
    # The interpreter cuts float8 where the hardware rounds, so only the scales can be compared.
    agree(lambda backend: fused.rms_norm(x, weight, 1e-5, residual, "fp8", backend=backend)[1:])


def test_swiglu() -> None:
    gate_up = torch.randn(3, 5, 34, requires_grad=True)
    agree(lambda backend: graded(fused.swiglu(gate_up, backend=backend), gate_up), "lean")


@pytest.mark.parametrize("angles", [(2, 5), (5,), (2, 1)])
def test_rope(angles: tuple[int, ...]) -> None:
    x = torch.randn(2, 5, 10, 16, requires_grad=True)
    cos, sin = torch.randn(2, *angles, 1, 8)
    agree(lambda backend: graded(fused.rope(x[:, :, 2:8], cos, sin, backend=backend), x), "lean")
    inner = x.detach().clone()
    fused.rope(inner[:, :, 2:8], cos, sin, in_place=True, backend="triton")
    torch.testing.assert_close(inner[:, :, 2:8], fused.rope(x[:, :, 2:8], cos, sin).detach())
    assert torch.equal(inner[:, :, 8:], x[:, :, 8:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_rope_write(dtype: torch.dtype) -> None:
    qkv = torch.randn(6, 8, 16)
    cos, sin = torch.randn(2, 6, 1, 8)
    slots = torch.tensor([4, 5, 3, 10, 9, 12])

    def run(backend: str) -> list[torch.Tensor]:
        turned, (k_pages, v_pages) = qkv.clone(), torch.full((2, 4, 2, 4, 16), 7.0).to(dtype)
        q, k, v = turned.split([4, 2, 2], dim=1)
        scales = torch.full((2, 4, 2, 4), 3.0) if dtype != torch.float32 else (None, None)
        fused.rope_write(q, k, v, cos, sin, k_pages, v_pages, slots // 4, slots % 4, *scales, backend=backend)
        if dtype == torch.float32:
            return [turned, k_pages, v_pages]
        # The interpreter cuts float8 where the hardware rounds: its codes cannot be compared.
        return [turned, *scales] if dtype != torch.int8 else [turned, *scales, k_pages, v_pages]

    agree(run)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(
    "options", [{}, {"z_loss": 0.1}, {"label_smoothing": 0.2}, {"lesson": 2.0}, {"lesson": 1.0, "z_loss": 0.1}]
)
def test_loss(reduction: str, options: dict) -> None:
    x, weight = torch.randn(13, 24, requires_grad=True), torch.randn(77, 24, requires_grad=True)
    targets = torch.randint(0, 77, (13,))
    targets[3] = -100
    if "lesson" in options:
        options = {**options, "lesson": Lesson(torch.randn(13, 8), torch.randn(77, 8), 0.4, options["lesson"])}

    def run(backend: str) -> list[torch.Tensor]:
        loss = linear_cross_entropy(x, weight, targets, reduction=reduction, rows=5, backend=backend, **options)
        return graded(loss, x, weight)

    agree(run)
    with torch.no_grad():
        agree(lambda backend: [linear_cross_entropy(x, weight, targets, rows=5, backend=backend, **options)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_loss_without_valid_targets(dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 6).to(dtype).requires_grad_(), torch.randn(9, 6).to(dtype).requires_grad_()
    total = linear_cross_entropy(x, weight, torch.full((4,), -100), reduction="sum", backend="triton")
    total.backward()
    assert total.item() == 0 and not x.grad.any() and not weight.grad.any()


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(300, 5, 2), (3, 40, 3), (1, 1, 1), (700, 5, 3)])
def test_permute_and_back(tokens: int, experts: int, top_k: int) -> None:
    x = torch.randn(tokens, 24, requires_grad=True)
    weights = torch.rand(tokens, top_k, requires_grad=True)
    ids = torch.randint(0, experts, (tokens, top_k))

    def run(backend: str) -> list[torch.Tensor]:
        rows, ends, place = grouped.permute(x, ids, experts, backend=backend)
        out = torch.cat(
            (grouped.unpermute(rows, place, weights, backend=backend), grouped.unpermute(rows, place, backend=backend))
        )
        return [rows, ends, place, *graded(out, x, weights)]

    agree(run)


@pytest.mark.parametrize("width", [32, 40])
def test_few_tokens(width: int) -> None:
    ends = torch.tensor([3, 3, 20, 21, 40], dtype=torch.int32)  # none, one, and more than a tile holds
    x, weight = torch.randn(40, width), torch.randn(5, 20, width)
    agree(lambda backend: [grouped.grouped_linear(x, weight, ends, backend=backend)])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {
            "top_k": [0, 1, 3, 300, 7, 50],
            "top_p": [1.0, 0.5, 0.2, 0.0, 0.99, 0.7],
            "min_p": [0.0, 0.1, 0.2, 0.0, 0.5, 0.01],
        },
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sample(options: dict, dtype: torch.dtype) -> None:
    logits = (torch.randn(6, 300) * 3).to(dtype)
    logits[:, 7] = logits[:, 9]  # equal values stay or go together
    for seed in range(3):
        keys = sampling.noise_keys(range(seed, seed + 6), range(6))
        for heat in (1.0, [0.0, 0.5, 1.3, 2.0, 0.0, 1.0]):
            agree(lambda backend, h=heat, k=keys: [sampling.sample(logits, h, **options, keys=k, backend=backend)])


def test_graphs_hold_torch_ops() -> None:
    """Under torch.compile the kernels are ops with gradients; called eagerly they are Functions: both give the same."""
    x, residual = torch.randn(2, 3, 4, 16).unbind()
    weight, angles = torch.rand(16, requires_grad=True), torch.randn(3, 1, 4)
    x.requires_grad_()

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y, summed = fused.rms_norm(x, weight, 1e-5, residual, backend="triton")
        gated = fused.swiglu(y + summed, backend="triton")
        return fused.rope(gated, angles.cos(), angles.sin(), backend="triton")

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for ours, plain in zip(*(graded(way(x, weight), x, weight) for way in (compiled, run)), strict=True):
        assert torch.equal(ours, plain)
    with torch.no_grad():
        assert torch.equal(compiled(x, weight), run(x, weight))


def test_strided_inputs_are_read_as_what_they_are() -> None:
    x, weight = torch.randn(6, 8), torch.rand(16)[::2]
    agree(lambda backend: [fused.rms_norm(x, weight, 1e-5, backend=backend)], "lean")
    labels, head = torch.randint(0, 9, (6, 2)), torch.randn(9, 8)
    agree(lambda backend: [linear_cross_entropy(x, head, labels[:, 1], backend=backend)])
    keys = torch.stack((sampling.noise_keys(range(6), range(6)),) * 2, 1)[:, 1]
    agree(lambda backend: [sampling.sample(x, 1.0, keys=keys, backend=backend)])
    cos, sin, places = *torch.randn(2, 6, 1, 4), torch.tensor([[4, 0], [5, 1], [3, 2], [0, 3], [1, 0], [2, 1]])

    def write(backend: str) -> list[torch.Tensor]:
        q, (k, v) = x.view(6, 1, 8).clone(), torch.randn(2, 6, 8, 2, generator=torch.Generator().manual_seed(1)).mT
        made = torch.zeros(2, 6, 2, 4, 8)
        fused.rope_write(q, k, v, cos, sin, *made, places[:, 0], places[:, 1], backend=backend)
        return [q, made]

    agree(write)
    with pytest.raises(SpecError, match="q with strides"):
        fused.rope_write(
            torch.randn(6, 8, 2).mT, *torch.randn(2, 6, 2, 8), cos, sin, *torch.zeros(2, 6, 2, 4, 8), *places.T,
            backend="triton",
        )  # fmt: skip


def test_loss_in_a_graph() -> None:
    x, weight = torch.randn(13, 24, requires_grad=True), torch.randn(77, 24, requires_grad=True)
    targets = torch.randint(0, 77, (13,))

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(x, weight, targets, rows=5, backend="triton")

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for ours, plain in zip(*(graded(way(x, weight), x, weight) for way in (compiled, run)), strict=True):
        torch.testing.assert_close(ours, plain)
