"""Values of a `quantization_config` block: checks shared by the methods, and transformers' patterns of skipped modules."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from hone.base.errors import ArtifactError, SpecError
from hone.model.quantized.layouts import problem
from hone.model.quantized.scheme import Quantization, Scheme


def unsupported(where: str, key: str, value: Any, fix: str) -> ArtifactError:
    """The error for a value that hone does not compute exactly."""
    return ArtifactError(f"{where}: quantization_config has {key} = {value!r}", fix=fix)


def check(values: dict[str, Any], allowed: dict[str, tuple[Any, ...]], where: str, fix: str) -> None:
    """Raises ArtifactError for a value that is not among those allowed; None in a tuple allows a missing key."""
    for key, those in allowed.items():
        value = values.get(key)
        if not any(value is one or (type(value) is type(one) and value == one) for one in those):
            raise unsupported(where, key, value, fix)


def checked(scheme: Scheme, where: str, fix: str) -> Scheme:
    """`scheme`, which hone can run. Raises ArtifactError otherwise."""
    reason = problem(scheme)
    if reason is not None:
        raise ArtifactError(f"{where}: quantization_config has {reason}", fix=fix)
    return scheme


def group_size_of(values: dict[str, Any], where: str, fix: str) -> int:
    """`group_size`: a number of columns, 0 for one scale per row (-1 in the block)."""
    size = values.get("group_size", 128)
    if type(size) is not int or not (size > 0 or size == -1):
        raise unsupported(where, "group_size", size, fix)
    return max(size, 0)


def skipping(names: Iterable[str] | None) -> tuple[str, ...]:
    """`Quantization.ignore` for names of modules that are not quantized, as transformers 5 matches them.

    A name matches from the start up to a dot or the end, also as a regular expression, or as a suffix
    (`transformers.quantizers.quantizers_utils.should_convert_module`).
    """
    found: list[str] = []
    for name in names or ():
        found.append(rf"re:.*{re.escape(name)}$")
        try:
            re.compile(name)
        except re.error:
            continue
        found.append(rf"re:(?:{name})(?:(?<=\.)|(?=\.|$))")
    return tuple(found)


def only_scheme(quantization: Quantization, method: str) -> Scheme:
    """The scheme of all modules. Raises SpecError for several, which the block of `method` cannot say."""
    schemes = [scheme for _, scheme in quantization.groups]
    if len(schemes) > 1:
        wide = {name: sorted({getattr(scheme, name) for scheme in schemes}) for name in ("bits", "group_size")}
        words = {"bits": "bits", "group_size": "group sizes"}
        said = [f"{words[name]} {', '.join(map(str, one))}" for name, one in wide.items() if len(one) > 1]
        raise SpecError(
            f"{method} stores all modules alike, but these have {' and '.join(said)}",
            fix="use layout=pack-quantized, which stores each with its own, or bits and a group_size that suit every module",
        )
    return schemes[0]
