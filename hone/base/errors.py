"""The error tree: every mistake of a user is a `HoneError` with its values and a fix.

HoneError
├── SpecError       a field is unknown, missing or has an impossible value
├── FitError        something does not fit (memory, disk, context length)
├── DriftError      an artifact of this name exists, made from another spec
├── ArtifactError   a folder is missing, unfinished, corrupt or of the wrong kind
├── MachineError    the machine lacks what is required (device, port, dtype)
└── MissingExtra    an optional dependency is not installed
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable


class HoneError(Exception):
    """A mistake of the user: `what` happened, with its values, and `fix`, what to do about it.

    A program bug is never a HoneError; it is an assertion with a message. The CLI prints a HoneError
    as `error: <what>` and `fix: <fix>` and exits with code 2.
    """

    told = False
    """Whether all ranks of a run end with it, because they have met or each finds it."""

    def __init__(self, what: str, *, fix: str) -> None:
        super().__init__(what, fix)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what}\nfix: {self.fix}"

    def __reduce__(self) -> tuple:
        # The keyword-only argument breaks the default pickling; errors are sent between processes.
        return _rebuild, (type(self), self.what, self.fix)


def _rebuild(kind: type[HoneError], what: str, fix: str) -> HoneError:
    return kind(what, fix=fix)


class SpecError(HoneError):
    """A field is unknown, missing or has an impossible value. `field` is its dotted name, as far as it is known."""

    field = ""


class FitError(HoneError):
    """Something does not fit: memory, disk or context length."""


class DriftError(HoneError):
    """An artifact of this name exists, made from another spec."""


class ArtifactError(HoneError):
    """A folder is missing, unfinished, corrupt or of the wrong kind."""


class MachineError(HoneError):
    """The machine lacks what is required: a device, a port, a dtype."""


class MissingExtra(HoneError):
    """An optional dependency is not installed."""

    @classmethod
    def of(cls, what: str, package: str, extra: str) -> MissingExtra:
        """The error for `what`, which needs `package` from hone's extra `extra`."""
        return cls(
            f"{what} needs the package '{package}', which is not installed", fix=f"pip install 'hone-llm[{extra}]'"
        )

    @classmethod
    def need(cls, what: str, package: str, extra: str) -> None:
        """Raises the error of `of` where `package` is not installed."""
        try:
            importlib.import_module(package)
        except ModuleNotFoundError:
            raise cls.of(what, package, extra) from None


MODEL_PACKAGES = ("torch", "tensorboard", "scipy")
"""Packages that every stage but data needs: the extra 'models'."""
DATA_PACKAGES = ("pyarrow", "numba")
"""Packages that the data stage needs: the extra 'data'."""


def without_extra(error: ModuleNotFoundError) -> MissingExtra | None:
    """The error to show instead of `error` when a package of the extras 'models' or 'data' is what is missing."""
    package = (error.name or "").partition(".")[0]
    return MissingExtra.of("this", package, "data") if package in DATA_PACKAGES else without_models(error)


def without_models(error: ModuleNotFoundError) -> MissingExtra | None:
    """The error to show instead of `error` when a package of the extra 'models' is what is missing."""
    package = (error.name or "").partition(".")[0]
    return MissingExtra.of("this", package, "models") if package in MODEL_PACKAGES else None


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is probably a misspelling of; None when none is similar."""
    return next(iter(difflib.get_close_matches(str(name), [str(one) for one in known], n=1)), None)


def did_you_mean(name: str, known: Iterable[str], shown: str = "{}") -> str:
    """The beginning of a `fix`: "did you mean 'NEAREST'? "; empty when no known name is similar. `shown` formats the name."""
    near = nearest(name, known)
    return "" if near is None else f"did you mean '{shown.format(near)}'? "
