"""The linear head's cross entropy against torch's own functions on whole logits, and its arguments' errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.base.errors import SpecError
from hone.cost.chunks import kernel_chunk_tokens
from hone.ops import choose
from hone.ops.dispatch import Where
from hone.ops.loss.api import linear_cross_entropy
from hone.ops.loss.reference import Teacher

F64 = torch.float64
H200 = Where("cuda", (9, 0), 132, (3, 6))


def inputs(tokens: int = 23, vocab: int = 41, width: int = 7) -> tuple[torch.Tensor, ...]:
    x = torch.randn(tokens, width, dtype=F64, requires_grad=True)
    weight = torch.randn(vocab, width, dtype=F64, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,))
    targets[::5] = -100
    return x, weight, targets


def agree(ours: torch.Tensor, plain: torch.Tensor, *leaves: torch.Tensor) -> None:
    torch.testing.assert_close(ours, plain)
    for one, two in zip(torch.autograd.grad(1.7 * ours, leaves), torch.autograd.grad(1.7 * plain, leaves)):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("chunk", [1, 8, None])
def test_label_smoothing_is_torchs(reduction: str, smoothing: float, chunk: int | None) -> None:
    x, weight, targets = inputs()
    plain = F.cross_entropy(x @ weight.T, targets, reduction=reduction, label_smoothing=smoothing)
    ours = linear_cross_entropy(x, weight, targets, reduction=reduction, label_smoothing=smoothing, chunk_tokens=chunk)
    agree(ours, plain, x, weight)


@pytest.mark.parametrize("chunk", [4, None])
def test_a_softcap_is_the_tanh_of_the_logits(chunk: int | None) -> None:
    x, weight, targets = inputs()
    lesson = Teacher(torch.randn(23, 5, dtype=F64), torch.randn(41, 5, dtype=F64), 0.3, softcap=1.5)
    for teacher in (None, lesson):
        capped = 2.0 * torch.tanh(x @ weight.T / 2.0)
        plain = F.cross_entropy(capped, targets, reduction="sum")
        if teacher is not None:
            valid = targets != -100
            taught = F.log_softmax(1.5 * torch.tanh(lesson.hidden @ lesson.weight.T / 1.5), -1)[valid]
            soft = F.kl_div(F.log_softmax(capped[valid], -1), taught, reduction="sum", log_target=True)
            plain = 0.3 * soft + 0.7 * plain
        options = {"softcap": 2.0, "teacher": teacher, "chunk_tokens": chunk}
        agree(linear_cross_entropy(x, weight, targets, reduction="sum", **options), plain, x, weight)
    assert choose("linear_cross_entropy", H200, dtype=torch.bfloat16, softcap=True).backend == "reference"


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_a_lesson_mixes_in_the_teacher(temperature: float) -> None:
    x, weight, targets = inputs()
    lesson = Teacher(torch.randn(23, 5, dtype=F64), torch.randn(41, 5, dtype=F64), 0.3, temperature)
    valid = targets != -100
    student, teacher = (x @ weight.T)[valid], (lesson.hidden @ lesson.weight.T)[valid]
    soft = F.kl_div(F.log_softmax(student / temperature, -1), F.softmax(teacher / temperature, -1), reduction="sum")
    hard = F.cross_entropy(student, targets[valid], reduction="sum") + 0.1 * student.logsumexp(-1).square().sum()
    plain = 0.3 * temperature**2 * soft + 0.7 * hard
    agree(
        linear_cross_entropy(x, weight, targets, reduction="sum", z_loss=0.1, teacher=lesson, chunk_tokens=6),
        plain,
        x,
        weight,
    )


def test_the_lesson_may_come_in_the_shape_of_a_batch() -> None:
    x, weight, targets = inputs(tokens=24)
    lesson = Teacher(torch.randn(24, 5, dtype=F64), torch.randn(41, 5, dtype=F64), 0.3)
    flat = linear_cross_entropy(x, weight, targets, teacher=lesson)
    batch = Teacher(lesson.hidden.view(2, 12, 5), lesson.weight, 0.3)
    torch.testing.assert_close(linear_cross_entropy(x.view(2, 12, 7), weight, targets.view(2, 12), teacher=batch), flat)


def test_gradcheck() -> None:
    x, weight, targets = inputs(tokens=5, vocab=6, width=3)
    assert torch.autograd.gradcheck(
        lambda a, b: linear_cross_entropy(a, b, targets, z_loss=0.01, label_smoothing=0.1, chunk_tokens=2), (x, weight)
    )


@pytest.mark.slow
def test_a_compiled_loss_has_its_gradients() -> None:
    x, weight, targets = inputs()

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, targets, z_loss=0.01, chunk_tokens=5)

    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for ours, plain in zip(*(torch.autograd.grad(way(x, weight), (x, weight)) for way in (compiled, run)), strict=True):
        assert plain.any()
        torch.testing.assert_close(ours, plain)


def test_wrong_arguments_are_named() -> None:
    x, weight, targets = inputs()
    with pytest.raises(SpecError, match="do not fit"):
        linear_cross_entropy(x, weight, targets[:-1])
    with pytest.raises(SpecError, match="do not fit"):
        linear_cross_entropy(x, weight[:, :-1], targets)
    with pytest.raises(SpecError, match="label_smoothing and a teacher"):
        linear_cross_entropy(x, weight, targets, label_smoothing=0.1, teacher=Teacher(x, weight, 0.5))
    with pytest.raises(SpecError, match="reduction is 'none'"):
        linear_cross_entropy(x, weight, targets, reduction="none")
    for chunk in (0, -4):  # a negative step walks over no token: a loss of 0 and gradients that nobody wrote
        with pytest.raises(SpecError, match=f"chunk_tokens is {chunk}"):
            linear_cross_entropy(x, weight, targets, chunk_tokens=chunk)
    with pytest.raises(SpecError, match="do not fit"):
        linear_cross_entropy(x, weight, targets.float())
    for lesson, says in (
        (Teacher(x[:-1], weight, 0.5), "hidden"),
        (Teacher(x, weight[:, :-1], 0.5), "hidden"),
        (Teacher(x, weight[:-1], 0.5), "tokens of the student"),
        (Teacher(x, weight, 0.5, 0.0), "temperature is positive"),
    ):
        with pytest.raises(SpecError, match=says):
            linear_cross_entropy(x, weight, targets, teacher=lesson)


@pytest.mark.parametrize(("tokens", "chunk"), [(1, 1024), (8192, 1024), (8193, 1280), (20000, 2560), (10**6, 4096)])
def test_a_gpu_holds_an_eighth_of_the_tokens(tokens: int, chunk: int) -> None:
    assert kernel_chunk_tokens(tokens) == chunk


def test_where_it_runs() -> None:
    def backend(where: Where, dtype: torch.dtype) -> str:
        return choose("linear_cross_entropy", where, dtype=dtype).backend

    assert [backend(H200, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)] == ["triton"] * 3
    assert backend(H200, F64) == backend(Where(), torch.bfloat16) == "reference"
    assert backend(Where("cuda", (7, 5), 40, (3, 6)), torch.float16) == "reference"
