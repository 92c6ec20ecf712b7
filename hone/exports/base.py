"""Base of the export formats: their options, the file that they may write, and what they say of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from hone.base.errors import ArtifactError, SpecError
from hone.base.figure import human_bytes
from hone.base.partial import PULL, need_local
from hone.base.run import Run
from hone.base.table import Technique

if TYPE_CHECKING:
    from torch import Tensor


class Exported(NamedTuple):
    """The file, its size, the type of each tensor by its name in the file, and what was done otherwise than asked."""

    path: Path
    num_bytes: int
    types: dict[str, str]
    notes: list[str]

    def describe(self) -> str:
        """The result as the command line prints it."""
        counts: dict[str, int] = {}
        for name in self.types.values():
            counts[name] = counts.get(name, 0) + 1
        kinds = ", ".join(f"{name} {count}" for name, count in counts.items())
        return "\n".join(
            [
                f"{self.path}: {human_bytes(self.num_bytes)}; tensors by type: {kinds}",
                *(f"note: {one}" for one in self.notes),
            ]
        )


class Export(Technique):
    """A file format: its fields are its options; a subclass writes `ending` and `write`."""

    ending: ClassVar[str]
    """How the names of its files end: '.gguf'."""

    def export(
        self, model: Path | str, out: Path | str, run: Run, importance: Mapping[str, Tensor] | None = None
    ) -> Exported:
        """Checks the place of the file, then `write`. Raises SpecError or ArtifactError when `out` is no free file name."""
        path = self._free(out, run.redo)
        need_local(model, PULL)
        return self.write(Path(model), path, run, importance or {})

    def write(self, model: Path, path: Path, run: Run, importance: Mapping[str, Tensor]) -> Exported:
        """Writes the model folder `model`, dense or quantized, as the file `path`, which appears when it is whole.

        `importance` weights the errors of rounding: by checkpoint module, float32 [columns], the mean square of its inputs.
        """
        raise NotImplementedError

    def _free(self, out: Path | str, redo: bool) -> Path:
        """The path to write."""
        need_local(out, f"give a local file, such as model{self.ending}")
        path = Path(out).expanduser()
        if path.suffix != self.ending:
            raise SpecError(
                f"out is {path}, which does not end in {self.ending}",
                fix=f"name a file: {path / f'model{self.ending}'}",
            )
        if path.is_dir():
            raise SpecError(f"{path} is a folder", fix=f"name a file: {path / f'model{self.ending}'}")
        if not redo:
            need_free(path)
        return path


def need_free(path: Path) -> None:
    """Raises ArtifactError where `path` exists."""
    if path.exists():
        raise ArtifactError(
            f"{path} exists", fix="give another name, or --redo (in Python Run(redo=True)) to replace it"
        )
