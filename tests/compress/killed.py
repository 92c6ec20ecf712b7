"""Child process of test_resume: compresses and dies at the n-th durable write, before or after it takes effect."""

from __future__ import annotations

import os
import signal

import torch

import hone.compress.stream
import hone.cost.compress.compression
import hone.model.hf
import hone.model.tokenizer  # noqa: F401
from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.compress.stage import Compress


def compress(spec: dict, model: str, out: str, deadline: int = 0, when: str = "after") -> tuple[int, str]:
    """Number of durable writes and the content; `deadline` 0 never comes."""
    torch.set_num_threads(1)
    replace, calls = os.replace, 0

    def deadly(source, target) -> None:
        nonlocal calls
        if str(target).endswith("elapsed_s"):  # no step of the work
            return replace(source, target)
        calls += 1
        if calls == deadline and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)
        if calls == deadline:
            os.kill(os.getpid(), signal.SIGKILL)
        return None

    os.replace = deadly
    made = Compress.read(spec).make(out, {"model": Artifact.read(model)}, Run(quiet=True))
    return calls, made.content
