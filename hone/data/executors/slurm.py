"""The Slurm executor: tasks as job arrays, whose elements take them one after the other from a shared folder."""

from __future__ import annotations

import os
import pickle
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from hone.base.durable import write_atomic
from hone.base.errors import MachineError, SpecError
from hone.data.executors.base import RETRIES, Executor, Outcome, Pool, Rescue, given_up
from hone.data.executors.processes import ONE_THREAD, answered
from hone.data.executors.task import Function, Task, finished

_ORPHANED_S = 600
"""An element ends when the calling process has given no sign for so long."""
_OWN = ("--array", "--job-name", "--output", "--parsable", "--wait")


class Slurm(Executor):
    """Submits an sbatch job array for every step; each element takes one task after the other. Yoo et al. 2003.

    Start it where `sbatch` works (a login node) with the output folder on a file system that all nodes share. The array's
    elements start as the cluster has room; an element that dies is replaced, and only the task that it was doing counts as failed.
    """

    workers: int = Field(16, ge=1, description="Elements of an array: tasks at a time.")
    options: tuple[str, ...] = Field(
        (), description="Options of sbatch for every array: '--partition=cpu --time=04:00:00 --mem=4G', or a list."
    )
    poll_s: float = Field(2.0, gt=0, description="Seconds between looks at what is done.")

    @field_validator("options")
    @classmethod
    def _are_options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for option in value:
            if not option.startswith("-") or "\n" in option:
                raise ValueError(f"'{option}' is no option: write --name=value")
            for word in shlex.split(option):
                if word.partition("=")[0] in _OWN:
                    raise ValueError(f"{word} is set by hone: leave it out")
        return value

    @contextmanager
    def open(self) -> Iterator[Pool]:
        for program in ("sbatch", "squeue", "scancel"):
            if shutil.which(program) is None:
                raise SpecError(
                    f"executor 'slurm': there is no {program} on this machine",
                    fix="run this on a login node of the cluster, or use --executor=processes",
                )
        yield _OnSlurm(self)


class _OnSlurm:
    def __init__(self, spec: Slurm) -> None:
        self._spec = spec
        self.workers = spec.workers
        self.peak_memory_bytes: int | None = None

    def map(self, function: Function, tasks: Sequence[Task], rescue: Rescue | None = None) -> Iterator[dict[str, Any]]:
        tasks = list(tasks)
        results: dict[int, Outcome] = {}
        for number, task in enumerate(tasks):
            before = finished(function, task)
            if before is not None:
                results[number] = Outcome(number, before)
        deaths = [0] * len(tasks)
        array: _Array | None = None
        done = False
        try:
            for wanted in range(len(tasks)):
                while wanted not in results:
                    if array is None:
                        left = [number for number in range(len(tasks)) if number not in results]
                        array = _Array(self._spec, function, {number: tasks[number] for number in left})
                    ended = array.ended()  # asked first: what it has done until then is seen below
                    for outcome, memory in array.outcomes():
                        results[outcome.number] = outcome
                        self.peak_memory_bytes = max(self.peak_memory_bytes or 0, memory)
                    if not ended:
                        if wanted not in results:
                            time.sleep(self._spec.poll_s)
                        continue
                    for number in array.begun():
                        if number in results:
                            continue
                        deaths[number] += 1
                        if deaths[number] > RETRIES:
                            other = rescue(tasks[number]) if rescue else None
                            if other is None:
                                raise given_up(tasks[number], f"see {array.folder}/*.log")
                            tasks[number] = other
                    if not array.begun() and wanted not in results:
                        raise MachineError(
                            f"the array {array.job} ended without beginning a task",
                            fix=f"see {array.folder}/*.log; the nodes need the same Python, hone and folders as this machine",
                        )
                    array.remove()
                    array = None
                result = results.pop(wanted)
                results[wanted] = Outcome(wanted)  # known, its summary no longer needed
                if result.error is not None:
                    raise result.error
                yield result.summary
            done = True
        finally:
            if array is not None:
                array.cancel()
                if done:
                    array.remove()


class _Array:
    """A submitted job array and its folder: `tasks.pickle`, N.begun and N.ended of each task, logs, and `alive`."""

    def __init__(self, spec: Slurm, function: Function, tasks: dict[int, Task]) -> None:
        first = next(iter(tasks.values()))
        self.folder = first.folder.absolute().parent / f".slurm-{secrets.token_hex(4)}"
        self.folder.mkdir(parents=True)
        (self.folder / "tasks.pickle").write_bytes(pickle.dumps((function, tasks)))
        (self.folder / "alive").touch()
        self._seen: set[int] = set()
        script = self.folder / "array.sh"
        write_atomic(script, _script(spec, self.folder, min(spec.workers, len(tasks))).encode())
        answer = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True)
        self.job = answer.stdout.strip().partition(";")[0]
        if answer.returncode or not re.fullmatch(r"[0-9_]+", self.job):
            said = (answer.stderr or answer.stdout).strip()[:300]
            shutil.rmtree(self.folder)
            raise MachineError(f"sbatch refused the array: {said}", fix="set --executor.options for your cluster")

    def outcomes(self) -> Iterator[tuple[Outcome, int]]:
        """(outcome, peak memory in bytes) of every task that ended since the last call; also tells the elements that this process lives."""
        os.utime(self.folder / "alive")
        for path in self.folder.glob("*.ended"):
            number = int(path.stem)
            if number not in self._seen:
                self._seen.add(number)
                summary, error, memory = pickle.loads(path.read_bytes())
                yield Outcome(number, summary, error), memory

    def begun(self) -> list[int]:
        """The tasks that an element has begun."""
        return sorted(int(path.stem) for path in self.folder.glob("*.begun"))

    def ended(self) -> bool:
        """Whether no element is waiting or running any more."""
        answer = subprocess.run(["squeue", "--noheader", "--jobs", self.job], capture_output=True, text=True)
        if answer.returncode == 0:
            return not answer.stdout.strip()
        return "invalid job id" in answer.stderr.lower()  # forgotten, since it ended; other errors are the controller's

    def cancel(self) -> None:
        """Ends all elements."""
        subprocess.run(["scancel", self.job], capture_output=True)

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _script(spec: Slurm, folder: Path, count: int) -> str:
    """The batch file of an array of `count` elements."""
    path = os.pathsep.join(one or os.getcwd() for one in sys.path)
    code = f"from hone.data.executors.slurm import element; element({str(folder)!r})"
    lines = [
        "#!/bin/sh",
        "#SBATCH --job-name=hone-data",
        f"#SBATCH --array=0-{count - 1}",
        f"#SBATCH --output={folder}/%a.log",
        "#SBATCH --cpus-per-task=1",
        *(f"#SBATCH {option}" for option in spec.options),
        f"export PYTHONPATH={shlex.quote(path)}",
        *(f"export {name}=1" for name in ONE_THREAD),
        f"cd {shlex.quote(os.getcwd())} || exit 1",
        f"exec {shlex.quote(sys.executable)} -c {shlex.quote(code)}",
    ]
    return "\n".join(lines) + "\n"


def element(name: str) -> None:
    """What an element of an array runs: takes the tasks in folder `name` that no other has begun, one after the other."""
    folder = Path(name)
    function, tasks = pickle.loads((folder / "tasks.pickle").read_bytes())
    for number, task in tasks.items():
        with suppress(FileNotFoundError):
            if time.time() - (folder / "alive").stat().st_mtime > _ORPHANED_S:
                return  # another run may have begun the same tasks
        try:
            os.close(os.open(folder / f"{number}.begun", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            continue
        except FileNotFoundError:  # the folder is gone: nobody waits
            return
        write_atomic(folder / f"{number}.ended", answered(function, task))
