"""Memory policies: tried in a child, applied in a child, and read back from the kernel's own tables."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hone.measure.topology import policy
from hone.measure.topology.policy import bound_pages, prefer, trial


def test_a_child_tries_first_and_its_answer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    trial.cache_clear()
    first = trial("preferred", 0)
    monkeypatch.setattr(policy.subprocess, "run", lambda *_, **__: pytest.fail("a second child was started"))
    assert trial("preferred", 0) == first


@pytest.mark.parametrize(("code", "said"), [(1, "Operation not permitted"), (-31, "ends the process here (signal 31)")])
def test_where_it_is_forbidden_nothing_is_tried_here(monkeypatch: pytest.MonkeyPatch, code: int, said: str) -> None:
    trial.cache_clear()
    monkeypatch.setattr(policy, "_number", lambda _: 238)
    monkeypatch.setattr(policy.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], code))
    monkeypatch.setattr(policy, "_syscall", lambda *_: pytest.fail("called although a child could not"))
    found, why = prefer(0, strict=True)
    assert found == "first touch" and said in why
    assert said in bound_pages([(0, 4096)], 0)
    trial.cache_clear()


def test_strict_falls_back_to_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_number", lambda _: 238)
    monkeypatch.setattr(policy, "trial", lambda one, _: "bind is forbidden" if one == "bind" else "")
    calls: list[int] = []
    monkeypatch.setattr(policy, "_syscall", lambda number, mode, *_: calls.append(mode) or 0)
    assert prefer(0, strict=True) == ("preferred", "bind is forbidden") and calls == [1]


def test_pages_of_a_child_are_where_it_wants_them() -> None:
    """In a child, whose policy ends with it: node 0 is there on every machine."""
    code = (
        "from hone.measure.topology.policy import *\n"
        "from hone.measure.probe.buffers import Buffer\n"
        "import numpy as np\n"
        "found, why = prefer(0, strict=True)\n"
        "buffer = Buffer(1 << 22, huge=False); before = nodes_of_pages(buffer.address, 1 << 22)\n"
        "buffer.view(np.uint8)[:] = 1\n"
        "print(found, '|', why, '|', before, '|', nodes_of_pages(buffer.address, 1 << 22), '|', bound_pages([(buffer.address, 1 << 22)], 0))\n"
        "by_first_touch()\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    found, why, before, after, bound = (part.strip() for part in out.split("|"))
    if found == "first touch":
        assert why and bound, "a policy that is not allowed is said"
        return
    assert found == "bind" and not why and not bound
    assert (before, after) == ("{}", "{0: 256}") or (before, after) == ("None", "None")


def test_a_node_that_is_not_there_is_refused() -> None:
    assert trial("bind", 1000), "no machine here has a thousand nodes"
    import ctypes

    memory = ctypes.create_string_buffer(1 << 16)
    assert bound_pages([(ctypes.addressof(memory), 1 << 16)], 1000)
