"""Functions that only kernels call are compiled into them, and are plain Python functions outside."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

pytest.importorskip("numba")

from hone.measure import compilers
from hone.text.compiled import allocating, entry, inlined, kernel


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
    all_of = entry(_all)
    assert all_of(20) == _all(20) == 41
    assert len(all_of.signatures) == 1
    assert _twice(4) == 8 and _more(1) == 2 and _listed(1) == [1]


def test_what_was_compiled_from_another_files_old_text_is_not_taken(tmp_path, monkeypatch):
    """Numba itself looks at the caller's file alone; what a kernel imports is part of its key here."""
    package = tmp_path / "kernels" / "room"
    package.mkdir(parents=True)
    (package / "outer.py").write_text(
        "from hone.text.compiled import entry\nfrom kernels.room.inner import add\n"
        "@entry\ndef total(n):\n    return add(n)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = []
    for more in (1, 1, 2):
        (package / "inner.py").write_text(
            f"from hone.text.compiled import kernel\n@kernel\ndef add(n):\n    return n + {more}\n"
        )
        for name in [name for name in sys.modules if name.partition(".")[0] == "kernels"]:
            del sys.modules[name]
        for kept in (compilers.sources_digest, compilers._text_and_imports):
            kept.cache_clear()
        total = import_module("kernels.room.outer").total
        found.append((total(1), sum(total.stats.cache_hits.values())))
    assert found == [(2, 0), (2, 1), (3, 0)]
