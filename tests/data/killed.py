"""Child processes that make a data set and die: at the n-th rename below its folder, at the commit, or after some tasks."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import threading
import time
from typing import Any

from hone.base.run import Run
from hone.data import annotate
from hone.data.dedup import joining
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


def stage(
    out: str, spec: dict[str, Any], executor: dict[str, Any], manifests: str, growth: int, pause_s: float
) -> None:
    """Makes `spec` of small tasks; dies `pause_s` after `growth` files more than at first were seen at the pattern `manifests`."""
    annotate.TASK_BYTES, joining.SORT_KEYS = 1000, 60
    before = {*glob.glob(manifests)}

    def kill() -> None:
        seen = before
        while len(seen) < len(before) + growth:
            time.sleep(0.01)
            seen = seen | {name for name in glob.glob(manifests) if not name.endswith("tmp")}
        time.sleep(pause_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    Data.read(spec).make(out, run=Run(quiet=True, executor=executor))
