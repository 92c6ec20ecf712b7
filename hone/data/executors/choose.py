"""Reads the executor from command line options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hone.base.errors import SpecError
from hone.base.spec import parse_scalar
from hone.data import EXECUTORS


def from_options(options: Mapping[str, str]) -> dict[str, Any]:
    """The value of `Run.executor` from the options `executor`, `workers` and `executor.FIELD`; serial without them.

    Raises SpecError for an unknown executor or field.
    """
    fields = {
        name.removeprefix("executor."): parse_scalar(value)
        for name, value in options.items()
        if name == "workers" or name.startswith("executor.")
    }
    if fields and "executor" not in options:
        named = ", ".join(f"--{name}" for name in options if name == "workers" or name.startswith("executor."))
        raise SpecError(f"{named} without an executor", fix=f"add --executor=NAME, one of: {', '.join(EXECUTORS)}")
    return EXECUTORS.read({"kind": options.get("executor", "serial"), **fields}).model_dump(mode="json")
