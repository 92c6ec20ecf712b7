"""A worker's process: it builds its part of the model, then runs every step that rank 0 sends, until rank 0 closes the socket.

python -m hone.serve.ranks.worker STEPS PINGS     (numbers of two inherited sockets)
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from hone.base.errors import HoneError
from hone.serve.ranks.frames import FrameSocket, MessageKind, unpickled
from hone.serve.ranks.order import WorkerOrder

if TYPE_CHECKING:
    from hone.serve.ranks.runner import RankRunner


class Worker:
    """One worker: its two sockets, and how far it is."""

    def __init__(self, steps: socket.socket, pings: socket.socket) -> None:
        self._steps, self._pings = FrameSocket(steps), FrameSocket(pings)
        self._begun = self._ended = 0
        self._said = threading.Lock()

    def main(self) -> None:
        """Runs until rank 0 ends or closes the sockets. Never returns."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when the engine ends
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Thread(target=self._answer, daemon=True).start()
        try:
            self._run()
        except EOFError:
            self._finish()
            os._exit(0)
        except BaseException as error:
            traceback.print_exc()
            sys.stderr.flush()
            text = " ".join(str(error).split())[:300]
            with self._said:
                self._pings.send(MessageKind.FAILED, f"{type(error).__name__}: {text}")
            os._exit(1)

    @staticmethod
    def _finish() -> None:
        """Waits for the kernels of the last steps: those of other ranks may wait for their sums. Rank 0 kills this process if it takes long."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def _answer(self) -> None:
        """Replies to pings while steps run; ends the process with rank 0, also in the middle of a step."""
        while True:
            try:
                if not self._pings.socket.recv(4096):
                    break
                with self._said:
                    self._pings.send(MessageKind.PING, (self._begun, self._ended))
            except OSError:
                break
        os._exit(0)

    def _run(self) -> None:
        order: WorkerOrder = self._next(MessageKind.OPEN)
        try:
            from hone.serve.ranks.opening import open_worker

            rank = open_worker(order)
            self._steps.send(MessageKind.OPEN, rank.num_pages)
            runner = rank.runner(self._next(MessageKind.PAGES))
        except HoneError as error:
            self._steps.send(MessageKind.FAILED, error)
            raise EOFError from None
        self._steps.send(MessageKind.PAGES, None)
        self._loop(runner, replies=order.place.num_stages > 1 and order.place.last and order.place.tensor_rank == 0)

    def _next(self, kind: MessageKind) -> Any:
        found, data = self._steps.receive()
        assert found == kind, f"rank 0 sent {found.name}, not {kind.name}"
        return unpickled(data)

    def _loop(self, runner: RankRunner, replies: bool) -> None:
        import numpy as np

        from hone.serve.ranks.packing import unpack
        from hone.serve.step import StepInput

        while True:
            kind, data = self._steps.receive()
            if kind == MessageKind.PREPARE:
                runner.prepare()
                continue
            if kind == MessageKind.PLACE:
                # Ranks of one stage count alike; rank 0 knows the loads of its own stage's layers alone.
                own = runner.placing.planned()[0] if runner.model.place.stage else unpickled(data)
                runner.placing.move(own)
                continue
            assert kind == MessageKind.STEP, f"rank 0 sent {kind.name}"
            self._begun += 1
            step = unpack(StepInput, np.frombuffer(data, dtype=np.uint8))
            launched = runner.launch(step, lambda: self._next(MessageKind.MASKS))
            if replies:
                tokens = launched.tokens()
                self._steps.send(MessageKind.STEP, (tokens, launched.results() if tokens is None else []))
            self._ended += 1


def main(steps: int, pings: int) -> None:
    """The worker on two inherited sockets."""
    Worker(socket.socket(fileno=steps), socket.socket(fileno=pings)).main()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
