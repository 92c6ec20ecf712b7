"""`torchrun -m tests.train.faults.elastic SPEC DATA OUT MARK`: a rank of a training, of which rank 1 kills itself in its first life.

MARK is the file that says that it did. Imports first, as `tests.train.ranks` does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.train.loop import Trainer
from hone.train.stage import Train


def main(spec: str, data: str, out: str, mark: str) -> None:
    """Trains; rank 0 prints the content of the artifact."""
    step = Trainer.step

    def dying(self: Trainer, batch: Any) -> Any:
        if self.done == 3 and self.ranks.mesh.rank == 1 and not Path(mark).exists():
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, batch)

    Trainer.step = dying  # type: ignore[method-assign]
    run = Run(quiet=True)
    content = Train.read(json.loads(spec)).make(out, {"data": Artifact.read(data)}, run).content
    if run.mesh.leads:
        print(f"content {content}")


if __name__ == "__main__":
    main(*sys.argv[1:])
