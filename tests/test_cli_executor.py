"""What a command line says of executors."""

from __future__ import annotations

import pytest

from hone.base.errors import SpecError
from hone.cli.options import executor


def test_an_executor_from_options():
    assert executor({"quiet": "true"}) == {"kind": "serial", "workers": 0, "store": ""}
    assert executor({"executor": "processes", "workers": "3", "executor.store": "s3://bucket/runs"}) == {
        "kind": "processes",
        "workers": 3,
        "store": "s3://bucket/runs",
    }
    chosen = executor({"executor": "ray", "executor.address": "local"})
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
def test_mistakes_of_options(options, message):
    with pytest.raises(SpecError, match=message):
        executor(options)
