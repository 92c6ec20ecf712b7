"""Child process of test_resume: compresses and dies at the n-th durable write, before or after it takes effect.

Each line of standard input is [spec, model folder, output folder, n (0: never), 'before' or 'after'] as JSON. Each gets
a process of its own, forked after the imports and before any thread, and a line of output: [return code, durable
writes, content, what it wrote to standard error].
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile

import torch

import hone.compress.stream
import hone.cost.compress
import hone.model.hf
import hone.model.tokenizer  # noqa: F401
from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.compress.stage import Compress

replace = os.replace


def compress(spec: dict, model: str, out: str, deadline: int, when: str) -> tuple[int, str]:
    calls = 0

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


def in_a_process(arguments: list) -> tuple[int, int, str, str]:
    with tempfile.TemporaryFile("w+") as results, tempfile.TemporaryFile("w+") as errors:
        pid = os.fork()
        if not pid:
            os.dup2(errors.fileno(), 2)
            status = 1
            try:
                json.dump(compress(*arguments), results)
                results.flush()
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
                sys.stderr.flush()
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        results.seek(0)
        errors.seek(0)
        calls, content = json.loads(results.read() or '[0, ""]')
        return status, calls, content, errors.read()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(in_a_process(json.loads(line))), flush=True)
