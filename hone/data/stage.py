"""The data stage: raw text in, packed tokens with a tokenizer, kept documents and statistics out."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hone.base.artifact import LOG, Artifact, Draft
from hone.base.errors import DATA_PACKAGES, MissingExtra, SpecError
from hone.base.plan import Facts, Machine
from hone.base.run import Run
from hone.base.table import Technique, is_foreign
from hone.data.settings import Settings
from hone.feed.files.listing import PYTHON, SEEN, list_source

if TYPE_CHECKING:
    from hone.data.forecast import DataPlan


class Data(Settings):
    """Curates text: read, extract, annotate, filter, deduplicate, split, tokenize, pack."""

    stage: ClassVar[str] = "data"
    roles: ClassVar[dict[str, bool]] = {}
    uses_torch: ClassVar[bool] = False

    def make(self, out: Path | str, parents: dict[str, Artifact] | None = None, run: Run | None = None) -> Artifact:
        """As every stage; warns when the finished artifact was made from files that have changed since, or may have."""
        for source in (self.source,) if isinstance(self.source, str) else self.source:
            if source != PYTHON and Path(source).expanduser().resolve() in Path(out).resolve().parents:
                raise SpecError(
                    f"{out} is inside its own source {source}", fix="give an output folder outside of the text"
                )
        artifact = super().make(out, parents, run)
        try:
            now = list_source(self.source, self.forced)
            before = json.loads((artifact.folder / "stats.json").read_text(encoding="utf8"))["input"]["digest"]
            seen = artifact.folder / LOG / SEEN
            touched = seen.exists() and seen.read_text(encoding="utf8") != now.seen
        except (
            SpecError,
            OSError,
            ValueError,
            KeyError,
        ):  # the input may be deleted; the artifact does not need it
            return artifact
        name = artifact.folder.name
        if before != now.digest:
            (run or Run()).warn(f"{self.source} has changed since {name} was made; make it again with --redo={name}")
        elif touched:  # a copied corpus has other times too
            (run or Run()).warn(
                f"{self.source} may have changed since {name} was made: its files have other modification times, but the same names and "
                f"sizes; if it has, make {name} again with --redo={name}"
            )
        return artifact

    def files(self) -> dict[str, Path]:
        """Evaluation sets, seeds of scorers, lists of filters and the records of earlier artifacts, whose content is part of the artifact's identity."""
        lists = [(f"filters.{number}", technique.files) for number, technique in enumerate(self.filters)]  # type: ignore[attr-defined]
        named = lists + [
            (f"{place}.{name}", getattr(technique, name, ()))
            for field, names in (("decontaminations", ("evaluations",)), ("scorers", ("high", "low", "words")))
            for number, outer in enumerate(getattr(self, field))
            for place, technique in _within(f"{field}.{number}", outer)
            for name in names
        ]
        records = {
            f"dedups.{number}.{name}": path
            for number, technique in enumerate(self.dedups)
            for name, path in technique.files().items()  # type: ignore[attr-defined]
        }
        records |= self._own_code() | self.identifier.files()  # type: ignore[attr-defined]
        return records | {
            f"{place}.{number}/{member.relative_to(path).as_posix()}": member
            for place, paths in named
            for number, path in enumerate(Path(name).expanduser() for name in paths)
            for member in (sorted(path.rglob("*")) if path.is_dir() else [path])
            if member.is_file()
        }

    def _own_code(self) -> dict[str, Path]:
        """The source files of techniques that are not hone's: results of other code are not reused."""
        found = {}
        for field in type(self).model_fields:
            value = getattr(self, field)
            for outer in value if isinstance(value, tuple) else (value,):
                for _, one in _within(field, outer) if isinstance(outer, Technique) else ():
                    file = inspect.getsourcefile(type(one)) if is_foreign(type(one)) else None
                    if file is not None:
                        found[f"code.{type(one).__module__}"] = Path(file)
        return found

    def plan(self, facts: Mapping[str, Facts], machine: Machine) -> DataPlan:
        """Runs a sample of the source. The time is that of one worker; `DataPlan.pace` gives it for any number of workers."""
        for package in DATA_PACKAGES:
            MissingExtra.need("the data stage", package, "data")
        from hone.data.conversations.encode import check_template
        from hone.data.forecast import plan

        check_template(self.tokenizer)
        return plan(self)

    def run(self, plan: DataPlan, draft: Draft, parents: dict[str, Artifact], run: Run) -> None:
        """Writes the artifact's files in `draft.folder`; every step resumes from `draft.state`.

        A mistake in the spec or the source leaves no partial folder, in which there would be nothing to resume.
        """
        from hone.data.curate import curate

        try:
            curate(self, list_source(self.source, self.forced), plan, draft, run)
        except SpecError:
            shutil.rmtree(draft.folder, ignore_errors=True)
            raise


def _within(place: str, technique: Technique) -> Iterator[tuple[str, Technique]]:
    """(place, technique) of `technique` and of techniques among its fields, such as a cascade's scorers."""
    yield place, technique
    for name in type(technique).model_fields:
        value = getattr(technique, name)
        if isinstance(value, Technique):
            yield from _within(f"{place}.{name}", value)
