"""The account of a trace of a GPU's steps: what computed, what was communicated beside it, and what each pause waited for."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gaps import account


def kernel(name: str, at: float, took: float, link: int, launched: float) -> list[dict[str, Any]]:
    args = {"correlation": link}
    return [
        {"ph": "X", "cat": "kernel", "name": name, "ts": at, "dur": took, "args": args},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launched, "dur": 2, "args": args},
    ]


def step(begin: float, number: int) -> list[dict[str, Any]]:
    """1000 us: a product; rows on their way, half of them beside another one; a host that waits; one that launches late; a kernel that waits in order."""
    one = 10 * number
    events = [
        *kernel("product", begin, 100, one, begin - 50),
        *kernel("ncclDevKernel_SendRecv", begin + 100, 200, one + 1, begin - 40),
        *kernel("gate", begin + 200, 100, one + 2, begin - 30),
        *kernel("void at::sum<float>(float)", begin + 400, 100, one + 3, begin + 390),
        *kernel("late", begin + 550, 50, one + 4, begin + 540),
        *kernel("ordered", begin + 700, 300, one + 5, begin + 560),
    ]
    waits = {"ph": "X", "cat": "cuda_runtime", "name": "cudaEventSynchronize", "ts": begin + 250, "dur": 130}
    return [*events, {**waits, "args": {}}, {"ph": "M", "name": "process_name"}]


def test_what_the_time_went_to() -> None:
    events = [event for number in range(4) for event in step(1000.0 * number, number)]
    found = account(events, 4)
    assert found is not None
    ms = 1e-3
    assert found.step_s == pytest.approx(1.0 * ms)
    assert found.computing_s == pytest.approx(0.65 * ms) and found.busy == pytest.approx(0.65)
    assert found.moving_s == pytest.approx(0.2 * ms) and found.exposed_s == pytest.approx(0.1 * ms)
    assert found.hidden == pytest.approx(0.5) and found.idle_s == pytest.approx(0.25 * ms)
    pauses = {(kind, at): (inside, seconds / ms, times) for kind, inside, at, seconds, times in found.pauses}
    assert pauses["transfer", "product -> gate"] == ("ncclDevKernel_SendRecv", pytest.approx(0.1), 1)
    assert pauses["host", "gate -> sum"] == ("cudaEventSynchronize", pytest.approx(0.1), 1)
    assert pauses["host", "sum -> late"] == ("launching", pytest.approx(0.05), 1)
    assert pauses["order", "late -> ordered"] == ("", pytest.approx(0.1), 1)
    assert found.kernels[0] == ("ordered", pytest.approx(0.3 * ms), 1)
    assert found.blocking == [("cudaEventSynchronize", pytest.approx(0.13 * ms), 1)] and found.launches == 6
    assert any("cudaEventSynchronize" in line for line in found.lines())


def test_without_kernels_there_is_no_account() -> None:
    assert account([{"ph": "X", "cat": "cpu_op", "name": "mm", "ts": 0, "dur": 1}], 4) is None
