"""Training on mixtures and by curricula: every technique trains on a CPU, a kill changes nothing, mistakes are named."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from hone.base.artifact import Artifact, start
from hone.base.errors import SpecError
from hone.base.run import Run
from hone.feed import CURRICULA
from hone.feed.load import PackedTokens
from hone.feed.mix.reading import Reading
from hone.feed.mix.sources import Sources
from hone.train.stage import Train
from tests.feed.mix.test_medu import Fake
from tests.train.conftest import SHAPE, content_after_kills, write_data

SPEC = {
    "model": SHAPE.model_dump(),
    "batch_size": 4,
    "seq_len": 32,
    "steps": 10,
    "validation": {"sequences": 8},
    "checkpoint": {"interval": 3},
    "optimizer": {"lr": 3e-3},
}
QUIET = Run(quiet=True)


@pytest.fixture(scope="module")
def table_folder(tmp_path_factory):
    """The usual data, with a documents table of two groups and a signal."""
    folder = write_data(tmp_path_factory.mktemp("made") / "data-table")
    (folder / "documents").mkdir()
    for number, split in enumerate(("train", "val")):
        data = PackedTokens(folder, split)
        sizes = np.diff(data.starts)
        groups = [("small", "large", "large")[place % 3] for place in range(len(sizes))]
        rows = {
            "text": [f"the quick {group}" for group in groups],
            "split": [split] * len(sizes),
            "bytes": (sizes * 4).tolist(),
            "words": sizes.tolist(),
            "compression_ratio": (1 + sizes / 50).tolist(),
            "group": groups,
        }
        parquet.write_table(pa.table(rows), folder / "documents" / f"{number:05d}.parquet")
    return folder


def train(folder, out, **fields):
    return Train.read({**SPEC, **fields}).make(out, {"data": Artifact.read(folder)}, QUIET)


@pytest.fixture(scope="module")
def plain(table_folder, tmp_path_factory):
    return train(table_folder, tmp_path_factory.mktemp("line") / "train-plain")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*CURRICULA])
def test_every_curriculum_trains(kind, table_folder, plain, tmp_path):
    made = train(table_folder, tmp_path / "train-ordered", curriculum=kind)
    assert made.figures["val_loss"].value > 0
    same = (made.folder / "model.safetensors").read_bytes() == (plain.folder / "model.safetensors").read_bytes()
    assert same == (kind == "random")
    assert ("curriculum" in {row["slot"] for row in made.techniques}) == (kind != "random")


@pytest.mark.slow
@pytest.mark.parametrize(
    "mixture",
    [
        "proportional",
        {"kind": "temperature", "temperature": 5},
        {"kind": "unimax", "max_epochs": 3},
        {"kind": "fixed", "weights": {"large": 1, "small": 3}},
        {"kind": "fixed", "weights": {"large": 1, "small": 0}},
    ],
)
def test_mixtures_train_and_say_what_they_read(mixture, table_folder, tmp_path):
    made = train(table_folder, tmp_path / "train-mixed", mixture=mixture, curriculum="staged")
    table = json.loads((made.folder / "mixture.json").read_text())
    weights = {row["source"]: row["weight"] for row in table["shares"]}
    assert sum(weights.values()) == pytest.approx(1) and all(row["reason"] for row in table["shares"])
    for name, weight in weights.items():
        assert made.figures[f"weight_{name}"].value == weight
        assert made.figures[f"val_loss_{name}"].value > 0
        if weight:
            figure = made.figures[f"epochs_{name}"]
            assert figure.value == pytest.approx(figure.estimate.value, abs=4 * 32 / 400)
        else:
            assert f"epochs_{name}" not in made.figures
    (technique,) = [row for row in made.techniques if row["slot"] == "mixture"]
    assert technique["kind"] == made.manifest["spec"]["mixture"]["kind"]


@pytest.mark.slow
def test_utilimax_learns_from_runs_on_one_source_each(table_folder, tmp_path):
    runs = {}
    for name in ("large", "small"):
        weights = {"large": 0.0, "small": 0.0, name: 1.0}
        made = train(table_folder, tmp_path / f"train-{name}", steps=3, mixture={"kind": "fixed", "weights": weights})
        runs[name] = str(made.folder)
    mixture = {"kind": "utilimax", "runs": runs, "risk": 0.1}
    made = train(table_folder, tmp_path / "train-utilimax", mixture=mixture)
    table = json.loads((made.folder / "mixture.json").read_text())
    assert set(table["notes"]["utilities"]["large"]) == {"val_loss_large", "val_loss_small"}
    assert set(made.manifest["input_files"]) == {"mixture.runs.large", "mixture.runs.small"}


@pytest.mark.slow
def test_regmix_trains_on_what_runs_said(table_folder, tmp_path):
    shares = np.linspace(0.05, 0.95, 40)
    runs = "".join(f"{n},{share},{1 - share}\n" for n, share in enumerate(shares))
    losses = "".join(f"{n},{(share - 0.8) ** 2}\n" for n, share in enumerate(shares))
    (tmp_path / "runs.csv").write_text(f"index,large,small\n{runs}")
    (tmp_path / "losses.csv").write_text(f"index,loss\n{losses}")
    files = {"mixtures": str(tmp_path / "runs.csv"), "losses": str(tmp_path / "losses.csv")}
    mixture = {"kind": "regmix", **files, "num_simulated": 2000, "regressor": "ridge"}
    made = train(table_folder, tmp_path / "train-regmix", steps=2, mixture=mixture)
    assert made.figures["weight_large"].value == pytest.approx(0.8, abs=0.1)


@pytest.mark.slow
def test_medu_asks_once_and_an_interrupted_run_keeps_its_weights(table_folder, tmp_path):
    pytest.importorskip("openai")
    (tmp_path / "examples.txt").write_text("Why is the fox quick?")
    fake = Fake()
    try:
        fake.answer = lambda question: "good" if "quick small" in question else "useless"
        endpoint = {"url": fake.url, "attempts": 1}
        mixture = {
            "kind": "medu",
            "endpoint": endpoint,
            "examples": {"t": str(tmp_path / "examples.txt")},
            "num_samples": 3,
        }
        spec = Train.read({**SPEC, "steps": 2, "mixture": mixture})
        made = spec.make(tmp_path / "train-medu", {"data": Artifact.read(table_folder)}, QUIET)
        asked = len(fake.seen)
        assert asked == 1 + 2 * 3
        weight = made.figures["weight_large"].value
        assert 0 < weight < 0.5
        reading = Reading({"data": Artifact.read(table_folder)}, spec.mixture, spec.curriculum)
        draft = start(tmp_path / "train-again", kind="train", spec=spec)
        with draft:
            shutil.copy(made.folder / "mixture.json", draft.folder / "mixture.json")
            reading.prepare(8, 32, 0, draft, QUIET)
        assert len(fake.seen) == asked, "the model was asked again"
        assert reading.chosen.weights == pytest.approx({"large": weight, "small": 1 - weight})
    finally:
        fake.server.shutdown()
        fake.server.server_close()


@pytest.mark.slow
def test_several_data_folders(table_folder, data_folder, tmp_path):
    parents = {"data.one": Artifact.read(table_folder), "data.two": Artifact.read(data_folder)}
    spec = Train.read({**SPEC, "mixture": {"kind": "fixed", "weights": {"one": 1, "two": 3}}})
    made = spec.make(tmp_path / "train-two", parents, QUIET)
    assert made.figures["epochs_two"].value > 2 * made.figures["epochs_one"].value
    assert {row["role"] for row in made.manifest["parents"]} == {"data.one", "data.two"}
    unweighted = Train.read(SPEC).make(tmp_path / "train-both", parents, QUIET)
    assert unweighted.figures["weight_one"].value == pytest.approx(0.5)
    assert unweighted.figures["val_loss"].value > 0
    with pytest.raises(SpecError, match="needs the input 'data'"):
        Train.read(SPEC).make(tmp_path / "x", {}, QUIET)
    with pytest.raises(SpecError, match=r"no input 'model\.two'"):
        Train.read(SPEC).make(tmp_path / "x", {**parents, "model.two": Artifact.read(data_folder)}, QUIET)


@pytest.mark.slow
def test_a_kill_changes_no_byte_of_a_mixture_by_curriculum(table_folder, tmp_path):
    spec = {
        **SPEC,
        "steps": 40,
        "mixture": {"kind": "temperature", "temperature": 3, "max_epochs": 9},
        "curriculum": "competence",
    }
    expected = Train.read(spec).make(tmp_path / "train-whole", {"data": Artifact.read(table_folder)}, QUIET)
    out = tmp_path / "train-killed"
    assert content_after_kills(spec, table_folder, out, (7, 22)) == expected.content


def test_mistakes_are_named_before_any_work(table_folder, data_folder, tmp_path):
    for fields, said in (
        ({"mixture": {"kind": "unimax", "max_epochs": 0.01}}, "max_epochs = 0.01"),
        ({"mixture": {"kind": "fixed", "weights": {"large": 1}}}, "does not name small"),
        ({"mixture": {"kind": "proportional", "by": "split"}}, "nothing to mix"),
        ({"curriculum": {"kind": "staged", "signal": "absent", "hard": "low"}}, "no column 'absent'"),
    ):
        with pytest.raises(SpecError, match=said):
            train(table_folder, tmp_path / "train-wrong", **fields)
        assert not (tmp_path / "train-wrong").exists()
        assert not (tmp_path / "train-wrong.partial").exists()
    with pytest.raises(Exception, match="has no documents"):
        train(data_folder, tmp_path / "train-bare", curriculum="staged")


@pytest.mark.slow
def test_other_content_of_a_table_is_another_artifact(table_folder, tmp_path):
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"large": {"t": 1.0}, "small": {"t": 2.0}}))
    spec = Train.read({**SPEC, "steps": 2, "mixture": {"kind": "utilimax", "table": str(table)}})
    made = spec.make(tmp_path / "train-a", {"data": Artifact.read(table_folder)}, QUIET)
    table.write_text(json.dumps({"large": {"t": 2.0}, "small": {"t": 1.0}}))
    other = spec.make(tmp_path / "train-b", {"data": Artifact.read(table_folder)}, QUIET)
    assert made.fingerprint != other.fingerprint
    assert Sources({"only": table_folder}, "group").num_tokens == PackedTokens(table_folder).num_tokens
