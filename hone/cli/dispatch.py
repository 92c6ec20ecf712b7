"""Dispatches a command: finds the verb, runs it, prints a user's mistake in two lines and returns the exit code."""

from __future__ import annotations

import errno
import os
import signal
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hone.base.errors import HoneError

VERBS = {
    "plan": "hone.cli.line:plan",
    "run": "hone.cli.line:run",
    "report": "hone.cli.line:report",
    "watch": "hone.cli.watch:watch",
    "data": "hone.cli.stages:make",
    "train": "hone.cli.stages:make",
    "teach": "hone.cli.stages:make",
    "compress": "hone.cli.stages:make",
    "eval": "hone.cli.stages:make",
    "bench": "hone.cli.stages:make",
    "push": "hone.cli.stages:copy",
    "pull": "hone.cli.stages:copy",
    "serve": "hone.cli.models:serve",
    "chat": "hone.cli.chat.verb:chat",
    "generate": "hone.cli.models:generate",
    "export": "hone.cli.models:export",
    "merge": "hone.cli.merge.verb:merge",
    "simulate": "hone.cli.simulate.verb:simulate",
    "show": "hone.cli.look:show",
    "redecide": "hone.cli.look:redecide",
    "schema": "hone.cli.look:schema",
    "techniques": "hone.cli.look:techniques",
    "env": "hone.cli.look:env",
    "calibrate": "hone.cli.look:calibrate",
    "hardware": "hone.cli.hardware.verb:hardware",
    "cost": "hone.cli.cost.verb:cost",
    "schedule": "hone.cli.schedule.verb:schedule",
    "completion": "hone.cli.completion.verb:completion",
}
"""The function of each verb, `(words, options) -> exit code`, imported on use."""


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0 success, 2 a user's mistake, 130 interrupted, 143 by SIGTERM, 75 paused."""
    from hone.base.durable import NO_SPACE
    from hone.base.errors import HoneError, without_extra

    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _say
            return _dispatch(arguments)
    except HoneError as error:
        return _complain(error.what, error.fix, error)
    except ModuleNotFoundError as error:
        missing = without_extra(error)
        if missing is None:
            raise
        return _complain(missing.what, missing.fix, missing)
    except KeyboardInterrupt as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"\n{str(error) or 'interrupted'}; the same command resumes where it stopped", file=sys.stderr)
        return getattr(error, "code", 128 + signal.SIGINT)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno in NO_SPACE:
            return _complain(
                f"{NO_SPACE[error.errno]} while writing {error.filename or 'a file'}",
                "free some space, or write where there is more, and run the same command again; it resumes",
                error,
            )
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return _complain(
                f"not allowed: {error.strerror}: {error.filename}", "give a folder you may read and write", error
            )
        if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP):
            return _complain(f"cannot use {error.filename}: {error.strerror}", "give another path", error)
        raise


def _say(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
    """Prints a warning without the place in the code, which tells a user of the command nothing."""
    print(f"note: {message}", file=sys.stderr)


def _complain(what: str, fix: str, error: Exception) -> int:
    """Prints a mistake and its fix, once on each host where all ranks know it; returns the exit code. `error`: as it was raised."""
    from hone.base.errors import HoneError

    # The others know of an OSError only that there was one.
    alone = not isinstance(error, HoneError)
    if not getattr(error, "told", False):
        known = _told(error if isinstance(error, HoneError) else HoneError(what, fix=fix))
        alone = known is None
        what, fix = (known.what, known.fix) if known is not None else (what, fix)
    if alone or os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
        print(f"error: {what}\nfix: {fix}", file=sys.stderr)
    return 2


def _told(error: HoneError) -> HoneError | None:
    """What all ranks end with, when this one has `error` before they met; None when they do not meet."""
    from hone.base.errors import HoneError
    from hone.base.ranks import Mesh

    try:
        return Mesh.from_environment().tell(error)
    except (
        HoneError,
        ModuleNotFoundError,
        KeyboardInterrupt,
    ):  # a wrong environment, no torch, or nobody wants to wait
        return None


def _dispatch(arguments: list[str]) -> int:
    from hone.base.errors import SpecError, did_you_mean
    from hone.base.lazy import resolve
    from hone.cli.help import HELP
    from hone.cli.launch import check_world, command_of, follow, launch, ranks_to_start
    from hone.cli.options import parse

    follow()
    words, options = parse(arguments)
    if not words:
        if unknown := [name for name in options if name not in ("help", "version")]:
            raise SpecError(
                f"hone has no option --{unknown[0]} without a command", fix="hone --help lists the commands"
            )
        if "version" in options:
            from importlib.metadata import version

            print(f"hone {version('hone-llm')}")
        else:
            print(HELP, end="")
        return 0
    verb = words[0]
    if verb not in VERBS:
        raise SpecError(
            f"unknown command '{verb}'", fix=f"{did_you_mean(verb, VERBS, 'hone {}')}hone --help lists them"
        )
    if "help" not in options:
        check_world(verb)
        if (number := ranks_to_start(verb, options)) > 1:
            return launch(number, command_of(arguments))
    return resolve(VERBS[verb])(words, options)
