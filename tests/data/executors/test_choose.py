"""What a command line says of executors."""

from __future__ import annotations

import pytest

from hone.base.errors import SpecError
from hone.data.executors.choose import from_options


def test_an_executor_from_options():
    assert from_options({"quiet": "true"}) == {"kind": "serial", "workers": 0, "store": ""}
    assert from_options({"executor": "processes", "workers": "3", "executor.store": "s3://bucket/runs"}) == {
        "kind": "processes",
        "workers": 3,
        "store": "s3://bucket/runs",
    }
    chosen = from_options({"executor": "ray", "executor.address": "local"})
    assert chosen == {"kind": "ray", "workers": 0, "store": "", "address": "local"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": "3"}, "--workers without an executor"),
        ({"executor": "proceses"}, "did you mean 'processes'"),
        ({"executor": "processes", "workers": "-1"}, "workers"),
        ({"executor": "processes", "executor.wrkers": "1"}, "wrkers"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(SpecError, match=message):
        from_options(options)
