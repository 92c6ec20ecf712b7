"""Functions that only kernels call are compiled into them, and are plain Python functions outside."""

from __future__ import annotations

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


def test_inner_functions_work_in_kernels_and_outside():
    compiled = entry(_all)
    assert compiled(20) == _all(20) == 41
    assert len(compiled.signatures) == 1
    assert _twice(4) == 8 and _more(1) == 2 and _listed(1) == [1]
