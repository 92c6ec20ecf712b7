"""The error that ends an engine on several ranks. Never imports torch."""

from __future__ import annotations

from hone.base.errors import MachineError

RESTART = "see what that rank printed, then start the engine again"


class RankError(MachineError):
    """A rank ended, failed or hangs: no further step is possible, the engine must be started again."""
