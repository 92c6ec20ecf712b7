"""Artifacts: whole or not there, reused, guarded against drift, resumed, locked."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from pydantic import Field

from hone.base.artifact import Artifact, Draft, start
from hone.base.durable import sha256, write_jsonl
from hone.base.errors import ArtifactError, DriftError, HoneError, MachineError, SpecError
from hone.base.figure import Estimate
from hone.base.identity import difference
from hone.base.interval import Interval
from hone.base.plan import Facts, Plan
from hone.base.run import Run
from hone.base.spec import Spec
from hone.base.stage import Stage


class Knobs(Spec):
    depth: int = Field(2, description="Depth.")


QUIET = Run(quiet=True)


def finish(folder, **knobs):
    draft = start(folder, kind="data", spec=Knobs(**knobs), run=QUIET)
    assert isinstance(draft, Draft)
    (draft.folder / "x.txt").write_text("x")
    (draft.log / "t.txt").write_text("time")
    draft.predict({"size": Estimate(value=2, unit="B")})
    draft.record("size", 1, "B")
    return draft.commit()


def test_a_finished_artifact_is_reused(tmp_path):
    made = finish(tmp_path / "data-a")
    again = start(tmp_path / "data-a", kind="data", spec=Knobs(), run=QUIET)
    assert isinstance(again, Artifact)
    assert again.fingerprint == made.fingerprint and again.name == "a"
    assert again.figures["size"].estimate.value == 2 and again.figures["size"].error == 1.0
    assert not list((tmp_path / "data-a").glob("state")) and (tmp_path / "data-a" / "log" / "t.txt").exists()
    again.verify()


def test_content_is_everything_but_the_log(tmp_path):
    one, two = finish(tmp_path / "a"), finish(tmp_path / "b")
    assert one.content == two.content
    (two.folder / "x.txt").write_text("y")
    with pytest.raises(ArtifactError, match=r"x\.txt"):
        two.verify()


def test_drift_names_the_field_and_two_ways_out(tmp_path):
    finish(tmp_path / "data-a")
    with pytest.raises(DriftError) as error:
        start(tmp_path / "data-a", kind="data", spec=Knobs(depth=3), run=QUIET)
    assert "spec.depth was 2, is 3" in error.value.what
    assert "another name" in error.value.fix and "--redo" in error.value.fix
    redone = start(tmp_path / "data-a", kind="data", spec=Knobs(depth=3), run=Run(quiet=True, redo=True))
    assert isinstance(redone, Draft) and not redone.resumed


def test_parents_are_part_of_the_identity(tmp_path):
    parent, other = finish(tmp_path / "data-a"), finish(tmp_path / "data-b", depth=5)
    start(tmp_path / "train-x", kind="train", spec=Knobs(), parents={"data": parent}, run=QUIET).commit()
    with pytest.raises(DriftError, match=r"parents\.data"):
        start(tmp_path / "train-x", kind="train", spec=Knobs(), parents={"data": other}, run=QUIET)


def test_an_interrupted_stage_resumes_with_its_state(tmp_path):
    code = f"""
    import os
    from hone.base.artifact import start
    from hone.base.run import Run
    from tests.base.test_artifact import Knobs
    draft = start({str(tmp_path / "data-a")!r}, kind="data", spec=Knobs(), run=Run(quiet=True))
    (draft.state / "half").write_text("half")
    draft.keep_time()
    os.kill(os.getpid(), 9)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)]).returncode == -9
    with pytest.raises(ArtifactError, match="unfinished"):
        Artifact.read(tmp_path / "data-a")
    draft = start(tmp_path / "data-a", kind="data", spec=Knobs(), run=QUIET)
    assert draft.resumed and (draft.state / "half").read_text() == "half" and draft.elapsed_s > 0


@pytest.mark.parametrize("moment", ["os.rename", "hone.base.partial.sweep"])
def test_a_kill_during_commit_loses_nothing(tmp_path, monkeypatch, moment):
    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    draft = start(tmp_path / "data-a", kind="data", spec=Knobs(), run=QUIET)
    (draft.state / "half").write_text("half")
    (draft.folder / "x.txt").write_text("x")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(moment, kill)
        draft.commit()
    draft._lock.close()
    again = start(tmp_path / "data-a", kind="data", spec=Knobs(), run=QUIET)
    if moment == "os.rename":
        assert again.resumed and (again.state / "half").exists()
        again = again.commit()
    assert sorted(path.name for path in again.folder.iterdir()) == ["hone.json", "log", "x.txt"]
    again.verify()


def test_another_spec_does_not_drop_interrupted_work(tmp_path):
    first = start(tmp_path / "data-a", kind="data", spec=Knobs(), run=QUIET)
    (first.folder / "half.txt").write_text("half")
    first._lock.close()
    with pytest.raises(DriftError, match=r"unfinished work of another spec: spec\.depth was 2, is 9\n.*--redo=data-a"):
        start(tmp_path / "data-a", kind="data", spec=Knobs(depth=9), run=QUIET)
    resumed = start(tmp_path / "data-a", kind="data", spec=Knobs(), run=QUIET)
    assert resumed.resumed and (resumed.folder / "half.txt").read_text() == "half"
    resumed._lock.close()
    anew = start(tmp_path / "data-a", kind="data", spec=Knobs(depth=9), run=Run(quiet=True, redo=True))
    assert not anew.resumed and not (anew.folder / "half.txt").exists()


@pytest.mark.parametrize(("error", "asks"), [(SpecError, False), (MachineError, True), (KeyboardInterrupt, True)])
def test_work_that_was_resumed_is_never_dropped_unasked(error, asks, tmp_path):
    """Of what was begun, a mistake of its spec alone is no work to keep: the error said what to change."""

    def begun(depth: int) -> Draft:
        return start(tmp_path / "data-a", kind="data", spec=Knobs(depth=depth), run=QUIET)

    with pytest.raises(error), begun(2) as draft:
        (draft.folder / "half.txt").write_text("half")
        raise error("no") if error is KeyboardInterrupt else error("no", fix="yes")
    if asks:
        with pytest.raises(DriftError):
            begun(3)
        return
    again = begun(2)
    assert again.resumed
    again._lock.close()
    for _ in range(2):  # it went on since, so there may be hours of work in it, whatever ends it now
        with pytest.raises(DriftError):
            begun(3)
        with pytest.raises(error), begun(2):
            raise error("no", fix="yes")


def test_what_began_with_a_mistake_is_begun_anew_by_another_spec(tmp_path):
    with pytest.raises(SpecError), start(tmp_path / "data-a", kind="data", spec=Knobs(), run=QUIET) as draft:
        (draft.folder / "half.txt").write_text("half")
        raise SpecError("no", fix="yes")
    other = start(tmp_path / "data-a", kind="data", spec=Knobs(depth=9), run=QUIET)
    assert not other.resumed and not (other.folder / "half.txt").exists()


def test_a_folder_that_was_begun_by_an_earlier_hone_is_resumed(tmp_path):
    """Its file has the fingerprint alone."""
    first = start(tmp_path / "data-a", kind="data", spec=Knobs(), run=QUIET)
    (first.folder / "half.txt").write_text("half")
    (first.folder / "begun.json").write_text(first.fingerprint)
    first._lock.close()
    with pytest.raises(DriftError, match="unfinished work of another spec\n"):
        start(tmp_path / "data-a", kind="data", spec=Knobs(depth=9), run=QUIET)
    assert start(tmp_path / "data-a", kind="data", spec=Knobs(), run=QUIET).resumed


def test_two_at_once_is_refused(tmp_path):
    draft = start(tmp_path / "data-a", kind="data", spec=Knobs(), run=QUIET)
    with pytest.raises(ArtifactError, match="another process"):
        start(tmp_path / "data-a", kind="data", spec=Knobs(), run=QUIET)
    draft.commit()
    assert isinstance(start(tmp_path / "data-a", kind="data", spec=Knobs(), run=QUIET), Artifact)


def test_nothing_of_others_is_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ArtifactError, match="not an artifact of hone"):
        start(tmp_path / "mine", kind="data", spec=Knobs(), run=Run(quiet=True, redo=True))
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_a_foreign_folder_is_adopted_by_its_files(tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    before = Artifact.read(folder)
    assert before.kind == "foreign"
    (folder / "config.json").write_text('{"a": 1}')
    assert Artifact.read(folder).fingerprint != before.fingerprint


@pytest.mark.parametrize("broken", ["{", "[]", "{}", '{"format": 99}'])
def test_a_broken_manifest_is_one_clear_error(tmp_path, broken):
    made = finish(tmp_path / "data-a")
    (made.folder / "hone.json").write_text(broken)
    with pytest.raises(ArtifactError) as error:
        Artifact.read(made.folder)
    assert error.value.fix


def test_a_missing_folder_gets_the_nearest_name(tmp_path):
    finish(tmp_path / "data-text")
    with pytest.raises(ArtifactError, match=r"did you mean .*data-text"):
        Artifact.read(tmp_path / "data-txt")


def test_an_estimate_without_a_figure_is_our_bug(tmp_path):
    draft = start(tmp_path / "data-a", kind="data", spec=Knobs(), run=QUIET)
    draft.predict({"never": Estimate(value=1, unit="s")})
    with pytest.raises(AssertionError, match="never"):
        draft.commit()


class Half(Stage):
    stage = "train"
    roles = {"data": True, "teacher": False}  # noqa: RUF012

    def plan(self, facts, machine):
        return Plan(estimates={"letters": Estimate(value=facts["data"].letters if facts else 0, unit="")})

    def run(self, plan, draft, parents, run):
        write_jsonl(draft.folder / "rows.jsonl", [{"a": 1}])
        draft.record("letters", 1, "")


class Letters(Facts):
    """How long a text is."""

    mark = "x.txt"
    letters: int

    @classmethod
    def of(cls, folder):
        return cls(where=str(folder), letters=len((folder / cls.mark).read_text()))


def test_stage_checks_roles(tmp_path, monkeypatch):
    monkeypatch.setattr("hone.base.plan.FACTS", {"text": "tests.base.test_artifact:Letters"})
    with pytest.raises(HoneError, match=r"(?s)needs the input 'data'.*from: {data: NAME"):
        Half().make(tmp_path / "t", {}, QUIET)
    parent = finish(tmp_path / "data-a")
    with pytest.raises(HoneError, match="no input 'model'"):
        Half().make(tmp_path / "t", {"data": parent, "model": parent}, QUIET)
    made = Half().make(tmp_path / "t", {"data": parent}, QUIET)
    manifest = json.loads((made.folder / "hone.json").read_text())
    assert manifest["parents"][0]["fingerprint"] == parent.fingerprint and os.path.exists(made.folder / "rows.jsonl")
    assert made.figures["letters"].estimate.value == 1, "the plan read the parent's facts"


def test_a_failed_stage_can_be_tried_again_at_once(tmp_path):
    class Fails(Half):
        roles = {}  # noqa: RUF012

        def run(self, plan, draft, parents, run):
            raise HoneError("no", fix="yes")

    for _ in range(2):
        with pytest.raises(HoneError, match="no"):
            Fails().make(tmp_path / "t", {}, QUIET)


def test_the_content_of_a_named_file_is_part_of_the_identity(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one")
    start(tmp_path / "a", kind="data", spec=Knobs(), files={"text": text}, run=QUIET).commit()
    assert isinstance(start(tmp_path / "a", kind="data", spec=Knobs(), files={"text": text}, run=QUIET), Artifact)
    text.write_text("two")
    with pytest.raises(DriftError, match=r"files\.text"):
        start(tmp_path / "a", kind="data", spec=Knobs(), files={"text": text}, run=QUIET)


def test_difference_finds_nested_fields():
    assert difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}) == "a.1.b was 2, is 3"
    assert difference({"a": 1}, {"a": 1}) == ""
    assert difference({"a": 1}, {}) == "a was 1, is 'absent'"


def test_nothing_is_made_inside_an_artifact_or_an_input(tmp_path):
    made = finish(tmp_path / "data-a")
    with pytest.raises(ArtifactError, match="is inside"):
        start(made.folder / "more", kind="data", spec=Knobs(), run=QUIET)
    (tmp_path / "foreign").mkdir()
    foreign = Artifact.read(tmp_path / "foreign")
    with pytest.raises(ArtifactError, match="is inside"):
        start(tmp_path / "foreign" / "x" / "y", kind="data", spec=Knobs(), parents={"model": foreign}, run=QUIET)
    assert not any((tmp_path / "foreign").iterdir()) and not (made.folder / "more.partial").exists()


def test_a_manifest_that_a_full_disk_cut_off_is_no_content(tmp_path):
    whole = finish(tmp_path / "data-a")
    draft = start(tmp_path / "data-b", kind="data", spec=Knobs(), run=QUIET)
    (draft.folder / "hone.json.tmp").write_text("")
    (draft.folder / "x.txt").write_text("x")
    assert draft.commit().content == whole.content


def test_a_manifest_of_wrong_types_is_corrupt(tmp_path):
    path = finish(tmp_path / "data-a").folder / "hone.json"
    good = json.loads(path.read_text())
    for name, wrong in (("kind", None), ("figures", {}), ("files", []), ("parents", 3), ("fingerprint", [])):
        path.write_text(json.dumps(good | {name: wrong}))
        with pytest.raises(ArtifactError, match="corrupt"):
            Artifact.read(path.parent)
    for text in ('{"format": 1}', "[" * 100_000, "null"):
        path.write_text(text)
        with pytest.raises(ArtifactError, match="corrupt"):
            Artifact.read(path.parent)


def test_a_figure_with_another_field_is_one_error_with_a_way_out(tmp_path):
    path = finish(tmp_path / "data-a").folder / "hone.json"
    good = json.loads(path.read_text())
    path.write_text(json.dumps(good | {"figures": [{"name": "loss", "value": 1.0, "unit": "nats", "spread": 0.1}]}))
    with pytest.raises(ArtifactError, match=r"hone.json: field spread of the figure loss[^$]*--redo") as caught:
        _ = Artifact.read(path.parent).figures
    assert str(caught.value).count("\n") == 1


def test_figures_of_earlier_manifests_are_read(tmp_path):
    """`ci95` was half of a 95 % interval of an unknown number of observations; now the level and the number are there."""
    path = finish(tmp_path / "data-a").folder / "hone.json"
    good = json.loads(path.read_text())
    rows = [{"name": "loss", "value": 1.0, "unit": "nats", "ci95": half} for half in (0.1, None)]
    for row, interval in zip(rows, (Interval(half_width=0.1, level=0.95, n=None), None)):
        path.write_text(json.dumps(good | {"figures": [row]}))
        found = Artifact.read(path.parent).figures["loss"]
        assert found.interval == interval and found.half_width == (interval and 0.1)
        assert "ci95" not in found.model_dump()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_no_figure_and_said(tmp_path, value):
    draft = start(tmp_path / "data-a", kind="data", spec=Knobs(), run=QUIET)
    draft.record("loss", value, "nats", note="window 8")
    draft.record("other", value, "nats")
    made = Artifact.read(draft.commit().folder)
    assert made.figures["loss"].value is None and made.figures["loss"].note == f"{value}, which is not finite; window 8"
    assert made.figures["other"].note == f"{value}, which is not finite"


def date_after(path, manifest):
    """Gives `path` a time behind the manifest's: a test is faster than a file system's clock ticks."""
    later = manifest.stat().st_mtime_ns + 10**9
    os.utime(path, ns=(later, later))


def test_an_edited_file_is_noticed(tmp_path):
    made = finish(tmp_path / "data-a")
    assert Artifact.read(made.folder).changed is None
    for text in ("y", "longer"):  # of the same size, and of another
        (made.folder / "x.txt").write_text(text)
        date_after(made.folder / "x.txt", made.folder / "hone.json")
        for use in (
            lambda: start(tmp_path / "train-b", kind="train", spec=Knobs(), parents={"data": made}, run=QUIET),
            lambda: start(made.folder, kind="data", spec=Knobs(), run=QUIET),
        ):
            with pytest.raises(ArtifactError, match=r"x\.txt is no longer the file") as caught:
                use()
            assert "--redo=data-a" in caught.value.fix
    (made.folder / "x.txt").unlink()
    assert Artifact.read(made.folder).changed == "x.txt"
    assert isinstance(start(made.folder, kind="data", spec=Knobs(), run=Run(quiet=True, redo=True)), Draft)


def test_an_untouched_artifact_is_not_read_again(tmp_path, monkeypatch):
    made = finish(tmp_path / "data-a")
    read = []
    monkeypatch.setattr("hone.base.identity.sha256", lambda path: read.append(path.name) or sha256(path))
    assert made.changed is None and read == []
    date_after(made.folder / "x.txt", made.folder / "hone.json")
    assert made.changed is None and read == ["x.txt"]
    assert made.changed is None and read == ["x.txt"]
    (made.folder / "x.txt").write_text("y")
    date_after(made.folder / "x.txt", made.folder / "hone.json")
    assert made.changed == "x.txt"


def test_what_the_log_says_may_change(tmp_path):
    made = finish(tmp_path / "data-a")
    (made.folder / "log" / "t.txt").write_text("more than before")
    assert made.changed is None


def test_a_row_of_a_broken_manifest_is_a_change(tmp_path):
    made = finish(tmp_path / "data-a")
    for row in (None, {}, {"bytes": "1"}):
        made.manifest["files"]["x.txt"] = row
        assert made.changed == "x.txt"
