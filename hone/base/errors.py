"""The error tree: every mistake a user can make is one `HoneError` with its values and the way out.

HoneError
├── SpecError       a field is unknown, missing or has an impossible value
├── FitError        something does not fit (memory, disk, context length)
├── DriftError      an artifact of this name exists, made from another spec
├── ArtifactError   a folder is missing, unfinished, corrupt or of the wrong kind
├── MachineError    the machine lacks what was asked for (device, port, dtype)
└── MissingExtra    an optional dependency is not installed
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HoneError(Exception):
    """A mistake with a way out: `what` happened, with its values, and `fix`, what to do about it.

    A program bug is never a HoneError; it is an assertion with a message. The CLI prints a HoneError
    as `error: <what>` and `fix: <fix>` and exits with code 2.
    """

    def __init__(self, what: str, *, fix: str) -> None:
        super().__init__(what, fix)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what}\nfix: {self.fix}"

    def __reduce__(self) -> tuple:
        # The keyword-only argument keeps the default pickling from working; errors cross process borders.
        return _rebuild, (type(self), self.what, self.fix)


def _rebuild(kind: type[HoneError], what: str, fix: str) -> HoneError:
    return kind(what, fix=fix)


class SpecError(HoneError):
    """A field is unknown, missing or has an impossible value."""


class FitError(HoneError):
    """Something does not fit: memory, disk or context length."""


class DriftError(HoneError):
    """An artifact of this name exists, made from another spec."""


class ArtifactError(HoneError):
    """A folder is missing, unfinished, corrupt or of the wrong kind."""


class MachineError(HoneError):
    """The machine lacks what was asked for: a device, a port, a number format."""


class MissingExtra(HoneError):
    """An optional dependency is not installed."""

    @classmethod
    def of(cls, what: str, package: str, extra: str) -> MissingExtra:
        """`what` the user asked for needs `package`, which the extra named `extra` brings."""
        return cls(
            f"{what} needs the package '{package}', which is not installed", fix=f"pip install 'hone-llm[{extra}]'"
        )


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is most likely a slip of; None when none is near."""
    return next(iter(difflib.get_close_matches(str(name), [str(one) for one in known], n=1)), None)


def did_you_mean(name: str, known: Iterable[str], shown: str = "{}") -> str:
    """ "did you mean 'NEAREST'? " to begin a `fix` with; empty when no known name is near. `shown` says how it is written."""
    near = nearest(name, known)
    return "" if near is None else f"did you mean '{shown.format(near)}'? "
