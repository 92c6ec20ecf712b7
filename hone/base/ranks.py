"""Mesh: the processes that run one stage together; one by default, those of torchrun under torchrun."""

from __future__ import annotations

import atexit
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from hone.base.errors import HoneError, MachineError
from hone.base.lazy import lazy

if TYPE_CHECKING:
    from torch import Tensor

torch = lazy("torch")
dist = lazy("torch.distributed")

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

_PATIENCE = timedelta(days=30)
"""How long a rank waits for another one's work: a training may take weeks."""

_TRANSFER = timedelta(minutes=10)
"""How long a transfer between GPUs may take. All ranks have met before it, so that none waits there for another one's work."""

_LATE_S, _LEAVE_S = 30.0, 3.0
"""How long a rank waits for the others to come before it says so, or ends alone with its error; and, when it ends, for its threads."""

CHUNK = 1 << 24
"""Elements that are exchanged at once by sums: every rank holds as many of each other rank."""


class Lost(MachineError):
    """A transfer ended because another rank did."""

    @classmethod
    def of(cls, what: str, error: Exception) -> Lost:
        """`what` happened, as `error` says."""
        fix = "see what the rank that ended first printed, and start all of them again; the stage resumes"
        return cls(f"{what}: {_line(error)}", fix=fix)


class Late(Lost):
    """A transfer ended because another rank did not come in time: it may never, so that this rank ends without it."""


class Waits:
    """Counts the seconds that this rank waits in transfers: on a CPU by its clock, on a GPU between events of the current stream."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._seconds = clock, 0.0
        self._events: list[tuple[Any, Any]] = []

    @contextmanager
    def around(self, on_gpu: bool) -> Iterator[None]:
        """A block in which the rank, or its stream, waits."""
        if on_gpu:
            events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            events[0].record()
            yield
            events[1].record()
            self._events.append(events)  # type: ignore[arg-type]
            return
        begun = self._clock()
        yield
        self._seconds += self._clock() - begun

    def later(self) -> Callable[[], float]:
        """The seconds since the last call, for when a GPU has come so far: those of which it is known then, nothing waits."""
        seconds, self._seconds = self._seconds, 0.0
        events, self._events = self._events, []
        return lambda: seconds + sum(first.elapsed_time(last) / 1e3 for first, last in events if last.query())


@dataclass
class Mesh:
    """This process's `rank` among `world_size`, its `local_rank` among `local_world_size` (None: all) on this machine, as torchrun counts.

    The collectives (`from_leader`, `gather`, `sum`, `every`, `largest`, `joined`, `exchange`) must be called by every rank in the same
    order. Each begins with a meeting of all ranks over gloo, to which a rank that failed since brings its error: so an error
    of one rank ends all of them with one message, and none waits for a dead one. Tensors travel over NCCL between GPUs, over
    gloo between CPUs. With one rank all of them return what they are given.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int | None = None
    waits: Waits = field(default_factory=Waits, repr=False, compare=False)
    """Counts the waits in transfers of its ranks."""
    _group: Any = field(default=None, repr=False, compare=False)
    _gpus: Any = field(default=None, repr=False, compare=False)
    _groups: list[Any] = field(default_factory=list, repr=False, compare=False)
    """Process groups of some of the ranks, which `group` made."""
    _closers: list[Callable[[bool], None]] = field(default_factory=list, repr=False, compare=False)
    """What lets go of them at the end; see `at_close`."""
    _works: int = field(default=0, repr=False, compare=False)
    """How often the ranks have begun to work `together`."""
    _told: BaseException | None = field(default=None, repr=False, compare=False)
    """The last error that all ranks know."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Mesh:
        """The mesh that torchrun describes by RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, one process without; MachineError when they are invalid."""
        said = {one: environment.get(one.upper()) for one in ("rank", "local_rank", "world_size", "local_world_size")}
        if said["rank"] is None and said["world_size"] in (None, "1"):
            return cls()
        try:
            mesh = cls(**{name: int(value) for name, value in said.items() if value is not None})
        except ValueError:
            mesh = cls(-1)
        here, all_of_them = mesh.local_world_size or mesh.world_size, mesh.world_size
        if all_of_them > 1:  # where they meet
            said |= {name: environment.get(name.upper()) for name in ("master_addr", "master_port")}
        missing = [name for name, value in said.items() if value is None and not name.startswith("local_")]
        if missing or not 0 <= mesh.rank < all_of_them or not mesh.local_rank < here <= all_of_them:
            shown = [f"{name.upper()}={'(not set)' if value is None else value}" for name, value in said.items()]
            fix = "start it with torchrun, or unset these variables"
            raise MachineError(f"the environment says {', '.join(shown)}", fix=fix)
        return mesh

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes artifacts and messages."""
        return self.rank == 0

    def place(self, device: str) -> str:
        """The device of this rank where `device` is given for all: 'cuda:1' for 'cuda' on local rank 1.

        Raises MachineError when there is no such GPU, or `device` names one GPU for several ranks.
        """
        if self.world_size == 1 or not device.startswith("cuda"):
            return device
        if device != "cuda":
            what = f"{self.world_size} ranks and one device {device}"
            raise MachineError(what, fix="use --device=cuda: one GPU a rank")
        there = torch.cuda.device_count()
        if self.local_rank >= there:
            what = f"local rank {self.local_rank} has no GPU: torch sees {there}"
            raise MachineError(what, fix=f"use --nproc-per-node={there}" if there else "use --device=cpu")
        torch.cuda.set_device(self.local_rank)
        return f"cuda:{self.local_rank}"

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work of all ranks: when one fails inside, every rank raises at its next collective or at the end.

        A HoneError is raised on every rank; any other error on its own rank, and a MachineError that names it on the others.
        """
        if self.world_size == 1:
            yield
            return
        self._works += 1
        with self._telling():
            yield
            self._meet()  # from here on no rank waits in a group
            self._close()

    def from_leader(self, work: Callable[[], T]) -> T:
        """The result of `work`, done by rank 0 alone, on every rank; the others wait. Results must be picklable.

        Raises what `work` raises: a HoneError on every rank, any other error on rank 0 and a MachineError that names it on
        the others.
        """
        if self.world_size == 1:
            return work()
        with self._telling():
            return self._meet(work() if self.leads else None)[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's picklable `value`, in the order of the ranks."""
        if self.world_size == 1:
            return [value]
        with self._telling():
            return self._meet(value)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of every rank's `tensor`, of one shape and dtype, in place.

        Added in their order: all get the same bits, in every run with as many ranks.
        """
        return self._fold(tensor, lambda total, part: total.add_(part))

    def every(self, tensor: Tensor) -> Tensor:
        """Every rank's `tensor` [...], of one shape and dtype, as [ranks, ...] in their order."""
        if self.world_size == 1:
            return tensor[None]
        with self._telling():
            shapes = self._meet((tensor.dtype, tensor.shape))
            assert len(set(shapes)) == 1, f"ranks bring different tensors: {shapes}"
            rows = tensor.new_empty(self.world_size, *tensor.shape)
            with self._losing():
                dist.all_gather(list(rows), tensor, group=self._group_of(tensor))
            return rows

    def largest(self, tensor: Tensor) -> Tensor:
        """The largest of every rank's `tensor`, elementwise and in place; NaN where one has it."""
        return self._fold(tensor, lambda total, part: torch.maximum(total, part, out=total))

    def joined(self, tensor: Tensor) -> Tensor:
        """The rows of every rank's `tensor` [*, ...], in the order of the ranks; their numbers may differ.

        A rank without rows need not know their dtype.
        """
        if self.world_size == 1:
            return tensor
        parts = self.exchange({str(self.rank): tensor}, tensor.device)
        ordered = [parts[str(rank)] for rank in range(self.world_size)]
        return torch.cat([part for part in ordered if len(part)] or ordered[:1])

    def exchange(self, tensors: dict[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
        """Every rank's named tensors, on `device`; no two ranks have one name."""
        if self.world_size == 1:
            return tensors
        with self._telling():
            mine = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
            found: dict[str, Tensor] = {}
            senders = {}
            for rank, theirs in enumerate(self._meet(mine)):
                for name, (dtype, shape) in theirs.items():
                    assert name not in found, f"two ranks have {name}"
                    one = tensors[name] if rank == self.rank else torch.empty(shape, dtype=dtype, device=device)
                    found[name], senders[name] = one.to(device).contiguous(), rank
            self._meet()  # every rank has the memory
            with self._losing():
                for name, tensor in found.items():
                    if tensor.numel():
                        # As bytes, because gloo has no float8.
                        flat = tensor.view(-1).view(torch.uint8)
                        dist.broadcast(flat, src=senders[name], group=self._group_of(tensor))
            return found

    def group(self, of: Sequence[Sequence[int]], device: torch.device | str, timeout: timedelta = _TRANSFER) -> Any:
        """The process group of those ranks of `of`, which together are all, that this rank is among; None when it is alone.

        For transfers of tensors on `device`, inside `together` and `transfers`, that take `timeout` at most. Every rank calls it
        with the same lists.
        """
        if self.world_size == 1:
            return None
        self._connect()
        mine = None
        backend = "nccl" if str(device).startswith("cuda") else "gloo"
        for ranks in of:
            if len(ranks) > 1:
                made = dist.new_group(list(ranks), backend=backend, timeout=timeout)
                if self.rank in ranks:
                    mine = made
                    self._groups.append(made)
        return mine

    def at_close(self, let_go: Callable[[bool], None]) -> None:
        """Calls `let_go` when the groups end, with whether an error ends them: others wait until nobody has a connection any more."""
        self._closers.append(let_go)

    def broken(self) -> bool:
        """Whether a rank has failed in the work under way; then it takes part in no transfer any more."""
        return bool(_store().check([self._mark]))

    @property
    def _mark(self) -> str:
        """The key that a failing rank sets, for ranks that wait in a transfer."""
        return f"hone/broken/{self._works}"

    def transfers(self) -> AbstractContextManager[None]:
        """Transfers inside the groups that `group` made: an error of one rank ends them, and all ranks raise it."""
        return nullcontext() if self.world_size == 1 else self._telling()

    def _close(self, *, abort: bool = False) -> None:
        """Ends the groups of GPUs and of some ranks; with `abort` also what is under way between GPUs."""
        groups, self._groups = [*self._groups, *([] if self._gpus is None else [self._gpus])], []
        self._gpus = None
        while self._closers:
            self._closers.pop()(abort)
        for group in groups:
            if abort and "nccl" in dist.get_backend(group):
                group._get_backend(torch.device("cuda")).abort()
            dist.destroy_process_group(group)

    def _fold(self, tensor: Tensor, add: Callable[[Tensor, Tensor], Any]) -> Tensor:
        """`tensor` with every rank's values combined by `add`, in place and in the order of the ranks."""
        if self.world_size == 1:
            return tensor
        with self._telling():
            flat = tensor.view(-1)
            room = [torch.empty_like(flat[:CHUNK]) for _ in range(self.world_size)]
            shapes = self._meet((tensor.dtype, tensor.shape))
            assert len(set(shapes)) == 1, f"ranks add different tensors: {shapes}"
            with self._losing():
                for part in flat.split(CHUNK):
                    parts = [one[: len(part)] for one in room]
                    dist.all_gather(parts, part, group=self._group_of(tensor))
                    part.copy_(parts[0])
                    for one in parts[1:]:
                        add(part, one)
            return tensor

    def _group_of(self, tensor: Tensor) -> Any:
        """The process group over which `tensor` travels."""
        if not tensor.is_cuda:
            return self._group
        if self._gpus is None:
            self._gpus = dist.new_group(backend="nccl", timeout=_TRANSFER)
        return self._gpus

    def _connect(self) -> None:
        """Joins all ranks in a gloo group, once. Raises MachineError when they do not find each other."""
        if self._group is not None:
            return
        where = ", ".join(f"{name}={os.environ.get(name)}" for name in ("MASTER_ADDR", "MASTER_PORT"))
        said = f"rank {self.rank} waits for the other ranks of {self.world_size} at {where}: start all of them"
        late = threading.Timer(_LATE_S, warnings.warn, (said,))
        late.daemon = True
        late.start()
        try:
            if not dist.is_initialized():
                # torchrun's store outlives a restart of the ranks, and has the addresses of those that are gone.
                life = f"hone/life-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
                store, rank, world_size = next(dist.rendezvous("env://"))
                store.set_timeout(dist.distributed_c10d.default_pg_timeout)
                store = dist.PrefixStore(life, store)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
            atexit.register(self._leave, _Prepared(dist.destroy_process_group))
            self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        except (RuntimeError, ValueError, OSError) as error:
            what = f"rank {self.rank} cannot meet the other ranks at {where}: {_line(error)}"
            fix = "start all ranks, with torchrun --standalone or a MASTER_PORT that no other training has"
            raise self._known(MachineError(what, fix=fix)) from None
        finally:
            late.cancel()

    def _leave(self, end: _Prepared) -> None:
        """Ends gloo's threads before the interpreter does: one that frees a tensor afterwards aborts the process."""
        self._group = None
        if dist.is_initialized():
            end.within(_LEAVE_S)

    def _meet(self, value: Any = None) -> list[Any]:
        """Waits for all ranks; every rank's `value`. Raises the first rank's error when one brings an error."""
        values, error = self._met(value)
        if error is not None:
            raise self._known(error)
        return values

    def _known(self, error: E) -> E:
        """`error`, which no rank has to be told any more."""
        self._told = error
        error.told = True  # type: ignore[attr-defined]
        return error

    def _met(self, value: Any, error: HoneError | None = None) -> tuple[list[Any], HoneError | None]:
        """Every rank's `value`, and the first rank's error, one that is no `Lost` if there is one."""
        self._connect()
        everyone: list[Any] = [None] * self.world_size
        with self._losing():
            dist.all_gather_object(everyone, (value, error), group=self._group)
        values, errors = map(list, zip(*everyone, strict=True))
        ranks = [rank for rank, one in enumerate(errors) if one is not None]
        if not ranks:
            return values, None
        rank = min(ranks, key=lambda rank: isinstance(errors[rank], Lost))
        first, known = errors[rank], {one and one.what for one in errors}
        if rank and len(known) > 1 and f"rank {rank}" not in first.what:  # one of its own, which rank 0 does not have
            first = type(first)(f"rank {rank}: {first.what}", fix=first.fix)
        return values, first

    def tell(self, error: HoneError) -> HoneError | None:
        """The error with which all ranks end when this one has `error` before they met; None when the others do not come."""
        if self.world_size == 1:
            return error
        met = _Prepared(lambda: self._met(None, error)).within(_LATE_S)
        return met and met[1]

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Raises MachineError when a rank has died."""
        try:
            yield
        except RuntimeError as error:
            raise self._known(Lost.of(f"rank {self.rank} lost the other ranks", error)) from None

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Tells the other ranks about an error of this one at their next meeting, unless they know it.

        Of several HoneErrors all ranks raise the first rank's.
        """
        try:
            self._connect()  # before any work, so that a rank that dies meanwhile is noticed
            yield
        except Exception as error:
            if error is self._told:
                self._close(abort=True)  # what it has under way waits for the rank that failed
                raise
            said, first = error, None
            if not isinstance(error, HoneError):
                what = f"rank {self.rank} failed: {type(error).__name__}: {_line(error)}"
                said = MachineError(what, fix=f"see what rank {self.rank} printed")
            with suppress(MachineError, RuntimeError, ValueError):  # they may not have met yet
                _store().set(self._mark, str(self.rank))
            self._close(abort=True)
            if isinstance(error, Late):
                self._told = error
                raise
            with suppress(MachineError):  # when another rank has died, this one's error is still the one to show
                _, first = self._met(None, said)
            if first is not None and isinstance(error, HoneError):
                raise self._known(first) from None
            self._known(error)
            raise


class _Prepared:
    """`work` for a thread that is there before it is needed, because Python 3.12.0 to 3.12.2 start none when they exit."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._needed, self._found = threading.Event(), list[Any]()
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        self._needed.wait()
        with suppress(HoneError):
            self._found.append(work())

    def within(self, seconds: float) -> Any:
        """What the work returns; None when it takes longer, and goes on in its thread, or ends in a HoneError."""
        self._needed.set()
        self._thread.join(seconds)
        return next(iter(self._found), None)


def _store() -> Any:
    """The key-value store in which the ranks met."""
    return dist.distributed_c10d._get_default_store()


def _line(error: Exception) -> str:
    """The first line of its message, without the place in gloo's code and what gloo suspects."""
    line = str(error).partition("\n")[0].partition(". This is typically")[0]
    return line.partition(".cc:")[2].partition("] ")[2] or line
