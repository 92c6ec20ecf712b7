"""Child process of test_resume: compresses and dies at the n-th durable write, before or after it takes effect.

Arguments: spec as JSON, model folder, output folder, n (0: never), 'before' or 'after'.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import torch

from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.compress.stage import Compress

torch.set_num_threads(1)
SPEC, MODEL, OUT, DEADLINE, WHEN = sys.argv[1:]
replace, calls = os.replace, 0


def deadly(source, target) -> None:
    global calls
    if str(target).endswith("elapsed_s"):  # no step of the work
        return replace(source, target)
    calls += 1
    if calls == int(DEADLINE) and WHEN == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
    if calls == int(DEADLINE):
        os.kill(os.getpid(), signal.SIGKILL)
    return None


os.replace = deadly
made = Compress.read(json.loads(SPEC)).make(OUT, {"model": Artifact.read(MODEL)}, Run(quiet=True))
print(calls, made.content)
