"""The train stage: its folder, its figures, what it refuses, and that a kill changes nothing."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import tokenizers
import torch
import transformers

from hone.base.artifact import Artifact, Draft
from hone.base.durable import read_jsonl
from hone.base.errors import SpecError
from hone.base.plan import facts_of
from hone.base.run import Run
from hone.feed.facts import DataFacts
from hone.measure.machine import describe
from hone.train import loop
from hone.train.intervals import EarlyStopping, Validation
from hone.train.stage import Train
from tests.train.conftest import SHAPE, content_after_kills, write_data

SPEC = {
    "model": SHAPE.model_dump(),
    "batch_size": 4,
    "seq_len": 32,
    "steps": 12,
    "validation": {"interval": 5, "sequences": 8},
    "checkpoint": {"interval": 3},
    "optimizer": {"lr": 3e-3},
}
QUIET = Run(quiet=True)


@pytest.fixture(scope="module")
def trained(data_folder, tmp_path_factory) -> Artifact:
    folder = tmp_path_factory.mktemp("line")
    return Train.read(SPEC).make(folder / "train-base", {"data": Artifact.read(data_folder)}, QUIET)


def test_the_folder_loads_in_transformers(trained):
    model = transformers.AutoModelForCausalLM.from_pretrained(trained.folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained.folder)
    tokens = tokenizer("the quick brown", return_tensors="pt").input_ids
    with torch.no_grad():
        theirs = model(tokens).logits
        from hone.model.hf import load

        ours = load(trained.folder)(tokens)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_steps_are_written_down(trained):
    rows = read_jsonl(trained.folder / "steps.jsonl")
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 13))
    assert [row["tokens"] for row in steps] == [128 * step for step in range(1, 13)]
    assert [row["step"] for row in rows if "val_loss" in row] == [5, 10, 12]
    assert set(steps[0]) == {"step", "loss", "lr", "grad_norm", "tokens"}
    timing = read_jsonl(trained.folder / "log" / "timing.jsonl")
    assert len(timing) == 12 and timing[3]["tokens_per_s"] > 0 and timing[3]["memory_bytes"] > 0
    assert list((trained.folder / "log").glob("events.out.tfevents.*"))


def test_figures(trained):
    figures = trained.figures
    assert figures["train_tokens"].value == 12 * 128
    assert figures["model_bytes"].value == (trained.folder / "model.safetensors").stat().st_size
    assert figures["model_bytes"].error == pytest.approx(0, abs=0.05)
    assert figures["num_params"].error == 0 and abs(figures["train_tokens"].error) < 0.01  # one sequence has padding
    assert figures["checkpoint_bytes"].error == pytest.approx(
        0, abs=0.1
    )  # names and random state are a part of small ones
    for name in ("time_s", "peak_memory_bytes", "tokens_per_s"):
        assert figures[name].estimate is not None and figures[name].value > 0
    rows = read_jsonl(trained.folder / "steps.jsonl")
    assert figures["val_loss"].value == rows[-1]["val_loss"]
    losses = [row["loss"] for row in rows if "loss" in row][-10:]
    assert figures["final_loss"].value == pytest.approx(sum(losses) / 10)
    assert figures["val_bits_per_byte"].value > 0
    assert [row["kind"] for row in trained.techniques] == ["next_token", "cosine", "adamw"]


def test_tensorboard_reads_the_curves(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = EventAccumulator(str(trained.folder / "log"))
    curves.Reload()
    assert [event.step for event in curves.Scalars("train/loss")] == list(range(1, 13))
    assert [event.step for event in curves.Scalars("val/loss")] == [5, 10, 12]


def test_another_run_gives_the_same_bytes(trained, data_folder, tmp_path):
    again = Train.read(SPEC).make(tmp_path / "train-base", {"data": Artifact.read(data_folder)}, QUIET)
    assert again.content == trained.content


def test_checkpoints_do_not_change_the_result(trained, data_folder, tmp_path):
    spec = Train.read({**SPEC, "checkpoint": {"interval": 0}})
    again = spec.make(tmp_path / "train-base", {"data": Artifact.read(data_folder)}, QUIET)
    assert again.content == trained.content


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "spans"), [("fp32", [(1, 15), (20, 35), (40, 55)]), ("fp16", [(10, 50)])])
def test_kills_at_random_moments_change_no_byte(precision, spans, data_folder, tmp_path):
    spec = {**SPEC, "steps": 60, "precision": precision}
    expected = Train.read(spec).make(tmp_path / "train-whole", {"data": Artifact.read(data_folder)}, QUIET)
    out = tmp_path / "train-killed"
    draw = random.Random(precision)
    targets = (draw.randint(*span) for span in spans)
    content = content_after_kills(spec, data_folder, out, targets, pause=lambda: draw.random() * 0.02)
    assert content == expected.content
    Artifact.read(out).verify()


@pytest.mark.slow
def test_a_training_ends_at_its_loss_as_one_of_so_many_steps(data_folder, tmp_path):
    """The learning rate follows the schedule of all steps; the estimates are those of the steps made."""
    data = {"data": Artifact.read(data_folder)}
    spec = {**SPEC, "steps": 40, "schedule": {"kind": "cosine", "warmup": 20}}
    whole = Train.read({**spec, "validation": {"interval": 4, "sequences": 8}}).make(
        tmp_path / "train-whole", data, QUIET
    )
    losses = {row["step"]: row["val_loss"] for row in read_jsonl(whole.folder / "steps.jsonl") if "val_loss" in row}
    ends = {"val_loss": losses[12], "interval": 4}
    early = Train.read({**spec, "validation": {"sequences": 8}, "early_stopping": ends})
    made = early.make(tmp_path / "train-early", data, QUIET)
    rows = read_jsonl(made.folder / "steps.jsonl")
    last = next(step for step, loss in losses.items() if loss <= losses[12])
    assert [row["step"] for row in rows if "val_loss" in row] == [*range(4, last + 1, 4)]
    assert made.figures["num_steps"].value == last
    assert made.figures["num_steps"].note == f"of 40: the validation loss came down to {losses[12]:g}"
    assert abs(made.figures["train_tokens"].error) < 0.01
    assert made.figures["time_s"].estimate.formula.startswith(f"{last} steps")
    theirs = [row for row in read_jsonl(whole.folder / "steps.jsonl") if row["step"] <= last]
    assert rows == theirs, "the steps of the longer training"


@pytest.mark.slow
def test_max_time_ends_a_training_also_a_resumed_one(data_folder, tmp_path, monkeypatch):
    data, out = {"data": Artifact.read(data_folder)}, tmp_path / "train-slow"
    clock = {"elapsed": 0.0}
    monkeypatch.setattr(Draft, "elapsed_s", property(lambda self: clock["elapsed"]))
    ends = {"max_time_s": 60, "val_loss": 0.1, "interval": 3}
    spec = Train.read({**SPEC, "steps": 40, "checkpoint": {"interval": 5}, "early_stopping": ends})
    step = loop.Trainer.step

    def slow(trainer, batch):
        clock["elapsed"] += 8.0  # 64 s after step 8, between two checks of the loss
        return step(trainer, batch)

    def killed(*args, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.Trainer, "step", slow)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("hone.train.result.record", killed)  # after the end, before the folder is whole
        spec.make(out, data, QUIET)
    made = spec.make(out, data, QUIET)  # from step 5 on, with more than 60 s behind it
    assert made.figures["num_steps"].value == 8
    assert made.figures["num_steps"].note == "of 40: 1 min 0 s were over, before the validation loss was 0.1"
    clock["elapsed"] = 0.0
    ended = spec.model_copy(update={"steps": 7}).make(tmp_path / "train-done", data, QUIET)
    assert ended.figures["num_steps"].note == "", "its last step is no early end"
    rows = read_jsonl(made.folder / "steps.jsonl")
    assert rows[-1]["step"] == 8 and rows[-1]["val_loss"] == made.figures["val_loss"].value
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9))


def test_an_early_end_is_planned(data_folder, trained):
    plain = Train.read(SPEC)
    facts = {"data": facts_of(Artifact.read(data_folder))}
    spec = Train.read({**SPEC, "early_stopping": {"val_loss": 3.5, "max_time_s": 360, "interval": 2}})
    assert spec.identity() != plain.identity()
    plan = spec.plan(facts, describe("cpu"))
    assert plan.notes[0] == "ends at a validation loss of 3.5 or after 6 min 0 s, if that is before step 12"
    assert plan.estimates["time_s"].value > plain.plan(facts, describe("cpu")).estimates["time_s"].value
    early, timed = spec.early_stopping, EarlyStopping(max_time_s=1.0)
    assert (early.evaluates_every, timed.evaluates_every) == (2, 0)
    count = Validation(interval=5).total
    assert count(12, [8], mixed=False, also=(2, 0)) == 8 * len({2, 4, 5, 6, 8, 10, 12})
    assert count(12, [8], mixed=False, also=(0, 0)) == 8 * 3
    timed.check(0)
    with pytest.raises(SpecError, match="needs a val split"):
        early.check(0)


def test_a_half_written_line_is_dropped(tmp_path):
    from hone.train.watch import Watch

    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    Watch(tmp_path, tmp_path, device="cpu", resume_at=2).close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_it_goes_on_from_another_model(trained, data_folder, tmp_path):
    parents = {"data": Artifact.read(data_folder), "model": trained}
    longer = Train.read({**SPEC, "steps": 4}).make(tmp_path / "train-more", parents, QUIET)
    first = read_jsonl(longer.folder / "steps.jsonl")[0]["loss"]
    assert first < 0.8 * read_jsonl(trained.folder / "steps.jsonl")[0]["loss"]


def test_a_half_depth_student(trained, data_folder, tmp_path):
    parents = {"data": Artifact.read(data_folder), "teacher": trained}
    spec = Train.read({**SPEC, "init": "teacher", "objective": {"kind": "distill", "alpha": 0.7}})
    draft = spec.make(tmp_path / "train-draft", parents, QUIET)
    config = json.loads((draft.folder / "config.json").read_text())
    assert config["num_hidden_layers"] == SHAPE.num_layers // 2
    assert draft.figures["num_params"].value < trained.figures["num_params"].value
    assert draft.techniques[0]["alpha"] == 0.7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": "distill"}, "needs a teacher"),
        ({"init": "teacher"}, "needs a teacher"),
        ({"seq_len": 4096}, "longer than the model's max_seq_len 128"),
        ({"schedule": {"kind": "cosine", "warmup": 50}}, "longer than the training of 12 steps"),
        ({"gradient_accumulation_steps": 3}, "does not divide batch_size"),
        ({"tokens": 1000}, "not both"),
        ({"activation_checkpointing": "most"}, "unknown activation_checkpointing 'most'"),
        ({"optimiser": {}}, "did you mean 'optimizer'"),
        ({"sequences": 8}, "did you mean 'validation.sequences'"),
        ({"precision": "fp4"}, "precision"),
    ],
)
def test_mistakes_are_said(change, message, data_folder, tmp_path):
    with pytest.raises(SpecError) as caught:
        Train.read({**SPEC, **change}).make(tmp_path / "train-x", {"data": Artifact.read(data_folder)}, QUIET)
    assert message in str(caught.value)


def test_a_model_that_knows_too_few_tokens(trained, tmp_path):
    data = write_data(tmp_path / "data-wide")
    meta = json.loads((data / "tokens" / "meta.json").read_text())
    (data / "tokens" / "meta.json").write_text(json.dumps({**meta, "vocab_size": 1000}))
    with pytest.raises(SpecError, match=r"knows \d+ tokens, the data use 1000"):
        Train.read(SPEC).make(tmp_path / "train-x", {"data": Artifact.read(data), "model": trained}, QUIET)


def test_quantized_weights_are_not_trained(trained, data_folder, tmp_path):
    shutil.copytree(trained.folder, tmp_path / "int4", ignore=shutil.ignore_patterns("hone.json"))
    config = json.loads((tmp_path / "int4" / "config.json").read_text())
    (tmp_path / "int4" / "config.json").write_text(json.dumps({**config, "quantization_config": {"format": "int"}}))
    parents = {"data": Artifact.read(data_folder), "model": Artifact.read(tmp_path / "int4")}
    with pytest.raises(SpecError, match="quantized weights, which cannot be trained"):
        Train.read(SPEC).make(tmp_path / "train-x", parents, QUIET)


@pytest.mark.parametrize("part", ["vocab", "merges"])
def test_another_tokenizer_is_said(part, trained, tmp_path):
    data = write_data(tmp_path / "data-other")
    values = json.loads((data / "tokenizer.json").read_text())
    if part == "vocab":
        names = list(values["model"]["vocab"])
        values["model"]["vocab"] = {name: number for number, name in enumerate(reversed(names))}
    else:  # the same tokens, which texts are cut into by other rules
        values["model"]["merges"].reverse()
    (data / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(SpecError, match="tokenize differently"):
        Train.read(SPEC).make(tmp_path / "train-x", {"data": Artifact.read(data), "model": trained}, QUIET)


def test_the_spec_prints_and_reads_itself():
    import yaml

    spec = Train.read({**SPEC, "schedule": {"kind": "wsd", "decay": 0.3}, "activation_checkpointing": "sqrt"})
    assert Train.read(yaml.safe_load(spec.to_yaml())) == spec
    assert len(Train.model_fields) <= 22


def test_it_plans_what_does_not_exist_yet():
    """A student of a model that is only planned, on data that are only planned."""
    data = DataFacts(
        where="data-planned",
        splits={name: {"tokens": 50_000, "documents": 100, "bytes": 200_000} for name in ("train", "val")},
        vocab_size=512,
        eos_token_id=0,
        tokenizer="same",
        exact=False,
    )
    machine = describe("cpu")
    spec = Train.read({**SPEC, "precision": "bf16", "steps": None, "tokens": 12_800})
    plan = spec.plan({"data": data}, machine)
    assert plan.steps == 100
    made = plan.facts
    assert made.config.num_layers == SHAPE.num_layers and made.dtype == "bfloat16" and made.tokenizer == "same"
    assert made.weights_bytes == 2 * made.config.num_params == plan.estimates["model_bytes"].value
    needed = {"time_s", "tokens_per_s", "memory_growth_bytes", "disk_bytes", "checkpoint_bytes", "train_tokens"}
    assert needed <= set(plan.estimates)
    student = Train.read({**SPEC, "init": "teacher", "objective": "distill"})
    facts = {"data": data, "teacher": made.model_copy(update={"where": "train-planned"})}
    assert student.plan(facts, machine).facts.config.num_layers == SHAPE.num_layers // 2
    with pytest.raises(SpecError, match="train-planned and data-planned tokenize differently"):
        student.plan({**facts, "data": data.model_copy(update={"tokenizer": "other"})}, machine)
    more = Train.read({**SPEC, "optimizer": "adamw_8bit"}).plan({"data": data}, machine).estimates
    less = Train.read(SPEC).plan({"data": data}, machine).estimates
    assert more["checkpoint_bytes"].value < less["checkpoint_bytes"].value


def test_circumstances_are_no_part_of_what_is_made(trained, data_folder):
    spec = Train.read({**SPEC, "checkpoint": {"interval": 7, "keep_latest_k": 1}, "compile": True})
    assert spec.identity() == Train.read(SPEC).identity()
    there = spec.make(trained.folder, {"data": Artifact.read(data_folder)}, QUIET)
    assert there.fingerprint == trained.fingerprint


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", {"kind": "adamw_8bit", "min_elements": 0}])
def test_every_optimizer_makes_the_same_bytes_after_a_kill(optimizer, data_folder, tmp_path):
    spec = {**SPEC, "steps": 25, "optimizer": optimizer}
    whole = Train.read(spec).make(tmp_path / "train-whole", {"data": Artifact.read(data_folder)}, QUIET)
    assert content_after_kills(spec, data_folder, tmp_path / "train-killed", [8]) == whole.content
    assert whole.techniques[-1]["slot"] == "optimizer"


def test_options_of_an_optimizer_without_its_kind_are_adamws():
    spec = Train.read({**SPEC, "optimizer": {"lr": 0.5}})
    assert spec.optimizer.kind == "adamw" and spec.optimizer.lr == 0.5
    assert Train.from_overrides({"optimizer.lr": "0.5"}).optimizer == spec.optimizer
    for given in ({"optimizer": "muon", "optimizer.lr": "0.5"}, {"optimizer.lr": "0.5", "optimizer": "muon"}):
        made = Train.from_overrides(given).optimizer  # its name and its options, in any order
        assert (made.kind, made.lr) == ("muon", 0.5)
    with pytest.raises(SpecError, match="momentum"):
        Train.read({**SPEC, "optimizer": {"momentum": 0.5}})


def test_equal_vocabularies_with_other_merges_are_two_tokenizers(data_folder, tmp_path):
    """What a text becomes depends on the merges, too: ids of one are noise to a model of the other."""
    pairs = [("t", "h"), ("h", "e"), ("th", "e"), ("t", "he")]
    vocab = {token: number for number, token in enumerate(["t", "h", "e", "th", "he", "the"])}
    for name, merges in (("one", pairs), ("two", [pairs[1], pairs[0], *pairs[2:]])):
        folder = tmp_path / name
        shutil.copytree(data_folder, folder)
        tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges)).save(str(folder / "tokenizer.json"))
    machine = describe("cpu")
    facts = {name: DataFacts.of(tmp_path / name) for name in ("one", "two")}
    with pytest.raises(SpecError, match="have different tokenizers"):
        Train.read(SPEC).plan({"data.one": facts["one"], "data.two": facts["two"]}, machine)
    model = Train.read(SPEC).plan({"data": facts["one"]}, machine).facts
    assert Train.read(SPEC).plan({"data": facts["one"], "model": model}, machine).steps == 12
    with pytest.raises(SpecError, match="tokenize differently"):
        Train.read(SPEC).plan({"data": facts["two"], "model": model}, machine)
