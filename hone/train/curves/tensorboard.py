"""TensorBoard: event files in the artifact's log folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path


class TensorBoard:
    """Writes event files into `log`. After a resume at step `resume_at` TensorBoard shows the later steps of this process only."""

    def __init__(self, log: Path, resume_at: int = 0) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        # TensorBoard itself drops events after the step of the resume when it reads the same step again.
        self._open = partial(SummaryWriter, str(log))
        self._writer = self._open(purge_step=resume_at + 1 if resume_at else None)

    def add(self, scalars: dict[str, float], step: int) -> None:
        """As `Curves.add`."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def back(self, step: int) -> None:
        """As `Curves.back`; TensorBoard drops the events of the steps that were left, too."""
        self._writer.close()
        self._writer = self._open(purge_step=step + 1)

    def flush(self) -> None:
        """As `Curves.flush`."""
        self._writer.flush()

    def close(self, *, whole: bool) -> None:
        """As `Curves.close`."""
        self._writer.close()
