"""Going on from one's own model: the place in the data, the optimizer's state, and more steps than were planned."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.errors import ArtifactError, DriftError, SpecError
from hone.base.plan import facts_of
from hone.base.store import pull, push
from hone.cost.train.training import STATE_BYTES
from hone.feed.load import PackedTokens
from hone.measure.machine import describe
from hone.train.stage import Train
from tests.ranked import together
from tests.train.conftest import write_data
from tests.train.ranks import made
from tests.train.test_stage import QUIET, SPEC

STABLE = {**SPEC, "schedule": {"kind": "wsd", "warmup": 2, "decay": 0}}
"""A constant learning rate after two steps."""
KEPT = {"keep": "optimizer"}
WEIGHTS = "model.safetensors"
OPTIMIZERS: list[Any] = ["adamw", "muon", {"kind": "adamw_8bit", "min_elements": 1024}]


def make(out: Path, data: Path, model: Artifact | None = None, **changes: Any) -> Artifact:
    parents = {"data": Artifact.read(data)} | ({} if model is None else {"model": model})
    return Train.read({**STABLE, **changes}).make(out, parents, QUIET)


def same_weights(one: Artifact, other: Artifact) -> bool:
    return (one.folder / WEIGHTS).read_bytes() == (other.folder / WEIGHTS).read_bytes()


def steps_of(artifact: Artifact) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(artifact.folder / "steps.jsonl") if "loss" in row]


@pytest.fixture(scope="module")
def whole(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return make(tmp_path_factory.mktemp("whole") / "train-whole", data_folder, steps=12)


@pytest.fixture(scope="module")
def half(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return make(tmp_path_factory.mktemp("half") / "train-half", data_folder, steps=6, checkpoint=KEPT)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sequences that are cut from the training split, in order."""
    found: list[int] = []
    cut = PackedTokens.cut

    def told(self: PackedTokens, windows: np.ndarray, seq_len: int) -> Any:
        if self.split == "train":
            found.extend(windows.tolist())
        return cut(self, windows, seq_len)

    monkeypatch.setattr(PackedTokens, "cut", told)
    return found


def counts_own(made, steps):
    """The figures of `made` count its own steps of 128 positions, and its position the tokens of all."""
    tokens, rows, figures = made.figures["train_tokens"], steps_of(made), made.figures
    assert tokens.note.startswith(f"of {steps * 128} positions") and tokens.value <= steps * 128
    assert abs(tokens.error) < 0.05 and figures["epochs"].value == figures["epochs"].estimate.value
    assert figures["epochs"].note.startswith(f"{steps * 4} sequences read")
    assert json.loads((made.folder / "position.json").read_text())["tokens"] == rows[-1]["tokens"]


def test_data_are_read_on_from_where_the_model_ended(tmp_path, read):
    """Also over the end of an epoch and by a third training, whose batch is another."""
    data = write_data(tmp_path / "data-few", num_documents=32)
    first = make(tmp_path / "train-first", data, steps=6)
    second = make(tmp_path / "train-second", data, first, steps=6)
    make(tmp_path / "train-third", data, second, steps=4, batch_size=8)
    continued = list(read)
    read.clear()
    make(tmp_path / "train-long", data, steps=6 + 6 + 8)
    assert continued == read
    count = PackedTokens(data).num_sequences(32)
    assert 24 < count < 40 and sorted(read[count : 2 * count]) == list(range(count))
    figure = second.figures["data_position"]
    assert figure.value == 24 and "read on from sequence 24" in figure.note
    counts_own(second, 6)


def test_longer_is_the_same_as_at_once(half, whole, data_folder, tmp_path, monkeypatch):
    """Also when it is stopped after its checkpoint of step 9 and resumed."""
    spec = {"steps": 12, "checkpoint": {"load": "schedule", "interval": 3}}
    stopped(tmp_path / "train-more", data_folder, 11, monkeypatch, model=half, **spec)
    more = make(tmp_path / "train-more", data_folder, half, **spec)
    assert same_weights(more, whole)
    assert steps_of(more) == steps_of(whole)[6:]
    counts_own(more, 6)
    assert half.figures["train_tokens"].value + more.figures["train_tokens"].value == steps_of(whole)[-1]["tokens"]
    assert half.figures[STATE_BYTES].error == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize("load", ["schedule", "optimizer"])
def test_spike_statistics_are_kept_with_the_schedule(load, data_folder, tmp_path):
    skips = {"optimizer": {"kind": "adamw", "skip_step": {"rolling_interval_length": 12, "sigma_factor": 0.5}}}
    first = make(tmp_path / "train-first", data_folder, steps=6, checkpoint=KEPT, **skips)
    steps = 12 if load == "schedule" else 6
    more = make(tmp_path / "train-more", data_folder, first, steps=steps, checkpoint={"load": load}, **skips)
    if load == "optimizer":
        assert not any("skipped" in row for row in steps_of(more)), "half of a new window is not there yet"
        return
    whole = make(tmp_path / "train-whole", data_folder, steps=12, **skips)
    assert any("why" in row for row in steps_of(whole)[6:])
    assert steps_of(more) == steps_of(whole)[6:] and same_weights(more, whole)
    skipped = more.figures["skipped_steps"]
    assert skipped.value == sum("why" in row for row in steps_of(more))


@pytest.mark.parametrize("changes", [{"optimizer": one} for one in OPTIMIZERS[1:]] + [{"precision": "bf16"}], ids=str)
def test_every_optimizer_goes_on_with_its_state(changes, data_folder, tmp_path):
    """In bf16 the float32 masters are kept too, which the folder's model has rounded."""
    parts = [{"steps": 4, "checkpoint": KEPT}, {"steps": 8, "checkpoint": {"load": "schedule"}}]
    first = make(tmp_path / "train-first", data_folder, **changes, **parts[0])
    more = make(tmp_path / "train-more", data_folder, first, **changes, **parts[1])
    assert same_weights(more, make(tmp_path / "train-once", data_folder, **changes, steps=8))
    without = {"steps": 4, "checkpoint": {"load": "data_position"}}
    assert not same_weights(more, make(tmp_path / "train-fresh", data_folder, first, **changes, **without))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("data_parallel", ["ddp", "zero2"])
def test_two_ranks_go_on_like_two_that_never_stopped(optimizer, data_parallel, data_folder, tmp_path):
    spec = {**STABLE, "optimizer": optimizer, "parallelism": {"data_parallel": data_parallel}}
    half, more, once = (tmp_path / f"train-{name}" for name in ("half", "more", "once"))
    halved = {**spec, "steps": 4, "checkpoint": KEPT}
    (first, *_) = together(2, made, halved, str(data_folder), str(half))
    assert first.returncode == 0, first.stderr
    for out, checkpoint, parents in ((more, {"load": "schedule"}, {"model": str(half)}), (once, {}, {})):
        ends = together(
            2, made_from, {**spec, "steps": 8, "checkpoint": checkpoint}, str(data_folder), str(out), parents
        )
        assert all(end.returncode == 0 for end in ends), ends[0].stderr
    assert same_weights(Artifact.read(more), Artifact.read(once))
    # The same state on one rank: the sums of gradients are in another order.
    alone = Train.read({**spec, "steps": 8, "checkpoint": {"load": "schedule"}})
    parents = {"data": Artifact.read(data_folder), "model": Artifact.read(half)}
    rows = steps_of(alone.make(tmp_path / "train-alone", parents, QUIET))
    for row, other in zip(rows, steps_of(Artifact.read(once))[4:], strict=True):
        assert row["tokens"] == other["tokens"] and row["loss"] == pytest.approx(other["loss"], abs=1e-3)


def made_from(spec: dict[str, Any], data: str, out: str, parents: dict[str, str]) -> str:
    return made(spec, data, out, **parents)


def test_a_training_that_ended_early_is_finished(data_folder, tmp_path):
    """Its state is that of the step at which it ended, in the stable phase of all its steps."""
    first = make(
        tmp_path / "train-first",
        data_folder,
        steps=12,
        early_stopping={"val_loss": 100, "interval": 4},
        checkpoint=KEPT,
    )
    assert first.figures["num_steps"].value == 4 and "of 12" in first.figures["num_steps"].note
    counts_own(first, 4)
    more = make(tmp_path / "train-more", data_folder, first, steps=12, checkpoint={"load": "schedule"})
    assert same_weights(more, make(tmp_path / "train-once", data_folder, steps=12))
    early = {"val_loss": 100, "interval": 6}
    stopped = make(
        tmp_path / "train-stopped",
        data_folder,
        first,
        steps=12,
        early_stopping=early,
        checkpoint={"load": "schedule"},
    )
    assert stopped.figures["num_steps"].value == 6
    counts_own(stopped, 2)


def test_the_stable_phase_is_prolonged(data_folder, tmp_path):
    """From the state before the decay. A warm-up that is a share is one of the first training."""
    wsd = {"kind": "wsd", "warmup": 0.25, "decay": 0.5}
    first = make(tmp_path / "train-first", data_folder, steps=8, schedule=wsd, checkpoint=KEPT)
    assert [path.name for path in (first.folder / "training_state").iterdir()] == ["step-00000004"]
    spec = {"schedule": wsd, "checkpoint": {"load": "schedule", **KEPT}}
    more = make(tmp_path / "train-more", data_folder, first, steps=16, **spec)
    once = make(tmp_path / "train-once", data_folder, steps=16, schedule={**wsd, "warmup": 2})
    assert same_weights(more, once) and steps_of(more) == steps_of(once)[4:]
    assert more.figures["num_steps"].note.startswith("4 of them by ")
    again = make(tmp_path / "train-again", data_folder, more, steps=24, schedule=wsd, checkpoint={"load": "schedule"})
    assert [row["step"] for row in steps_of(again)] == list(range(9, 25))
    assert steps_of(again)[:4] == make_rows(tmp_path, data_folder, wsd)[8:12]


def make_rows(folder: Path, data: Path, wsd: dict[str, Any]) -> list[dict[str, Any]]:
    return steps_of(make(folder / "train-rows", data, steps=24, schedule={**wsd, "warmup": 2}))


def test_a_cosine_is_not_prolonged(data_folder, tmp_path):
    cosine = {"kind": "cosine", "warmup": 2}
    first = make(tmp_path / "train-first", data_folder, steps=6, schedule=cosine, checkpoint=KEPT)
    with pytest.raises(
        SpecError, match=r"at step 4 the learning rate was 0\.\d+ of its peak, with cosine over 6"
    ) as caught:
        make(tmp_path / "train-x", data_folder, first, steps=12, schedule=cosine, checkpoint={"load": "schedule"})
    assert "checkpoint.load: optimizer" in caught.value.fix
    anew = {"schedule": cosine, "checkpoint": {"load": "optimizer"}}
    rows = steps_of(make(tmp_path / "train-anew", data_folder, first, steps=4, **anew))
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and 96 < rows[0]["tokens"] <= 128
    with pytest.raises(DriftError, match=r"spec.steps was 6, is 12") as caught:
        make(tmp_path / "train-first", data_folder, steps=12, schedule=cosine, checkpoint=KEPT)
    assert f"--from.model={first.folder} --checkpoint.load=optimizer" in caught.value.fix


def stopped(out: Path, data: Path, at: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Begins a training, which ends when step `at` begins."""
    from hone.train.loop import Trainer

    step = Trainer.step

    def ending(self: Trainer, batch: Any) -> Any:
        if self.done == at - 1:
            raise KeyboardInterrupt
        return step(self, batch)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "step", ending)
        make(out, data, **changes)


def test_unfinished_work_goes_on_with_more_steps(whole, data_folder, tmp_path, monkeypatch):
    out = tmp_path / "train-whole"
    stopped(out, data_folder, 6, monkeypatch, steps=8)
    made = make(out, data_folder, steps=12)
    assert made.content == whole.content and made.fingerprint == whole.fingerprint
    timings = [row["step"] for row in read_jsonl(out / "log" / "timing.jsonl")]
    assert timings == list(range(1, 13))


@pytest.mark.parametrize(
    ("schedule", "says", "fix"),
    [
        ("cosine", "with cosine over 8 steps, and is", "another training goes on from it"),
        ({"kind": "wsd", "warmup": 0.25, "decay": 0}, "with wsd over 8 steps", "give --schedule.warmup=2,"),
    ],
)
def test_unfinished_work_that_would_have_been_other_is_kept(schedule, says, fix, data_folder, tmp_path, monkeypatch):
    out = tmp_path / "train-base"
    stopped(out, data_folder, 6, monkeypatch, steps=8, schedule=schedule)
    with pytest.raises(DriftError) as caught:
        make(out, data_folder, steps=16, schedule=schedule)
    assert says in caught.value.what and fix in caught.value.fix and "has 3 steps done" in caught.value.what
    assert make(out, data_folder, steps=8, schedule=schedule).figures["num_steps"].value == 8


def test_what_cannot_be_loaded_is_said(half, data_folder, tmp_path):
    data = Artifact.read(data_folder)
    load = {"load": "schedule"}

    def refused(model: Artifact | None, error: type[Exception] = SpecError, **changes: Any) -> str:
        with pytest.raises(error) as caught:
            make(tmp_path / "train-x", data_folder, model, **{"steps": 12, "checkpoint": load, **changes})
        return str(caught.value)

    assert "needs a model to go on from" in refused(None)
    assert "is that of adamw, the optimizer is muon" in refused(half, optimizer="muon")
    assert "has done 6 steps, and the whole training has 6" in refused(half, steps=6)
    plain = make(tmp_path / "train-plain", data_folder, steps=2)
    assert "kept no state of its optimizer" in refused(plain)
    shutil.copytree(half.folder, tmp_path / "foreign", ignore=shutil.ignore_patterns("hone.json"))
    assert "is not the model of a training by hone" in refused(Artifact.read(tmp_path / "foreign"))
    gone = Path(shutil.copytree(half.folder, tmp_path / "train-gone"))
    (tensors,) = gone.glob("training_state/*/tensors.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-8])
    assert "missing or no longer the file" in refused(Artifact.read(gone))
    shutil.rmtree(gone / "training_state")
    assert "which it kept, is not there any more" in refused(Artifact.read(gone))
    # Without the state it is still a model, whole where it is and elsewhere, from which weights and the place are taken.
    Artifact.read(gone).verify()
    pytest.importorskip("fsspec")
    push(gone, f"file://{tmp_path}/store/half", QUIET)
    gone = pull(f"file://{tmp_path}/store/half", tmp_path / "pulled" / "train-half", QUIET).folder
    more = Train.read({**STABLE, "steps": 2}).make(
        tmp_path / "train-more", {"data": data, "model": Artifact.read(gone)}, QUIET
    )
    assert more.figures["data_position"].value == 24


def test_a_state_of_other_weights_changes_nothing(half, data_folder):
    from hone.model.decoder import build
    from hone.train.checkpoint import opened
    from hone.train.loop import Trainer
    from hone.train.optimizers.adamw_8bit import AdamW8bit
    from hone.train.schedules.cosine import Cosine
    from tests.train.conftest import SHAPE

    stored, numbers = opened(facts_of(half).trained.state)
    vocab = PackedTokens(data_folder).vocab_size

    def into(shape: Any, **more: Any) -> Trainer:
        return Trainer(build(shape.config(vocab), seed=1), steps=4, schedule=Cosine(), **more)

    deeper, wider = SHAPE.model_copy(update={"num_layers": 5}), SHAPE.model_copy(update={"intermediate_size": 128})
    for trainer, says in (
        (into(deeper), "no weight layers.4"),
        (into(wider), "elements in a checkpoint"),
        (into(SHAPE, optimizer=AdamW8bit(kind="adamw_8bit", min_elements=0)), "the state of another optimizer"),
    ):
        before = {name: part.detach().clone() for name, part in trainer.model.named_parameters()}
        with pytest.raises(ArtifactError, match=says):
            trainer.restore(stored, numbers)
        assert all(before[name].equal(part) for name, part in trainer.model.named_parameters())


def test_other_data_are_read_from_their_start(half, data_folder, tmp_path, read):
    other = write_data(tmp_path / "data-other", seed=1)
    more = make(tmp_path / "train-more", other, half, steps=2)
    assert (
        "it was trained on other data" in more.figures["data_position"].note
        and more.figures["data_position"].value == 0
    )
    continued = list(read)
    read.clear()
    make(tmp_path / "train-new", other, steps=2)
    assert continued == read
    seeded = make(tmp_path / "train-seeded", data_folder, half, steps=2, seed=1)
    assert "its seed is 0, here it is 1" in seeded.figures["data_position"].note
    weights = make(tmp_path / "train-weights", data_folder, half, steps=2, checkpoint={"load": "weights"})
    assert "data_position" not in weights.figures


def test_the_sources_of_a_mixture_are_each_read_on(data_folder, tmp_path, read):
    """Also when one is new and the weights are others; `mixture` is in what a longer training reads, too."""
    other, third = (write_data(tmp_path / f"data-{name}", seed=seed) for name, seed in (("b", 1), ("c", 2)))
    sources = {"data.a": Artifact.read(data_folder), "data.b": Artifact.read(other)}
    first = Train.read({**STABLE, "steps": 6}).make(tmp_path / "train-first", sources, QUIET)
    place = json.loads((first.folder / "position.json").read_text())
    assert sum(place["sources"].values()) == 24 == place["sequences"]
    spec = Train.read({**STABLE, "steps": 6, "mixture": {"kind": "fixed", "weights": {"a": 0.25, "b": 0.25, "c": 0.5}}})
    parents = {**sources, "data.c": Artifact.read(third), "model": first}
    second = spec.make(tmp_path / "train-second", parents, QUIET)
    after = json.loads((second.folder / "position.json").read_text())["sources"]
    for name, artifact in parents.items():
        if name.startswith("data"):
            assert after[artifact.fingerprint] > place["sources"].get(artifact.fingerprint, 0)
    counts = {name: len(PackedTokens(artifact.folder).tokens) for name, artifact in sources.items()}
    assert min(counts.values()) > 0 and len(read) == 48


def test_a_planned_training_plans_the_next_one(data_folder):
    machine, data = describe("cpu"), facts_of(Artifact.read(data_folder))
    planned = Train.read({**STABLE, "steps": 6, "checkpoint": KEPT}).plan({"data": data}, machine)
    assert planned.estimates[STATE_BYTES].value > 0
    without = Train.read({**STABLE, "steps": 6}).plan({"data": data}, machine)
    more = planned.estimates["disk_bytes"].value - without.estimates["disk_bytes"].value
    assert more == planned.estimates[STATE_BYTES].value
    model = planned.facts.model_copy(update={"where": "train-base"})
    longer = Train.read({**STABLE, "steps": 12, "checkpoint": {"load": "schedule"}})
    next_one = longer.plan({"data": data, "model": model}, machine)
    assert next_one.notes[0] == "weights and state of adamw: those after step 6, from train-base/training_state"
    assert next_one.estimates["train_tokens"].value == without.estimates["train_tokens"].value
    assert next_one.estimates["epochs"].value == without.estimates["epochs"].value
    with pytest.raises(SpecError, match="train-base kept no state"):
        longer.plan({"data": data, "model": without.facts.model_copy(update={"where": "train-base"})}, machine)


def test_only_keep_is_part_of_the_identity():
    plain = Train.read(STABLE)
    assert plain.identity() == Train.read({**STABLE, "checkpoint": {"interval": 7}}).identity()
    kept = Train.from_overrides({"checkpoint.keep": "optimizer", "checkpoint.interval": "7"})
    assert kept.checkpoint.keep.optimizer and kept.identity()["checkpoint"] == {
        "keep": {"optimizer": True, "best": False, "last": 0, "interval": 0},
        "load": "data_position",
        "export_dtype": None,
    }
    with pytest.raises(SpecError, match=r"no field 'checkpoint\.keep\.optimiser'"):
        Train.read({**STABLE, "checkpoint": {"keep": "optimiser"}})


def val_losses(artifact: Artifact) -> dict[int, float]:
    return {row["step"]: row["val_loss"] for row in read_jsonl(artifact.folder / "steps.jsonl") if "val_loss" in row}


def test_the_best_model_is_the_folders(data_folder, tmp_path):
    """A learning rate that grows too large makes the last one worse."""
    spec = {
        "steps": 12,
        "optimizer": {"lr": 1.0},
        "schedule": {"kind": "wsd", "warmup": 12, "decay": 0},
        "max_grad_norm": 0,
    }
    keep = {"best": True, "last": 2, "interval": 2}
    best = make(tmp_path / "train-best", data_folder, **spec, checkpoint={"interval": 0, "keep": keep})
    losses = val_losses(best)
    assert {2, 4, 6, 8, 10, 12} <= set(losses)
    step = min((one for one in losses if one % 2 == 0), key=lambda one: losses[one])
    assert step < 12 and best.figures["best_step"].value == step
    assert best.figures["val_loss"].value == losses[step] < losses[12]
    until = {"checkpoint": {"keep": {"last": 6, "interval": 2}}, **{name: spec[name] for name in spec}}
    all_of_them = make(tmp_path / "train-all", data_folder, **until)
    assert sorted(path.name for path in (best.folder / "checkpoints").iterdir()) == ["step-00000010", "step-00000012"]
    kept = {int(path.name[5:]): path for path in (all_of_them.folder / "checkpoints").iterdir()}
    assert sorted(kept) == [2, 4, 6, 8, 10, 12]
    assert (kept[step] / WEIGHTS).read_bytes() == (best.folder / WEIGHTS).read_bytes()
    assert (kept[12] / WEIGHTS).read_bytes() == (all_of_them.folder / WEIGHTS).read_bytes()
    import transformers

    transformers.AutoModelForCausalLM.from_pretrained(kept[4])
    assert facts_of(Artifact.read(kept[4])).trained is None
    disk, one = all_of_them.figures["disk_bytes"], all_of_them.figures["model_bytes"].value
    assert disk.value > 7 * one and "7 models x" in disk.estimate.formula


def test_a_stop_changes_nothing_of_what_is_kept(data_folder, tmp_path, monkeypatch):
    keep = {"optimizer": True, "best": True, "last": 2, "interval": 2}
    spec = {"steps": 10, "checkpoint": {"interval": 3, "keep": keep}}
    once = make(tmp_path / "train-once", data_folder, **spec)
    out = tmp_path / "train-twice"
    stopped(out, data_folder, 6, monkeypatch, **spec)  # after step 5: back to 3, of step 4 there is a model
    stopped(out, data_folder, 10, monkeypatch, **spec)
    assert make(out, data_folder, **spec).content == once.content
    for file in ("numbers.json", "tensors.safetensors"):
        kept = [artifact.folder / "training_state" / "step-00000010" / file for artifact in (once, Artifact.read(out))]
        assert kept[0].stat().st_size == kept[1].stat().st_size


def test_what_cannot_be_kept_is_said(data_folder):
    with pytest.raises(SpecError, match=r"give keep\.interval"):
        Train.read({**STABLE, "checkpoint": {"keep": "best"}})
    data = facts_of(Artifact.read(data_folder))
    empty = data.model_copy(update={"splits": {"train": data.splits["train"]}})
    spec = Train.read({**STABLE, "checkpoint": {"keep": {"best": True, "interval": 2}}})
    with pytest.raises(SpecError, match="chooses by the loss on the val split"):
        spec.plan({"data": empty}, describe("cpu"))
    lossy = {"kind": "local_sgd", "sync_every": 4}
    with pytest.raises(SpecError, match=r"checkpoint\.keep\.interval 2 is no multiple of the 4 steps"):
        Train.read(
            {
                **STABLE,
                "checkpoint": {"interval": 4, "keep": {"last": 1, "interval": 2}},
                "validation": {},
                "parallelism": {"data_parallel": lossy},
            }
        )
