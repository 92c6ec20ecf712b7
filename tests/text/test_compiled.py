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


@pytest.mark.parametrize("inner", ["room", "below"])
def test_what_was_compiled_from_another_files_old_text_is_not_taken(inner, tmp_path, monkeypatch):
    """Numba itself looks at the caller's file alone; what a kernel imports, from whatever room, is part of its key here."""
    package = tmp_path / "kernels"
    for room in ("room", "below"):
        (package / room).mkdir(parents=True)
    (package / "room" / "outer.py").write_text(
        f"from hone.text.compiled import entry\nfrom kernels.{inner}.inner import add\n"
        "@entry\ndef total(n):\n    return add(n)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = []
    for more in (1, 1, 2):
        (package / inner / "inner.py").write_text(
            f"from hone.text.compiled import kernel\n@kernel\ndef add(n):\n    return n + {more}\n"
        )
        for name in [name for name in sys.modules if name.partition(".")[0] == "kernels"]:
            del sys.modules[name]
        for kept in (compilers.sources_digest, compilers._text_and_imports):
            kept.cache_clear()
        total = import_module("kernels.room.outer").total
        found.append((total(1), sum(total.stats.cache_hits.values())))
    assert found == [(2, 0), (2, 1), (3, 0)]


def test_the_key_holds_what_a_modules_namespace_does_and_nothing_else(tmp_path, monkeypatch):
    """What is imported for types or in functions may be loaded or not: in the key it would compile kernels again for nothing."""
    files = {
        "outer": "import keyed.low\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import keyed.types\n"
        "else:\n    import keyed.high\ndef late():\n    import keyed.late\n",
        **dict.fromkeys(("low", "types", "high", "late"), ""),
    }
    (tmp_path / "keyed").mkdir()
    for name, text in files.items():
        (tmp_path / "keyed" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in files:
        import_module(f"keyed.{name}")

    def digest() -> str:
        for kept in (compilers.sources_digest, compilers._text_and_imports):
            kept.cache_clear()
        return compilers.sources_digest("keyed.outer")

    before, changes = digest(), []
    for name in files:
        path = tmp_path / "keyed" / f"{name}.py"
        path.write_text(f"{files[name]}#\n")
        if digest() != before:
            changes.append(name)
        path.write_text(files[name])
    assert changes == ["outer", "low", "high"]
