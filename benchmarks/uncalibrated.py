"""hone's command line without its first measurement of a machine: where no calibration is stored, a plan's times stay bounds.

python -m benchmarks.uncalibrated train ...    # on a GPU `hone train` measures for a minute first, on several ranks too
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hone.cli import launch, main, stages

_of_hone = launch.command_of


def _as_it_is(run: Any, needed: object = None) -> Any:
    return run


def _command_of(arguments: Sequence[str]) -> list[str]:
    """The command of a rank, which is to measure nothing either."""
    return [__spec__.name if word == "hone" else word for word in _of_hone(arguments)]


if __name__ == "__main__":
    stages.calibrated = _as_it_is
    launch.command_of = _command_of
    raise SystemExit(main())
