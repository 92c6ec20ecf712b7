"""Starts the ranks of a command on this host, as torchrun would: `--nproc_per_node=4`; and says which commands ranks can share.

It is no call of `torch.distributed.run`, which kills ranks half a minute after Ctrl-C (they have the time here that saving takes), and
ends with a report of its own and code 1 instead of the 130 or 143 of a training that is saved.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TextIO

OPTION = "nproc_per_node"
SHARED = ("train", "compress", "run", "calibrate")
"""Verbs whose work several ranks share."""
PLANNED = ("plan",)
"""Verbs that tell what several ranks would do."""
LAUNCHER = "HONE_LAUNCHER"
"""Names a pipe that closes when the process that started a rank ends, in the rank's environment."""
GRACE_S = 30.0
"""How long the other ranks may take to end after one ended with an error, as torchrun waits."""

_ORDERLY = {128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM}
"""Codes of ranks that ended because they were asked to."""


def check_world(verb: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raises SpecError, on every rank, when torchrun started several ranks of a verb that cannot share its work."""
    from hone.base.errors import SpecError
    from hone.base.ranks import Mesh

    if verb in (*SHARED, *PLANNED) or (size := Mesh.from_environment(environment).world_size) == 1:
        return
    own = {
        "data": "--executor=processes --workers=N",
        "serve": "--tensor_parallel_size=N",
        "bench": "--engine.tensor_parallel_size=N",
    }
    way = f", which starts its processes itself ({own[verb]})" if verb in own else ""
    error = SpecError(
        f"hone {verb} runs in one process{way}, and torchrun started {size}",
        fix=f"start it without torchrun (or unset RANK and WORLD_SIZE); several ranks share: {', '.join(SHARED)}",
    )
    error.told = True
    raise error


def ranks_to_start(verb: str, options: dict[str, str], environment: Mapping[str, str] = os.environ) -> int:
    """The ranks to start for a command, 1: none; takes the option out of `options`, and for a plan makes `mesh` of it.

    Raises SpecError for a verb that cannot use them, a wrong number, or under torchrun; MachineError with fewer GPUs.
    """
    from hone.base.errors import MachineError, SpecError

    if OPTION not in options:
        return 1
    given = options.pop(OPTION)
    if verb not in SHARED:
        raise SpecError(
            f"hone {verb} has no option --{OPTION}: its work is not shared by ranks",
            fix=f"leave it out; several ranks share: {', '.join(SHARED)}",
        )
    if "RANK" in environment and "WORLD_SIZE" in environment:
        said = f"RANK={environment['RANK']}, WORLD_SIZE={environment['WORLD_SIZE']}"
        raise SpecError(
            f"--{OPTION}={given} starts ranks, and this process is one that torchrun started ({said})",
            fix=f"leave --{OPTION} out, or start the command without torchrun",
        )
    on_gpus = options.get("device", "cpu") == "cuda"
    if options.get("device", "cpu").startswith("cuda:"):
        raise SpecError(
            f"--{OPTION}={given} and one device {options['device']}", fix="use --device=cuda: one GPU a rank"
        )
    if given == "gpu" and on_gpus:
        return _gpus() or 1
    if not given.isdigit() or int(given) < 1:
        raise SpecError(
            f"--{OPTION}={given} is no number of ranks", fix=f"write --{OPTION}=4, or --{OPTION}=gpu with --device=cuda"
        )
    number = int(given)
    if "plan" in options:
        options.setdefault("mesh", given)
        return 1
    if on_gpus and number > (there := _gpus()):
        less = f"use at most {there}" if there else "leave --device=cuda out"
        raise MachineError(
            f"--{OPTION}={number}, and torch sees {there} GPUs: each rank has one",
            fix=f"{less}, make more visible (CUDA_VISIBLE_DEVICES), or use torchrun on several hosts",
        )
    return number


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def follow(environment: dict[str, str] | os._Environ[str] = os.environ) -> None:
    """In a rank: asks it to save and end when the process that started it dies. Elsewhere it does nothing."""
    number = environment.pop(LAUNCHER, "")
    if not number:
        return
    pipe = int(number)
    os.set_inheritable(pipe, False)

    def wait() -> None:
        os.read(pipe, 1)  # nobody writes: it returns when the other end is closed
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="hone-launcher", daemon=True).start()


def command_of(arguments: Sequence[str]) -> list[str]:
    """The command of a rank: `arguments` of hone without the option."""
    kept, skip = [], False
    for at, argument in enumerate(arguments):
        if skip:
            skip = False
        elif argument == "--":
            kept += arguments[at:]
            break
        elif argument.startswith("--") and argument[2:].partition("=")[0].replace("-", "_") == OPTION:
            skip = "=" not in argument
        else:
            kept.append(argument)
    # As a module this process found hone in the current folder too; as a command it did not look there.
    safe = [] if os.path.basename(sys.argv[0]) == "__main__.py" else ["-P"]
    return [sys.executable, *safe, "-m", "hone", *kept]


def launch(number: int, command: Sequence[str]) -> int:
    """Runs `command` on `number` ranks of this host until all have ended; the exit code of the one that failed first, or 0."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=max(128, number))
    port = listening.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
    }
    usual = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // number))} if sys.platform == "linux" else {}
    usual |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    environment = {**usual, **os.environ, **shared}
    with Ranks(number, command, environment) as ranks:
        import torch.distributed as dist  # beside the ranks' imports: they connect when it is there

        store = dist.TCPStore(
            "127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        assert store.port == port, "the ranks meet where they were told"
        return ranks.wait()


class Ranks:
    """The processes of the ranks. Rank 0 has this one's output; lines of the others go to standard error, each text once.

    Each is in a session of its own, so that Ctrl-C reaches this process alone, which passes it on once.
    """

    def __init__(
        self, number: int, command: Sequence[str], environment: Mapping[str, str], out: TextIO | None = None
    ) -> None:
        self._out = out or sys.stderr
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._said: dict[str, int] = {}
        self._lock = threading.Lock()
        self._asked = 0
        """How often Ctrl-C or SIGTERM came."""
        self._readers: list[threading.Thread] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():  # before any rank is there to be left behind
            self._handlers = {one: signal.signal(one, self._pass_on) for one in (signal.SIGINT, signal.SIGTERM)}
        ended, self._alive = os.pipe()
        """The end of a pipe that closes with this process, however it ends."""
        for rank in range(number):
            pipes: dict[str, Any] = {} if rank == 0 else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), LAUNCHER: str(ended)}
            pipes |= {"stdin": subprocess.DEVNULL, "start_new_session": True, "pass_fds": (ended,)}
            started = subprocess.Popen(command, env=own, **pipes)
            self.processes.append(started)
            if self._asked:  # it came before this rank was there
                started.send_signal(signal.SIGTERM)
            threading.Thread(target=self._wait_for, args=(rank,), daemon=True).start()
            if rank:
                self._readers.append(threading.Thread(target=self._read, args=(rank,), daemon=True))
                self._readers[-1].start()
        os.close(ended)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._send(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        os.close(self._alive)
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def wait(self) -> int:
        """Waits until all ranks have ended, at most GRACE_S after the first that failed; its exit code, 0 without one."""
        code, left, first = 0, len(self.processes), -1
        while left:
            try:
                # Ranks that were asked to end may take as long as saving does, unless one failed instead.
                saving = self._asked and code in _ORDERLY
                rank, ended = self._ended.get(timeout=GRACE_S if code and not saving else None)
            except queue.Empty:
                alive = [str(one) for one, process in enumerate(self.processes) if process.poll() is None]
                self._say(
                    f"ranks {', '.join(alive)} did not end in {GRACE_S:.0f} s after rank {first} did, and are killed"
                )
                self._send(signal.SIGKILL)
                continue
            left -= 1
            if ended and not code:
                code, first = ended, rank
                if ended < 0 and not self._asked:
                    short = "; the kernel does that when memory is short" if -ended == signal.SIGKILL else ""
                    self._say(f"rank {rank} was ended by {signal.Signals(-ended).name}{short}")
        for reader in self._readers:
            reader.join(timeout=5)
        return 128 - code if code < 0 else code

    def _pass_on(self, number: int, _: object) -> None:
        """Ctrl-C or SIGTERM: the first lets the ranks save, the second ends them at once, the third kills them."""
        self._asked += 1
        self._send(signal.SIGKILL if self._asked > 2 else number)

    def _send(self, number: int) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def _wait_for(self, rank: int) -> None:
        self._ended.put((rank, self.processes[rank].wait()))

    def _read(self, rank: int) -> None:
        """Prints what rank `rank` says, unless another one has said it."""
        pipe = self.processes[rank].stdout
        assert pipe is not None, "only rank 0 has none"
        for raw in pipe:
            line = raw.decode(errors="replace").rstrip()
            with self._lock:
                new = self._said.setdefault(line, rank) == rank
            if line and new:
                self._say(f"[rank {rank}] {line}")

    def _say(self, text: str) -> None:
        with self._lock, suppress(BrokenPipeError):
            print(text, file=self._out, flush=True)
