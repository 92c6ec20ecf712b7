"""Child process of test_stage: makes a data set and dies at the n-th rename below its folder, or at the commit."""

from __future__ import annotations

import os
import shutil
import signal

import hone.data.filters
import hone.data.langid
import hone.data.tokens.fast
import hone.data.tokens.tokenizer
import hone.data.work  # noqa: F401
from hone.base.run import Run
from hone.data.stage import Data


def data(out: str, source: str, kill_at: int, where: str) -> int:
    """Number of renames. `where` is 'before' or 'after' the rename `kill_at`, or 'commit'."""
    count = 0
    replace, rmtree = os.replace, shutil.rmtree

    def counted(*arguments, **options):
        nonlocal count
        if not str(arguments[1]).startswith(out):  # the plan's sample leaves nothing that is resumed from
            return replace(*arguments, **options)
        count += 1
        if count == kill_at and where == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*arguments, **options)
        if count == kill_at and where == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return None

    def half_removed(path, *arguments, **options):
        if where == "commit" and str(path).startswith(f"{out}/"):  # the finished folder's, no longer the draft's
            for file in sorted(path.iterdir())[::2]:
                rmtree(file) if file.is_dir() else file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        rmtree(path, *arguments, **options)

    os.replace, shutil.rmtree = counted, half_removed
    spec = Data.read({"source": source, "tokenizer": {"vocab_size": 400}, "filters": ["length", "gopher_quality"]})
    spec.make(out, run=Run(quiet=True))
    return count
