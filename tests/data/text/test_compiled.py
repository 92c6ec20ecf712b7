"""What only kernels may call says so when Python does, and works inside of kernels."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("numba")

from hone.data.text.compiled import allocating, entry, inlined, kernel


@kernel
def _twice(number):
    return 2 * number


@inlined
def _more(number):
    return number + 1


@allocating
def _listed(number):
    return [number]


def _all(number):
    return _listed(_more(_twice(number)))[0]


def test_inner_functions_are_for_kernels_alone():
    assert entry(_all)(20) == 41
    for inner in (_twice, _more, _listed):
        with pytest.raises(TypeError, match=f"only kernels call {inner.__name__}"):
            inner(1)
    assert _twice.py_func(4) == 8


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was_after_compiling(enabled):
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        assert entry(lambda number: number + 3)(1) == 4
        with pytest.raises(Exception, match=r"cannot_be_found|Untyped"):
            entry(lambda number: cannot_be_found)(1)  # noqa: F821
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if before else gc.disable()
