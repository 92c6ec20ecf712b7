"""Identity: circumstances are no part of it, and what drifted is named."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import Field

from hone.base.artifact import Artifact, start
from hone.base.errors import DriftError, SpecError
from hone.base.figure import Figure
from hone.base.run import Run
from hone.base.spec import Circumstance, Spec
from hone.base.table import Choice, Table, Technique

QUIET = Run(quiet=True)


class Speed(Technique):
    """How fast. It has no paper."""

    rate: int = Field(1, description="Rate.")
    threads: Annotated[int, Circumstance()] = Field(1, description="Threads.")


SPEEDS = Table("speed", {"speed": f"{__name__}:Speed"})


class Inner(Spec):
    color: str = Field("red", description="Color.")
    cache: Annotated[bool, Circumstance()] = Field(True, description="Whether results are kept.")


class Job(Spec):
    steps: int = Field(3, description="Steps.")
    activation_checkpointing: str = Field("none", description="What is computed twice.")
    compile: Annotated[bool, Circumstance()] = Field(False, description="Whether it is compiled.")
    inner: Inner = Field(Inner(), description="More.")
    speeds: tuple[Annotated[Technique, Choice(SPEEDS)], ...] = Field((), description="Speeds.")


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


def test_drift_names_the_field_and_no_circumstance(tmp_path):
    start(tmp_path / "job-b", kind="job", spec=Job(steps=9, compile=True), run=QUIET).commit()
    with pytest.raises(DriftError, match=r"spec\.steps was 9, is 3\n") as caught:
        start(tmp_path / "job-b", kind="job", spec=Job(), run=QUIET)
    assert "another name" in caught.value.fix and "--redo=job-b" in caught.value.fix


def test_a_field_of_a_nested_spec_is_found_by_its_name():
    with pytest.raises(SpecError, match="Job has no field 'color'") as caught:
        Job.read({"color": "blue"})
    assert caught.value.fix.startswith("did you mean 'inner.color'? known fields: steps")


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


def test_an_early_failure_leaves_no_folder(tmp_path):
    draft = start(tmp_path / "job-a", kind="job", spec=Job(), run=QUIET)
    with pytest.raises(SpecError), draft:
        raise SpecError("no", fix="yes")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SpecError), start(tmp_path / "job-a", kind="job", spec=Job(), run=QUIET) as draft:
        (draft.state / "half").write_text("half")
        raise SpecError("no", fix="yes")
    assert (tmp_path / "job-a.partial" / "state" / "half").exists()


def test_seconds_count_also_when_a_stage_clears_its_state(tmp_path):
    draft = start(tmp_path / "job-a", kind="job", spec=Job(), run=QUIET)
    draft._started -= 10
    draft.keep_time()
    (draft.state / "elapsed_s").unlink()
    assert draft.elapsed_s >= 10
    draft.keep_time()
    assert float((draft.state / "elapsed_s").read_text()) >= 10
