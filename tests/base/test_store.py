"""Artifacts on object stores: pushed and pulled whole, resumed after a kill, never mixed with others, every fault said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import Field

from hone.base.artifact import Artifact, Draft, start
from hone.base.errors import ArtifactError, DriftError, FitError, HoneError, MachineError, MissingExtra, SpecError
from hone.base.run import Run
from hone.base.spec import Spec
from hone.base.stage import Stage
from hone.base.store import Store, pull, push
from hone.recipe import Recipe

fsspec = pytest.importorskip("fsspec")
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

QUIET = Run(quiet=True)
REDO = Run(quiet=True, redo=True)
FILES = {
    "a.txt": b"alpha",
    "empty": b"",
    "deep/er/b.bin": bytes(range(256)) * 40,
    "c d.txt": b"with a space",
    "log/t": b"1",
}


class Killed(BaseException):
    """The process is gone."""


class Knobs(Spec):
    depth: int = Field(2, description="Depth.")


class Faulty(MemoryFileSystem):
    """An object store of which `wrong(operation, path)` may fail, or kill who asks; it counts what is done."""

    protocol = "faulty"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs: list = [""]  # noqa: RUF012
    cachable = False
    done: list = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("faulty:/") if path.startswith("faulty://") else path)

    @staticmethod
    def wrong(operation: str, path: str) -> None:
        return None

    def put_file(self, lpath, rpath, **more):
        Faulty.wrong("put", rpath)
        super().put_file(lpath, rpath, **more)
        self.done.append(("put", rpath))

    def get_file(self, rpath, lpath, **more):
        Faulty.wrong("get", rpath)
        super().get_file(rpath, lpath, **more)
        self.done.append(("get", rpath))

    def pipe_file(self, path, value, **more):
        Faulty.wrong("put", path)
        super().pipe_file(path, value, **more)
        self.done.append(("put", path))

    def rm_file(self, path):
        Faulty.wrong("remove", path)
        super().rm_file(path)
        self.done.append(("remove", path))


fsspec.register_implementation("faulty", Faulty, clobber=True)


@pytest.fixture
def bucket(monkeypatch) -> str:
    """A URL of an empty object store."""
    monkeypatch.setattr(Faulty, "store", {})
    monkeypatch.setattr(Faulty, "pseudo_dirs", [""])
    monkeypatch.setattr(Faulty, "done", [])
    monkeypatch.setattr(Faulty, "wrong", staticmethod(lambda operation, path: None))
    monkeypatch.setattr("hone.base.store.AT_ONCE", 1)  # so that the n-th operation is the same one every time
    return "faulty://bucket/line/data-a"


def finish(folder: Path, files: dict[str, bytes] = FILES, **knobs) -> Artifact:
    draft = start(folder, kind="data", spec=Knobs(**knobs), run=QUIET)
    assert isinstance(draft, Draft)
    for name, content in files.items():
        path = draft.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return draft.commit()


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def objects() -> dict[str, bytes]:
    return {path: file.getvalue() for path, file in Faulty.store.items()}


def after(count: int, operation: str, error: BaseException):
    """Lets `count` operations pass, then raises."""
    passed = []

    def wrong(what: str, path: str) -> None:
        if what == operation:
            passed.append(path)
            if len(passed) > count:
                raise error

    return staticmethod(wrong)


def test_pull_of_push_is_the_artifact(tmp_path, bucket):
    made = finish(tmp_path / "data-a")
    assert push(made.folder, bucket, QUIET) == len(FILES)
    assert Faulty.done[-2:] == [("put", "/bucket/line/data-a/hone.json"), ("remove", "/bucket/line/data-a/begun.json")]
    pulled = pull(f"{bucket}/", tmp_path / "far" / "data-a", QUIET)
    assert content(pulled.folder) == content(made.folder) and pulled.content == made.content
    pulled.verify()
    again = start(pulled.folder, kind="data", spec=Knobs(), run=QUIET)
    assert isinstance(again, Artifact)


names = st.text("abcXYZ 0._-é", min_size=1, max_size=8).filter(lambda name: name.strip(".") and name == name.strip())
trees = st.dictionaries(names.map(lambda name: f"f{name}") | st.tuples(names, names).map(lambda two: f"d{two[0]}/{two[1]}"), st.binary(max_size=2000), min_size=1, max_size=6)  # fmt: skip


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees)
def test_any_content_comes_back(tmp_path_factory, files):
    home = tmp_path_factory.mktemp("any")
    made = finish(home / "data-a", files)
    url = f"memory://any/{home.name}"
    assert push(made.folder, url, QUIET) == len(files)
    pulled = pull(url, home / "b", QUIET)
    assert content(pulled.folder) == content(made.folder)
    pulled.verify()


def test_a_plain_folder_serves_as_a_store(tmp_path):
    made = finish(tmp_path / "data-a")
    url = f"file://{tmp_path}/mounted/data-a"
    assert push(made.folder, url, QUIET) == len(FILES) and push(made.folder, url, QUIET) == 0
    assert content(tmp_path / "mounted" / "data-a") == content(made.folder)
    pull(url, tmp_path / "back", QUIET).verify()


@pytest.mark.parametrize("moment", range(8))
@pytest.mark.parametrize("error", [Killed(), ConnectionError("reset by peer")], ids=lambda error: type(error).__name__)
def test_a_push_that_ends_early_is_unfinished_and_resumes(tmp_path, bucket, monkeypatch, moment, error):
    made = finish(tmp_path / "data-a")
    operation, count = ("remove", 0) if moment == 7 else ("put", moment)
    with monkeypatch.context() as patch, pytest.raises((Killed, MachineError)) as caught:
        patch.setattr(Faulty, "wrong", after(count, operation, error))
        push(made.folder, bucket, QUIET)
    if caught.type is MachineError:
        assert "reset by peer" in str(caught.value) and bucket in str(caught.value)
    whole = "/bucket/line/data-a/hone.json" in objects()
    assert whole == (moment == 7)
    if not whole:
        with pytest.raises(ArtifactError, match="its push was interrupted" if moment else "has no hone.json"):
            pull(bucket, tmp_path / "back", QUIET)
        assert not (tmp_path / "back").exists() and not (tmp_path / "back.partial").exists()
    Faulty.done.clear()
    sent = push(made.folder, bucket, QUIET)
    assert sent == {0: 5, 7: 0}.get(moment, 5 - (moment - 1))  # the first put is begun.json, the last hone.json
    assert sum(operation == "put" for operation, _ in Faulty.done) <= sent + 2
    assert not any("begun" in path for path in objects())
    assert content(pull(bucket, tmp_path / "back", QUIET).folder) == content(made.folder)


def test_what_another_push_left_is_not_taken_for_ours(tmp_path, bucket, monkeypatch):
    """Same names, same sizes, other bytes: begun.json tells them apart, by content and not by spec alone."""
    one = finish(tmp_path / "one" / "data-a")
    other = finish(tmp_path / "other" / "data-a", {name: row[::-1] for name, row in FILES.items()})
    assert one.fingerprint == other.fingerprint
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Faulty, "wrong", after(4, "put", Killed()))
        push(one.folder, bucket, QUIET)
    assert push(other.folder, bucket, QUIET) == len(FILES)
    assert content(pull(bucket, tmp_path / "back", QUIET).folder) == content(other.folder)


def test_what_is_there_already_is_said_and_another_is_drift(tmp_path, bucket, capsys):
    made = finish(tmp_path / "data-a")
    push(made.folder, bucket, QUIET)
    Faulty.done.clear()
    assert push(made.folder, bucket, Run()) == 0 and "holds data-a already" in capsys.readouterr().err
    assert not Faulty.done
    twin = finish(tmp_path / "twin" / "data-a", {"a.txt": b"beta!"})
    assert push(twin.folder, bucket, Run()) == 0 and "made by another run" in capsys.readouterr().err
    other = finish(tmp_path / "other" / "data-a", {"z.txt": b"z"}, depth=3)
    with pytest.raises(DriftError, match=r"another artifact: spec\.depth was 2, is 3\n.*--redo"):
        push(other.folder, bucket, QUIET)


@pytest.mark.parametrize("moment", range(13))
def test_a_redo_killed_anywhere_never_shows_a_mixture(tmp_path, bucket, monkeypatch, moment):
    before = finish(tmp_path / "before" / "data-a", {**FILES, "gone.txt": b"only in the first"})
    now = finish(tmp_path / "now" / "data-a", {name: row[::-1] for name, row in FILES.items()}, depth=3)
    push(before.folder, bucket, QUIET)
    passed = []

    def wrong(operation: str, path: str) -> None:
        if operation in ("put", "remove"):
            passed.append(path)
            if len(passed) > moment:
                raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Faulty, "wrong", staticmethod(wrong))
        push(now.folder, bucket, REDO)
    try:
        assert content(pull(bucket, tmp_path / "seen", QUIET).folder) == content(before.folder)
        assert moment <= 1
    except ArtifactError:
        assert moment > 1
    push(now.folder, bucket, REDO)
    assert content(pull(bucket, tmp_path / "back", QUIET).folder) == content(now.folder)
    assert len(objects()) == len(FILES) + 1


def test_a_push_touches_nothing_of_others(tmp_path, bucket):
    made = finish(tmp_path / "data-a")
    Store(bucket).write("notes.txt", b"mine")
    for run in (QUIET, REDO):
        with pytest.raises(ArtifactError, match=r"hone did not write: notes\.txt"):
            push(made.folder, bucket, run)
    assert list(objects().values()) == [b"mine"]
    Store(bucket).write("begun.json", b"{}")
    with pytest.raises(ArtifactError, match="was not written by hone"):
        push(made.folder, bucket, QUIET)


def test_only_an_unchanged_artifact_is_pushed(tmp_path, bucket):
    made = finish(tmp_path / "data-a")
    (made.folder / "a.txt").write_bytes(b"longer than before")
    with pytest.raises(ArtifactError, match=r"a\.txt is no longer the file"):
        push(made.folder, bucket, QUIET)
    (made.folder / "hone.json").unlink()
    with pytest.raises(ArtifactError, match=r"has no hone\.json"):
        push(made.folder, bucket, QUIET)
    with pytest.raises(ArtifactError, match="no folder"):
        push(tmp_path / "nothing", bucket, QUIET)
    assert not objects()


@pytest.mark.parametrize("moment", range(5))
def test_a_pull_that_ends_early_resumes(tmp_path, bucket, monkeypatch, moment):
    made = finish(tmp_path / "data-a")
    push(made.folder, bucket, QUIET)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Faulty, "wrong", after(moment, "get", Killed()))
        pull(bucket, tmp_path / "back", QUIET)
    assert not (tmp_path / "back").exists()
    with pytest.raises(ArtifactError, match="unfinished"):
        Artifact.read(tmp_path / "back")
    (tmp_path / "back.partial" / "deep").mkdir(exist_ok=True)
    (tmp_path / "back.partial" / "deep" / ".b.bin-0.tmp").write_bytes(b"half")  # what kill -9 leaves
    Faulty.done.clear()
    pulled = pull(bucket, tmp_path / "back", QUIET)
    assert len(Faulty.done) == len(FILES) - moment
    assert content(pulled.folder) == content(made.folder)


def test_a_file_that_a_killed_pull_left_wrong_is_fetched_again(tmp_path, bucket, monkeypatch):
    made = finish(tmp_path / "data-a")
    push(made.folder, bucket, QUIET)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Faulty, "wrong", after(4, "get", Killed()))
        pull(bucket, tmp_path / "back", QUIET)
    (tmp_path / "back.partial" / "a.txt").write_bytes(b"ALPHA")
    assert content(pull(bucket, tmp_path / "back", QUIET).folder) == content(made.folder)


def test_a_pull_and_a_stage_do_not_resume_each_other(tmp_path, bucket, monkeypatch):
    made = finish(tmp_path / "data-a")
    push(made.folder, bucket, QUIET)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Faulty, "wrong", after(2, "get", Killed()))
        pull(bucket, tmp_path / "back", QUIET)
    draft = start(tmp_path / "back", kind="data", spec=Knobs(), run=QUIET)
    assert isinstance(draft, Draft) and not draft.resumed and not (draft.folder / "a.txt").exists()
    with pytest.raises(ArtifactError, match="another process is making"):
        pull(bucket, tmp_path / "back", QUIET)
    (draft.folder / "a.txt").write_text("hours of work")
    draft.__exit__()
    with pytest.raises(DriftError, match=r"unfinished work of another spec.*\n.*--redo=back"):
        pull(bucket, tmp_path / "back", QUIET)
    assert (draft.folder / "a.txt").read_text() == "hours of work"
    pull(bucket, tmp_path / "back", REDO).verify()


def test_an_existing_folder_is_reused_or_refused(tmp_path, bucket, capsys):
    made = finish(tmp_path / "data-a")
    push(made.folder, bucket, QUIET)
    Faulty.done.clear()
    assert pull(bucket, made.folder, Run()).content == made.content and "already" in capsys.readouterr().err
    assert not Faulty.done
    other = finish(tmp_path / "data-b", depth=5)
    with pytest.raises(DriftError, match=r"spec\.depth was 5, is 2"):
        pull(bucket, other.folder, QUIET)
    assert pull(bucket, other.folder, REDO).content == made.content
    (tmp_path / "plain").mkdir()
    with pytest.raises(ArtifactError, match="is not an artifact of hone"):
        pull(bucket, tmp_path / "plain", QUIET)
    with pytest.raises(ArtifactError, match="is inside"):
        pull(bucket, made.folder / "inner", QUIET)


def damage(change) -> None:
    change(Faulty(), "/bucket/line/data-a")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda system, root: system.rm_file(f"{root}/a.txt"), r"a\.txt is missing"),
        (lambda system, root: system.pipe_file(f"{root}/a.txt", b"alp"), r"a\.txt is not the file .*3 bytes, not 5"),
        (
            lambda system, root: system.pipe_file(f"{root}/a.txt", b"ALPHA"),
            r"a\.txt is not the file that was uploaded",
        ),
        (lambda system, root: system.rm_file(f"{root}/hone.json"), r"has no hone\.json"),
        (lambda system, root: system.pipe_file(f"{root}/hone.json", b"{"), r"hone\.json is corrupt"),
        (lambda system, root: system.pipe_file(f"{root}/hone.json", b'{"format": 99}'), "has format 99"),
    ],
)
def test_a_damaged_remote_is_said_in_one_line(tmp_path, bucket, change, said):
    made = finish(tmp_path / "data-a")
    push(made.folder, bucket, QUIET)
    damage(change)
    with pytest.raises(ArtifactError, match=said) as caught:
        pull(bucket, tmp_path / "back", QUIET)
    assert "\n" not in caught.value.what and not (tmp_path / "back").exists()


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "", "hone.json", "a//b"])
def test_a_manifest_cannot_write_outside_of_the_folder(tmp_path, bucket, name):
    made = finish(tmp_path / "data-a")
    push(made.folder, bucket, QUIET)
    manifest = json.loads((made.folder / "hone.json").read_text())
    manifest["files"][name] = {"bytes": 1, "sha256": "0"}
    Store(bucket).write("hone.json", json.dumps(manifest).encode())
    with pytest.raises(ArtifactError, match="is corrupt"):
        pull(bucket, tmp_path / "back", QUIET)
    assert not (tmp_path / "back.partial").exists()


def test_refusals_and_absent_packages_are_said(tmp_path, bucket, monkeypatch):
    made = finish(tmp_path / "data-a")
    for error, said in (
        (PermissionError("Access Denied"), "not allowed: Access Denied"),
        (NotImplementedError(), "can only be read"),
        (FileNotFoundError("The specified bucket does not exist"), "bucket does not exist"),
    ):
        monkeypatch.setattr(Faulty, "wrong", after(0, "put", error))
        with pytest.raises(MachineError, match=said):
            push(made.folder, bucket, QUIET)
    for url, kind, said in (
        ("data-a", SpecError, "is not a URL"),
        ("nowhere://x", SpecError, "Protocol not known"),
        ("s3://b/x", MissingExtra, "s3fs"),
    ):
        if kind is MissingExtra and "s3fs" not in sys.modules:
            monkeypatch.setitem(sys.modules, "s3fs", None)
        with pytest.raises(kind, match=said) as caught:
            push(made.folder, url, QUIET)
        if kind is MissingExtra:
            assert caught.value.fix == "pip install s3fs"
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(MissingExtra, match=r"fsspec.*\n.*hone-llm\[data\]"):
        pull("memory://x", tmp_path / "back", QUIET)


def test_a_put_that_lied_is_found(tmp_path, bucket, monkeypatch):
    made = finish(tmp_path / "data-a")
    plain = MemoryFileSystem.put_file

    def short(self, lpath, rpath, **more):
        plain(self, lpath, rpath, **more)
        if rpath.endswith("a.txt"):
            self.pipe_file(rpath, b"al")

    monkeypatch.setattr(Faulty, "put_file", short)
    with pytest.raises(MachineError, match=r"a\.txt has 2 bytes after 5 were uploaded"):
        push(made.folder, bucket, QUIET)
    assert "/bucket/line/data-a/hone.json" not in objects()


def test_a_full_disk_is_said_before(tmp_path, bucket, monkeypatch):
    made = finish(tmp_path / "data-a")
    push(made.folder, bucket, QUIET)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(FitError, match=r"needs 1.* of disk, has 100"):
        pull(bucket, tmp_path / "back", QUIET)


class Copying(Stage):
    """A stage with a parent."""

    stage = "train"
    roles = {"data": True}  # noqa: RUF012


def test_stages_name_pull_and_push_for_urls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = finish(tmp_path / "data-a")
    with pytest.raises(SpecError, match=r"s3://bucket/x is a URL.*\n.*hone pull URL FOLDER"):
        Artifact.read("s3://bucket/x")
    for out in ("s3://bucket/x", Path("s3://bucket/x")):
        with pytest.raises(SpecError, match=r"s3://bucket/x is a URL.*\n.*hone push FOLDER URL"):
            Copying().make(out, {"data": made}, QUIET)
    recipe = Recipe(line="mine", stages=[{"stage": "train", "name": "a", "from": {"data": "gs://bucket/data-a"}}])
    with pytest.raises(SpecError, match=r"gs://bucket/data-a is a URL.*\n.*hone pull"):
        recipe.nodes()
    with pytest.raises(SpecError, match="s3://bucket/work is a URL"):
        Recipe(line="mine", stages=[{"stage": "data", "name": "a"}]).run("s3://bucket/work", QUIET)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data-a"]


@pytest.mark.slow
def test_the_commands(tmp_path):
    made = finish(tmp_path / "data-a")
    url = f"file://{tmp_path}/mounted/data-a"

    def hone(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-m", "hone.cli", *words], capture_output=True, text=True)

    sent = hone("push", str(made.folder), url)
    assert sent.returncode == 0 and sent.stdout == f"{url}: 5 files sent\n", sent.stderr
    pulled = hone("pull", url, str(tmp_path / "back"))
    assert pulled.returncode == 0 and pulled.stdout.startswith(f"data-a  {made.fingerprint}"), pulled.stderr
    assert content(tmp_path / "back") == content(made.folder)
    for words in (
        ("push", str(made.folder)),
        ("pull", url, "x", "--to=y"),
        ("pull", f"{url}/no", "x"),
        ("push", url, "x"),
    ):
        wrong = hone(*words)
        assert wrong.returncode == 2 and wrong.stderr.startswith("error: ") and wrong.stderr.count("\n") == 2


def test_python_has_both():
    import hone

    assert hone.push is push and hone.pull is pull and issubclass(MissingExtra, HoneError)
