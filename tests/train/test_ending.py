"""What a training has done is kept: Ctrl-C and SIGTERM save first, damaged checkpoints are passed over, and another spec
deletes nothing."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.errors import ArtifactError, DriftError
from hone.base.run import Interrupted, Run
from hone.cli.dispatch import main
from hone.train.loop import Trainer
from hone.train.stage import Train
from tests.ranked import together
from tests.train.ranks import made
from tests.train.test_stage import QUIET, SPEC

RANKED = {**SPEC, "validation": {"sequences": 8}, "checkpoint": {"interval": 4}}


@pytest.fixture(scope="module")
def whole(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return make(tmp_path_factory.mktemp("whole") / "train-base", data_folder)


def make(out: Path, data_folder: Path, run: Run = QUIET, **changes) -> Artifact:
    return Train.read({**SPEC, **changes}).make(out, {"data": Artifact.read(data_folder)}, run)


def checkpoints_of(out: Path) -> list[str]:
    return sorted(path.name for path in out.with_name(f"{out.name}.partial").glob("state/checkpoints/*"))


@pytest.fixture
def signalled(monkeypatch: pytest.MonkeyPatch):
    """A function after which this process gets signal `number` `times` times when step `at` begins, once in its life."""

    def ask(number: int, at: int, times: int = 1) -> None:
        step, given = Trainer.step, []

        def told(self, batch):
            if self.done == at - 1 and not given:
                for _ in range(times):
                    given.append(number)
                    os.kill(os.getpid(), number)
            return step(self, batch)

        monkeypatch.setattr(Trainer, "step", told)

    return ask


@pytest.mark.parametrize(("number", "at", "interval"), [(signal.SIGINT, 8, 3), (signal.SIGTERM, 5, 0)])
def test_ctrl_c_and_sigterm_save_first(number, at, interval, whole, signalled, data_folder, tmp_path):
    """At step 5 an evaluation is due, which is not made again."""
    signalled(number, at)
    out, handlers = tmp_path / "train-base", [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Interrupted, match=f"ended after step {at} of 12, which is saved") as caught:
        make(out, data_folder, checkpoint={"interval": interval})
    assert caught.value.number == number and checkpoints_of(out)[-1] == f"step-0000000{at}"
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert make(out, data_folder, checkpoint={"interval": interval}).content == whole.content
    timings = [row["step"] for row in read_jsonl(out / "log" / "timing.jsonl")]
    assert timings == list(range(1, 13))


def test_in_the_last_step_it_is_finished(whole, signalled, data_folder, tmp_path):
    signalled(signal.SIGTERM, 12)
    assert make(tmp_path / "train-base", data_folder).content == whole.content


def test_a_second_ctrl_c_ends_at_once(whole, signalled, data_folder, tmp_path):
    signalled(signal.SIGINT, 8, times=2)
    out = tmp_path / "train-base"
    with pytest.raises(Interrupted, match=r"^$"):
        make(out, data_folder)
    assert checkpoints_of(out)[-1] == "step-00000006"
    assert make(out, data_folder).content == whole.content


def test_the_command_says_where_it_ended(signalled, data_folder, tmp_path, capfd):
    signalled(signal.SIGTERM, 2)
    sizes = {"hidden_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 96}
    words = ["train", *(f"--model.{name}={value}" for name, value in sizes.items()), "--steps=4", "--seq_len=32"]
    words += [f"--from.data={data_folder}", f"--out={tmp_path / 'train-x'}"]
    assert main(words) == 143
    said = capfd.readouterr().err
    assert "saving what is done, then ending; once more ends at once" in said
    assert "ended after step 2 of 4, which is saved; the same command resumes where it stopped" in said
    assert main(words) == 0
    assert "resuming at step 2 of 4" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("parallelism", "ends"),
    [({}, 6), ({"data_parallel": {"kind": "local_sgd", "sync_every": 4}}, 8)],
    ids=["ddp", "local_sgd"],
)
def test_all_ranks_end_after_the_same_step(parallelism, ends, data_folder, tmp_path):
    """Where the ranks' weights differ, after the next step in which they meet."""
    spec = {**RANKED, "parallelism": parallelism}
    expected = together(2, made, spec, str(data_folder), str(tmp_path / "whole"))
    arguments = (spec, str(data_folder), str(tmp_path / "train-x"))
    ended = together(2, made, *arguments, 5, signal.SIGTERM)
    assert [one.result for one in ended] == [f"ended after step {ends} of 12, which is saved"] * 2
    assert checkpoints_of(tmp_path / "train-x")[-1] == f"step-0000000{ends}"
    assert [one.result for one in together(2, made, *arguments)] == [one.result for one in expected]


def interrupted(signalled, out: Path, data_folder: Path) -> list[Path]:
    """A training that ended after step 8, and its checkpoints."""
    signalled(signal.SIGINT, 8)
    with pytest.raises(Interrupted):
        make(out, data_folder)
    folder = out.with_name(f"{out.name}.partial") / "state" / "checkpoints"
    return [folder / name for name in checkpoints_of(out)]


def test_another_spec_deletes_no_checkpoint(whole, signalled, data_folder, tmp_path):
    out = tmp_path / "train-base"
    before = interrupted(signalled, out, data_folder)
    with pytest.raises(
        DriftError, match=r"8 steps done, which a training of 24 steps would have done otherwise.*\n.*--redo=train-base"
    ):
        make(out, data_folder, steps=24)
    assert all(path.is_dir() for path in before) and len(before) == 2
    assert make(out, data_folder).content == whole.content


def test_how_often_it_is_evaluated_is_no_part_of_what_is_made(whole, signalled, data_folder, tmp_path):
    out = tmp_path / "train-base"
    interrupted(signalled, out, data_folder)
    made = make(out, data_folder, validation={"interval": 0, "sequences": 8})
    assert made.fingerprint == whole.fingerprint
    assert (made.folder / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("file", ["tensors.safetensors", "numbers.json"])
def test_a_damaged_checkpoint_is_passed_over(file, whole, signalled, data_folder, tmp_path, capsys):
    out = tmp_path / "train-base"
    *_, newest = interrupted(signalled, out, data_folder)
    os.truncate(newest / file, (newest / file).stat().st_size // 2)
    assert make(out, data_folder, Run()).content == whole.content
    said = capsys.readouterr().err
    assert f"the checkpoint {newest} is damaged" in said and "resuming at step 6 of 12" in said


def test_a_damaged_only_checkpoint_is_an_error(signalled, data_folder, tmp_path):
    out = tmp_path / "train-base"
    *older, newest = interrupted(signalled, out, data_folder)
    for folder in older:
        shutil.rmtree(folder)
    (newest / "tensors.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ArtifactError, match=f"the checkpoint {newest} is damaged.*\n.*--redo"):
        make(out, data_folder)
    assert newest.is_dir()
