"""Identity: circumstances are no part of it, earlier names are understood, and what drifted is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
from pydantic import Field

from hone.base.artifact import Artifact, Draft, start
from hone.base.errors import DriftError, SpecError
from hone.base.figure import Figure
from hone.base.run import Run
from hone.base.spec import EARLIER, Circumstance, Spec, fingerprint
from hone.base.table import Choice, Table, Technique

QUIET = Run(quiet=True)


class Speed(Technique):
    """How fast. It has no paper."""

    renamed: ClassVar = {"quickness": "rate"}

    rate: int = Field(1, description="Rate.")
    threads: Annotated[int, Circumstance()] = Field(1, description="Threads.")


SPEEDS = Table("speed", {"speed": f"{__name__}:Speed"})


class Inner(Spec):
    renamed: ClassVar = {"colour": "color"}

    color: str = Field("red", description="Color.")
    cache: Annotated[bool, Circumstance()] = Field(True, description="Whether results are kept.")


class Job(Spec):
    renamed: ClassVar = {"remat": "activation_checkpointing", "gone": None}

    steps: int = Field(3, description="Steps.")
    activation_checkpointing: str = Field("none", description="What is computed twice.")
    compile: Annotated[bool, Circumstance()] = Field(False, description="Whether it is compiled.")
    inner: Inner = Field(Inner(), description="More.")
    speeds: tuple[Annotated[Technique, Choice(SPEEDS)], ...] = Field((), description="Speeds.")


def earlier(folder: Path, spec: dict) -> Artifact:
    """An artifact as an earlier hone wrote it: its fingerprint is of all fields, under the names they had."""
    made = start(folder, kind="job", spec=Job(), run=QUIET)
    assert isinstance(made, Draft)
    made = made.commit()
    manifest = json.loads((folder / "hone.json").read_text())
    manifest["spec"] = spec
    manifest["fingerprint"] = fingerprint({"kind": "job", "spec": spec, "parents": {}})
    (folder / "hone.json").write_text(json.dumps(manifest))
    return Artifact.read(folder)


def test_circumstances_are_no_part_of_the_identity_at_any_depth():
    job = Job(compile=True, inner=Inner(cache=False), speeds=({"kind": "speed", "threads": 8},))
    same = Job(speeds=("speed",))
    assert job.identity() == same.identity() and job != same
    assert job.identity()["speeds"] == [{"kind": "speed", "rate": 1}]
    assert job.identity() != Job(speeds=({"kind": "speed", "rate": 2},)).identity()
    assert job.identity() != job.override({"inner.color": "blue"}).identity()


def test_an_artifact_made_in_other_circumstances_is_the_same(tmp_path):
    made = start(tmp_path / "job-a", kind="job", spec=Job(compile=True), run=QUIET).commit()
    assert made.manifest["spec"]["compile"] is True, "hone.json keeps the whole spec"
    assert isinstance(start(tmp_path / "job-a", kind="job", spec=Job(), run=QUIET), Artifact)


def test_an_interrupted_stage_resumes_in_other_circumstances(tmp_path):
    first = start(tmp_path / "job-a", kind="job", spec=Job(compile=True), run=QUIET)
    (first.state / "half").write_text("half")
    first._lock.close()
    assert start(tmp_path / "job-a", kind="job", spec=Job(), run=QUIET).resumed


def test_what_an_earlier_hone_made_from_the_same_is_the_same(tmp_path):
    before = {"steps": 3, "remat": "all", "gone": 7, "compile": True, "inner": {"colour": "red", "cache": True}}
    before["speeds"] = [{"kind": "speed", "quickness": 4, "threads": 2}]
    made = earlier(tmp_path / "job-a", before)
    wanted = Job(activation_checkpointing="all", speeds=({"kind": "speed", "rate": 4},))
    found = start(tmp_path / "job-a", kind="job", spec=wanted, run=QUIET)
    assert isinstance(found, Artifact) and found.fingerprint == made.fingerprint
    child = start(tmp_path / "job-b", kind="job", spec=Job(), parents={"job": found}, run=QUIET)
    assert child._identity["parents"][0]["fingerprint"] == made.fingerprint


def test_drift_from_an_earlier_hone_names_what_differs_and_no_circumstance(tmp_path):
    earlier(tmp_path / "job-a", {"compile": True, "steps": 9, "remat": "none", "gone": 7})
    with pytest.raises(
        DriftError, match=r"made from another spec: spec\.steps was 9, is 3; it was made by an earlier version of hone"
    ):
        start(tmp_path / "job-a", kind="job", spec=Job(), run=QUIET)
    start(tmp_path / "job-b", kind="job", spec=Job(steps=9), run=QUIET).commit()
    with pytest.raises(DriftError, match=r"spec\.steps was 9, is 3\n"):
        start(tmp_path / "job-b", kind="job", spec=Job(), run=QUIET)


def test_what_an_earlier_hone_could_and_this_one_cannot_is_said(tmp_path):
    earlier(tmp_path / "job-a", {"steps": 3, "wings": 2})
    with pytest.raises(
        DriftError, match=r"wings was 2.*it was made by an earlier version of hone, whose job stage had other options"
    ) as caught:
        start(tmp_path / "job-a", kind="job", spec=Job(), run=QUIET)
    assert "as an input" in caught.value.fix and "--redo=job-a" in caught.value.fix


def test_an_earlier_name_is_an_error_that_says_todays():
    with pytest.raises(SpecError, match="Job has no field 'remat'") as caught:
        Job.read({"remat": "all"})
    assert caught.value.fix == "it is called 'activation_checkpointing' now"
    with pytest.raises(SpecError, match="no field 'gone'") as caught:
        Job.read({"gone": 1})
    assert caught.value.fix == "leave it out: it is no longer needed"
    with pytest.raises(SpecError, match=r"no field 'inner\.colour'") as caught:
        Job.read({"inner": {"colour": "blue"}})
    assert caught.value.fix == "it is called 'color' now"
    assert Job.read({"remat": "all", "inner": {"colour": "blue"}}, EARLIER).inner.color == "blue"


class Meter:
    """A window whose energy is what the test says."""

    start_memory_bytes = 0

    def __init__(self, joules: float | None) -> None:
        self.used = joules

    def joules(self) -> float | None:
        return self.used

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def figures(self) -> list[Figure]:
        return [Figure(name="energy_j", value=self.used, unit="J", note="NVML")]


@pytest.mark.parametrize(
    ("before", "after", "total", "note"),
    [
        (5.0, 2.0, 7.0, "NVML; with interrupted runs"),
        (None, 2.0, 2.0, "NVML; of the last process only"),
        (5.0, None, None, "NVML"),
    ],
)
def test_energy_of_interrupted_runs_is_added(before, after, total, note, tmp_path):
    first = start(tmp_path / "job-a", kind="job", spec=Job(), run=QUIET)
    with pytest.raises(KeyboardInterrupt), first, first.measuring(Meter(before)):
        (first.folder / "half").write_text("half")
        first.keep_time()
        raise KeyboardInterrupt
    second = start(tmp_path / "job-a", kind="job", spec=Job(), run=QUIET)
    assert second.resumed
    with second.measuring(Meter(after)):
        second.keep_time()
    figure = second.commit().figures["energy_j"]
    assert (figure.value, figure.note) == (total, note)


def test_a_stage_that_fails_before_it_made_anything_leaves_no_folder(tmp_path):
    draft = start(tmp_path / "job-a", kind="job", spec=Job(), run=QUIET)
    with pytest.raises(SpecError), draft:
        raise SpecError("no", fix="yes")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SpecError), start(tmp_path / "job-a", kind="job", spec=Job(), run=QUIET) as draft:
        (draft.state / "half").write_text("half")
        raise SpecError("no", fix="yes")
    assert (tmp_path / "job-a.partial" / "state" / "half").exists()


def test_the_seconds_of_a_stage_that_clears_its_state_are_all_counted(tmp_path):
    draft = start(tmp_path / "job-a", kind="job", spec=Job(), run=QUIET)
    draft._started -= 10
    draft.keep_time()
    (draft.state / "elapsed_s").unlink()
    assert draft.elapsed_s >= 10
    draft.keep_time()
    assert float((draft.state / "elapsed_s").read_text()) >= 10
