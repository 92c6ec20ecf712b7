"""Checkpoints of a training: folders of safetensors and JSON, written atomically, also by a thread; the newest few are kept."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from functools import partial as partial_function
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.base.durable import sync
from hone.base.errors import ArtifactError, MachineError
from hone.base.ranks import Mesh
from hone.parallel.cut import Cut
from hone.train.faults.checksums import damage_of, sealed, unsealed, with_checksums

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX, _TENSORS, _PIECES, _CUTS = "step-", "tensors", "pieces", "cuts"

_FILES = "files"
"""The entry of numbers.json that says how many files of tensors a checkpoint has."""

_POLL_S = 0.05
"""Seconds between looks for the other ranks' parts; one look reads the names of one folder."""


class SavedTensors:
    """The tensors of a checkpoint, whichever ranks wrote them: whole, or in parts of the elements of their weight."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._parts: dict[str, list[tuple[int, int, Any, str]]] = {}
        self._cuts: dict[str, dict[Cut, list[tuple[int, int, Any, str]]]] = {}
        """The same of tensors of which each tensor-parallel rank has a part, by that part."""
        for path in sorted(folder.glob(f"{_TENSORS}*.safetensors")):
            file = safe_open(path, framework="pt")
            metadata = file.metadata() or {}
            pieces = json.loads(metadata.get(_PIECES, "{}"))
            cuts = {name: Cut.read(values) for name, values in json.loads(metadata.get(_CUTS, "{}")).items()}
            for key in file.keys():  # noqa: SIM118
                start, stop = pieces.get(key, (0, math.prod(file.get_slice(key).get_shape())))
                cut = cuts.get(key)
                parts = self._parts if cut is None else self._cuts.setdefault(key, {})
                parts.setdefault(key if cut is None else cut, []).append((start, stop, file, key))  # type: ignore[attr-defined]

    @property
    def labels(self) -> list[str]:
        """The names of all tensors."""
        return [*self._parts, *self._cuts]

    def cuts(self, label: str) -> list[Cut | None]:
        """The parts of a tensor that were written apart; [None]: it is whole."""
        return list(self._cuts[label]) if label in self._cuts else [None]

    def numel(self, label: str) -> int:
        """Elements of a whole tensor."""
        cuts = self._cuts.get(label)
        return math.prod(next(iter(cuts)).shape) if cuts else max(stop for _, stop, _, _ in self._parts[label])

    def whole(self, label: str) -> Tensor:
        """A tensor that is no part of others, in its shape."""
        ((_, _, file, key),) = self._parts[label]
        found: Tensor = file.get_tensor(key)
        return found

    def part(self, label: str, start: int, count: int, cut: Cut | None = None) -> Tensor:
        """Elements `start` to `start + count` of a tensor or of its part `cut`, flat [count].

        Only what has some of them is read, unless the tensor was written in other parts: then it is put together first.
        """
        there = self._cuts.get(label, {})
        if cut is None and not there:
            return self._range(label, self._parts[label], start, count)
        if cut in there:
            return self._range(label, there[cut], start, count)
        if there:
            whole = self._joined(label)
        else:
            assert cut is not None, "a whole tensor was read above"
            whole = self._range(label, self._parts[label], 0, math.prod(cut.shape)).view(cut.shape)
        whole = whole if cut is None else cut.take(whole)
        return whole.reshape(-1)[start : start + count]

    def _joined(self, label: str) -> Tensor:
        """A tensor from the parts of all tensor-parallel ranks."""
        import torch

        made, seen = None, 0
        for cut, parts in self._cuts[label].items():
            held = self._range(label, parts, 0, math.prod(cut.local_shape)).view(cut.local_shape)
            made = torch.empty(cut.shape, dtype=held.dtype) if made is None else made
            cut.put(held, made)
            seen += held.numel()
        assert made is not None, f"no part of {label}"
        self._whole_or_error(label, seen, made.numel())
        return made

    def _range(self, label: str, parts: list[tuple[int, int, Any, str]], start: int, count: int) -> Tensor:
        """Elements `start` to `start + count` of what `parts` are pieces of."""
        import torch

        found = []
        for first, last, file, key in sorted(parts, key=lambda part: part[:2]):
            begin, end = max(first, start), min(last, start + count)
            if begin < end:
                found.append(file.get_tensor(key).view(-1)[begin - first : end - first])
        read = torch.cat(found) if found else torch.empty(0)
        self._whole_or_error(label, len(read), count)
        return read

    @staticmethod
    def _whole_or_error(label: str, found: int, wanted: int) -> None:
        if found != wanted:
            raise ArtifactError(
                f"a checkpoint has {found} of {wanted} elements of {label}",
                fix="delete it: the training resumes from the one before",
            )


def opened(folder: Path) -> tuple[SavedTensors, dict[str, Any]]:
    """(tensors, numbers) of the checkpoint in `folder`.

    Raises ArtifactError when a file of it is missing, cut off or another's. The bytes of tensors are not looked at (`verified`).
    """
    from safetensors import SafetensorError

    try:
        numbers = unsealed((folder / "numbers.json").read_text("utf8"))
        count = numbers.pop(_FILES)
        for rank in range(count):
            if not (folder / _name(rank, count)).exists():
                raise FileNotFoundError(f"{_name(rank, count)} is missing")
        return SavedTensors(folder), numbers
    except (OSError, ValueError, SafetensorError) as error:
        raise _damaged(folder, f"{type(error).__name__}: {error}") from None


def verified(folder: Path, mesh: Mesh) -> tuple[SavedTensors, dict[str, Any]]:
    """As `opened`, after all bytes were compared with their checksums: each rank of `mesh` reads a part of the files.

    All ranks call it. Raises ArtifactError on all of them, naming the file and the tensor that is damaged.
    """

    # No rank raises before all know: an error at a meeting would end their groups.
    said = ""
    try:
        opened(folder)  # says of a file that is cut off that it is
        files = sorted(folder.glob(f"{_TENSORS}*.safetensors"))[mesh.rank :: mesh.world_size]
        said = next(filter(None, (damage_of(file) for file in files)), "")
    except ArtifactError as error:
        said = error.what.partition(_DAMAGED)[2]
    said = next(filter(None, mesh.gather(said)), "")
    if said:
        raise _damaged(folder, said)
    return opened(folder)


_DAMAGED = " is damaged: "


def _damaged(folder: Path, what: str) -> ArtifactError:
    return ArtifactError(f"the checkpoint {folder}{_DAMAGED}{what}", fix="--redo starts the training over")


def _name(rank: int, count: int) -> str:
    """The file of the tensors that `rank` of `count` ranks writes."""
    return f"{_TENSORS}.safetensors" if count == 1 else f"{_TENSORS}-{rank:05d}-of-{count:05d}.safetensors"


class Snapshot:
    """Copies of tensors in the host's memory, pinned where they come from a GPU; the memory is kept for the next copy."""

    def __init__(self) -> None:
        self._room: dict[str, Tensor] = {}

    def of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """A copy of every tensor, complete when this returns. The copies before are overwritten."""
        import torch

        self._room = {name: one for name, one in self._room.items() if name in tensors}
        devices = set()
        for name, tensor in tensors.items():
            room = self._room.get(name)
            if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
                room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._room[name] = room
            room.copy_(tensor.detach(), non_blocking=True)
            if tensor.is_cuda:
                devices.add(tensor.device)
        for device in devices:
            torch.cuda.synchronize(device)
        return dict(self._room)


class Writing:
    """One rank's part of a checkpoint while a thread writes it.

    `write` writes the part and makes it durable. Then the thread says so in `folder`, with an empty file; rank 0's thread
    waits for these files of all ranks and calls `publish`. So a checkpoint counts as soon as it is durable, without a
    meeting of the ranks in the middle of a step.
    """

    def __init__(
        self, folder: Path, rank: int, num_ranks: int, write: Callable[[], None], publish: Callable[[], None]
    ) -> None:
        self._folder, self._rank, self._num_ranks = folder, rank, num_ranks
        self._write, self._publish = write, publish
        self._written = threading.Event()
        self._all_written = threading.Event()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="hone-checkpoint", daemon=True)
        self._thread.start()

    def written(self) -> None:
        """Waits until this rank's part is durable. Raises MachineError when it could not be written."""
        self._written.wait()
        self._raise()

    def published(self) -> None:
        """Waits until the checkpoint counts; the caller knows that every rank's part is durable. Raises as `written`."""
        self._all_written.set()
        self._thread.join()
        self._raise()

    def close(self) -> None:
        """Ends the thread: what it writes is finished, the other ranks' parts are not waited for."""
        self._stop.set()
        self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise MachineError(
                f"the checkpoint {self._folder.name.removesuffix('.partial')} could not be written in the background on "
                f"rank {self._rank}: {type(self._error).__name__}: {self._error}",
                fix="see that the disk has room and is there, then start again: it resumes at the last whole checkpoint; "
                "checkpoint.async_mode: disabled writes inside the step",
            ) from self._error

    def _work(self) -> None:
        try:
            self._write()
            self._mark(self._rank).touch()
            self._written.set()
            if self._rank == 0 and self._all_there():
                for rank in range(self._num_ranks):
                    self._mark(rank).unlink(missing_ok=True)
                self._publish()
        except BaseException as error:  # raised again where the training meets it: `written` or `published`
            self._error = error
        finally:
            self._written.set()

    def _mark(self, rank: int) -> Path:
        """The file that says that the part of `rank` is durable."""
        return self._folder / f"written-{rank:05d}"

    def _all_there(self) -> bool:
        """Waits for every rank's part; whether they are all there, which they are not when `close` came first."""
        while True:
            stopped = self._stop.is_set()
            if self._all_written.is_set() or all(self._mark(rank).exists() for rank in range(self._num_ranks)):
                return True
            if stopped:
                return False
            self._all_written.wait(_POLL_S)


class Checkpoints:
    """Checkpoints in `folder`, each `step-00000100/` with numbers.json and one file of tensors, with checksums, for each rank.

    A checkpoint is written under another name, synced, and renamed: after a kill it is whole or missing. All ranks of
    `mesh` call `save`, in a folder that all of them see; any number of ranks reads it. `background`: `save` returns when the
    tensors are copied to the host's memory, and a thread writes them (`Writing`).
    """

    def __init__(self, folder: Path, keep: int = 2, mesh: Mesh | None = None, *, background: bool = False) -> None:
        self.folder = Path(folder)
        self.keep = keep
        self.mesh = mesh or Mesh()
        self._or_error(partial_function(self.folder.mkdir, parents=True, exist_ok=True), self.folder)
        self.largest_bytes = self._bytes() if self.mesh.leads else 0
        """The largest number of bytes that whole checkpoints had on disk at once."""
        self._snapshot = Snapshot() if background else None
        self._writing: Writing | None = None
        self.stays: Callable[[int, int], bool] = lambda step, oldest: False
        """Whether a checkpoint of `step` stays beside the newest `keep`, of which `oldest` is the oldest step."""

    def save(
        self,
        step: int,
        tensors: dict[str, Tensor],
        numbers: dict[str, Any],
        pieces: Mapping[str, tuple[int, int]] | None = None,
        cuts: Mapping[str, Cut] | None = None,
    ) -> None:
        """Writes the state after `step`; deletes all but the newest `keep` checkpoints.

        `tensors` are what this rank writes; of those in `pieces` a part, from which element to which. `cuts` are those of
        which a tensor-parallel rank has a part; pieces are of these. Raises what `finish` raises.
        """
        from hone.model.shards import save_tensors

        self.finish()
        target = self.folder / f"{_PREFIX}{step:08d}"
        partial = target.with_name(target.name + ".partial")

        def begin() -> None:
            for stale in (partial, target):
                shutil.rmtree(stale, ignore_errors=True)
            partial.mkdir()
            (partial / "numbers.json").write_text(sealed({**numbers, _FILES: count}), encoding="utf8")

        count, rank = self.mesh.world_size, self.mesh.rank
        self.mesh.from_leader(partial_function(self._or_error, begin, target))
        file = partial / _name(rank, count)
        metadata = {_PIECES: json.dumps(pieces)} if pieces else {}
        metadata |= {_CUTS: json.dumps(cuts)} if cuts else {}
        held = {name: tensor.contiguous() for name, tensor in tensors.items()}
        held = held if self._snapshot is None else self._snapshot.of(held)

        def write() -> None:
            on_cpu = {name: tensor.cpu() for name, tensor in held.items()}
            save_tensors(file, on_cpu, with_checksums(on_cpu, metadata))
            sync(file)

        publish = partial_function(self._publish, partial, target)
        if self._snapshot is not None:
            self._writing = Writing(partial, rank, count, write, publish)
            return
        with self.mesh.transfers():
            self._or_error(write, target)
        self.mesh.gather(None)  # every rank's file is durable
        self.mesh.from_leader(partial_function(self._or_error, publish, target))

    def _or_error(self, work: Callable[[], None], target: Path) -> None:
        """Does `work` on the checkpoint `target`. Raises MachineError when the disk does not take it."""
        try:
            work()
        except OSError as error:
            raise MachineError(
                f"the checkpoint {target.name} could not be written on rank {self.mesh.rank}: {type(error).__name__}: {error}",
                fix=f"see that {self.folder} is there, may be written and has room, then start again: it resumes at the last "
                "whole checkpoint",
            ) from error

    def _publish(self, partial: Path, target: Path) -> None:
        """Gives the durable checkpoint `partial` its name, and deletes the oldest."""
        sync(partial / "numbers.json")
        sync(partial)
        os.rename(partial, target)
        sync(self.folder)
        self.largest_bytes = max(self.largest_bytes, self._bytes())
        whole = self._whole()
        oldest = whole[-self.keep :][0][0]
        for step, old in whole[: -self.keep]:
            if not self.stays(step, oldest):
                shutil.rmtree(old)

    def finish(self) -> None:
        """Waits until the checkpoint that is being written counts. All ranks call it.

        Raises MachineError on all of them when one could not write its part; the last whole checkpoint is still there.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            with self.mesh.transfers():
                writing.written()
            self.mesh.gather(None)  # every rank's file is durable
        except BaseException:
            writing.close()
            raise
        with self.mesh.transfers():
            writing.published()
        self.mesh.gather(None)

    def close(self) -> None:
        """After an error, without the other ranks: ends the write under way, which counts if all parts are there."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.close()

    def newest(self, say: Callable[[str], None] = print) -> tuple[SavedTensors, dict[str, Any]] | None:
        """(tensors, numbers) of the newest checkpoint that can be read; None when there is none. `say` is told of damaged ones.

        Raises ArtifactError when there are some, all damaged.
        """
        damaged = None
        for _, folder in reversed(self.mesh.from_leader(self._whole)):
            try:
                return verified(folder, self.mesh)
            except ArtifactError as error:  # on all ranks
                if self.mesh.leads:
                    say(f"{error.what}; it is passed over")
                damaged = error
        if damaged is not None:
            raise damaged
        return None

    def of(self, step: int) -> tuple[SavedTensors, dict[str, Any]]:
        """(tensors, numbers) of the checkpoint after `step`. All ranks call it. Raises ArtifactError when it is damaged."""
        return verified(self.folder / f"{_PREFIX}{step:08d}", self.mesh)

    def drop_after(self, step: int) -> None:
        """Deletes the checkpoints after `step`. All ranks call it."""
        self.finish()

        def drop() -> None:
            for _, folder in (one for one in reversed(self._whole()) if one[0] > step):
                shutil.rmtree(folder)

        self.mesh.from_leader(drop)

    def _bytes(self) -> int:
        return sum(file.stat().st_size for _, folder in self._whole() for file in folder.iterdir())

    def _whole(self) -> list[tuple[int, Path]]:
        """(step, folder) of every finished checkpoint, oldest first."""
        found = []
        for path in self.folder.iterdir():
            number = path.name.removeprefix(_PREFIX)
            if path.is_dir() and number.isdigit() and (path / "numbers.json").exists():
                found.append((int(number), path))
        return sorted(found)
