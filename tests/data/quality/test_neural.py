"""The neural scorer sees what words alone do not show, and scores a text the same whatever else is scored and wherever."""

from __future__ import annotations

import builtins
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch

from hone.base.errors import ArtifactError, MissingExtra, SpecError
from hone.base.run import Run
from hone.data import annotate
from hone.data.quality import encoder
from hone.data.quality.base import area_under_curve
from hone.data.quality.cascade import Cascade
from hone.data.quality.hashed_logistic import HashedLogistic
from hone.data.quality.neural import Neural
from hone.data.stage import Data
from hone.text.batch import Texts

RIVER = ["river", "bank", "boat", "flood", "shore", "reeds", "ferry", "current"]
OVEN = ["oven", "bread", "flour", "crust", "yeast", "loaf", "butter", "salt"]
SMALL = {
    "num_layers": 1,
    "hidden_size": 32,
    "vocab_size": 320,
    "log_pairs": 10,
    "max_tokens": 48,
    "epochs": 12,
    "batch": 16,
    "learning_rate": 0.01,
}


def some(good: bool, number: int) -> str:
    """Good texts stay with one of two subjects, bad ones mix them: no word, and no share of a word, tells them apart."""
    draw = random.Random(2 * number + good)
    words = draw.sample(draw.choice([RIVER, OVEN]), 6) if good else draw.sample(RIVER, 3) + draw.sample(OVEN, 3)
    return " ".join(draw.sample(words, 6))


def write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf8")
    return str(path)


@pytest.fixture(scope="module")
def seeds(tmp_path_factory) -> dict[str, tuple[str, ...]]:
    folder = tmp_path_factory.mktemp("seeds")
    sides = {name: [some(name == "high", number) for number in range(240)] for name in ("high", "low")}
    return {name: (write(folder / f"{name}.jsonl", texts),) for name, texts in sides.items()}


@pytest.fixture(scope="module")
def model(seeds, tmp_path_factory) -> tuple[Neural, Path]:
    """A trained scorer and its folder."""
    folder = tmp_path_factory.mktemp("model")
    spec = Neural(kind="neural", **seeds, **SMALL)
    spec.train(folder)
    return spec, folder


TESTED = [some(number % 2 == 0, 1000 + number) for number in range(80)]
TRUTH = np.arange(80) % 2 == 0


def test_it_tells_apart_what_words_alone_cannot(seeds, model, tmp_path):
    spec, folder = model
    scores = spec.open(folder).columns(Texts.of(TESTED))["quality"]
    assert area_under_curve(TRUTH, scores) >= 0.95
    words = HashedLogistic(kind="hashed_logistic", word_runs=1, **seeds)
    words.train(tmp_path)
    assert area_under_curve(TRUTH, words.open(tmp_path).columns(Texts.of(TESTED))["quality"]) <= 0.65


def test_figures_are_those_of_the_held_out(model):
    spec, folder = model
    figures = spec.known(folder).figures
    assert (figures["held_out"], figures["high_documents"], figures["low_documents"]) == (
        48,
        238,
        240,
    )  # two good ones came twice
    assert figures["auc"] >= 0.95 and figures["accuracy"] >= 0.85, figures


@pytest.mark.slow
def test_training_twice_gives_the_same_bytes_and_is_not_repeated(seeds, model, tmp_path, monkeypatch):
    spec, folder = model
    random_state = torch.get_rng_state()
    spec.train(tmp_path)
    assert torch.equal(random_state, torch.get_rng_state()), "training drew from the caller's random numbers"
    names = sorted(path.name for path in (folder / "quality").iterdir())
    assert names == ["about.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (folder / "quality" / name).read_bytes() == (tmp_path / "quality" / name).read_bytes(), name
    monkeypatch.setattr(Neural, "fit", lambda *_: pytest.fail("trained again"))
    assert spec.train(tmp_path) == spec.known(folder).figures
    for changed in ({"seed": 1}, {"hidden_size": 64}):
        with pytest.raises(pytest.fail.Exception, match="trained again"):
            spec.model_copy(update=changed).train(tmp_path)


def test_a_score_does_not_depend_on_what_else_is_scored(model):
    spec, folder = model
    opened = spec.open(folder)
    texts = [*TESTED[:20], "", "x", "日本語のテキスト。 Ünïcödé 🙂", " ".join(TESTED[:40])]
    whole = opened.columns(Texts.of(texts))["quality"]
    assert whole.dtype == np.float32 and ((whole >= 0) & (whole <= 1)).all()
    assert (np.abs(whole * 10_000 - np.round(whole.astype(np.float64) * 10_000)) < 1e-2).all()
    order = np.random.default_rng(0).permutation(len(texts))
    shuffled = opened.columns(Texts.of([texts[place] for place in order]))["quality"]
    assert (shuffled == whole[order]).all()
    alone = np.concatenate([opened.columns(Texts.of([text]))["quality"] for text in texts])
    assert (alone == whole).all()
    assert opened.columns(Texts.of([]))["quality"].shape == (0,)
    assert repr(spec.open(folder)) == repr(opened)


def test_a_score_does_not_depend_on_threads_and_leaves_them_as_they_were(model):
    spec, folder = model
    opened = spec.open(folder)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(opened.columns(Texts.of(TESTED))["quality"])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert (found[0] == found[1]).all()


def test_every_part_of_a_long_text_counts(model, monkeypatch):
    spec, folder = model
    assert [len(part) for part in spec.parts("a" * 1000)] == [500, 500]
    assert spec.parts("a" * 300) == ["a" * 300]  # nothing is read twice
    assert spec.parts("") == [""]
    assert "".join(spec.model_copy(update={"windows": 7}).parts("".join(map(chr, range(33, 2000))))) == "".join(
        map(chr, range(33, 2000))
    )
    good, bad = (" ".join(some(side, 5000 + number) for number in range(12)) for side in (True, False))
    assert len(spec._ids(spec.open(folder).tokens, good)) == spec.max_tokens, "one window is full before the bad half"
    seen: list[list[bytes]] = []

    def margins(network, rows):
        seen.append([row.tobytes() for row in rows])
        return np.array([3.0, -1.0][: len(rows)])

    monkeypatch.setattr(encoder, "margins", margins)
    found = {}
    for windows in (1, 2):
        opened = spec.model_copy(update={"windows": windows}).open(folder)
        found[windows] = opened.columns(Texts.of([f"{good} {bad}"]))["quality"][0]
    ids = [spec._ids(opened.tokens, part).tobytes() for part in opened.spec.parts(f"{good} {bad}")]
    assert seen == [ids[:1], ids], "the beginnings of both halves are read"
    assert found[1] == pytest.approx(1 / (1 + np.exp(-3.0)), abs=1e-3), "the first half's margin alone"
    assert found[2] == pytest.approx(1 / (1 + np.exp(-1.0)), abs=1e-3), "the mean of both halves' margins"


def test_filling_changes_nothing_and_tokens_see_both_ways():
    sizes = encoder.Sizes(50, 8, 64, 2, 32)
    draw = torch.Generator().manual_seed(0)
    model = encoder.Encoder(sizes, seed=3).requires_grad_(False)
    for value in (model.pairs, model.head.weight):
        value.copy_(torch.randn(value.shape, generator=draw))
    rows = [np.arange(1, size + 1) for size in (3, 17, 32, 9)]
    alone = encoder.margins(model, rows)
    tokens, lengths = encoder._padded(rows, "cpu", 32)
    assert torch.allclose(model(tokens, lengths), torch.from_numpy(alone), atol=1e-5)
    filled = torch.where(torch.arange(32) < lengths[:, None], tokens, 7)
    assert torch.equal(model(filled, lengths), model(tokens, lengths))
    # The first token's output changes with the last token: nothing hides what comes later.
    context = encoder.Whole(tokens[2:3], None)
    inward = torch.randn(1, 32, 64, generator=draw)
    other = inward.clone()
    other[0, -1] += 1
    first, second = (model.body.layers[0](x, context)[0, 0] for x in (inward, other))
    assert not torch.allclose(first, second, atol=1e-4)
    assert not np.allclose(encoder.margins(model, [rows[1][::-1].copy()]), alone[1], atol=1e-4)


def test_attention_is_that_of_the_formula():
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 5, 2, 4, generator=draw, dtype=torch.float64) for _ in range(3))
    lengths = torch.tensor([5, 3])
    found = encoder.Whole(torch.zeros(2, 5, dtype=torch.int64), lengths).attend(0, q, k, v, scale=0.5, window=None)
    for row, size in enumerate((5, 3)):
        weights = (torch.einsum("qhd,khd->hqk", q[row], k[row, :size]) * 0.5).softmax(-1)
        assert torch.allclose(found[row], torch.einsum("hqk,khd->qhd", weights, v[row, :size]))


@pytest.mark.slow
def test_mistakes(seeds, model, tmp_path, monkeypatch):
    spec, folder = model
    with pytest.raises(SpecError, match="40 is not a multiple of 32"):
        Neural.read({"hidden_size": 40})
    with pytest.raises(SpecError, match=r"scorer\.low names no file"):
        Neural(high=seeds["high"]).train(tmp_path)
    with pytest.raises(ArtifactError, match="is not a scorer's model"):
        spec.open(tmp_path / "empty")
    if not torch.cuda.is_available():
        with pytest.raises(SpecError, match="torch finds no CUDA device"):
            spec.model_copy(update={"device": "cuda"}).train(tmp_path)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "quality" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8] + bytes(8))
    with pytest.raises(ArtifactError, match=r"model\.safetensors is not the file it was written with"):
        spec.open(tmp_path)
    assert spec.train(tmp_path) == spec.known(folder).figures and weights.read_bytes() == whole  # made again
    plain = builtins.__import__

    def without_torch(name, *rest):
        if name == "torch":
            raise ImportError("No module named 'torch'")
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    for call in (spec.train, spec.open):
        with pytest.raises(MissingExtra, match="neural needs the package 'torch'"):
            call(folder)


@pytest.mark.slow
def test_a_cascade_of_the_cheap_and_the_neural(seeds, tmp_path):
    plain = Cascade.read({})
    assert (plain.cheap.kind, plain.dear.kind) == ("hashed_logistic", "neural")
    spec = Cascade.read(
        {"cheap": {"kind": "hashed_logistic", "word_runs": 1, **seeds}, "dear": {"kind": "neural", **seeds, **SMALL}}
    )
    figures = spec.train(tmp_path)
    assert figures["dear_auc"] >= 0.95 > figures["cheap_auc"]
    texts = Texts.of([*TESTED[:10], "unknown words"])
    found = spec.open(tmp_path).columns(texts)
    dear = spec.dear.open(tmp_path / "quality" / "dear").columns(texts)["quality"]
    asked = found["quality_dear"]
    assert asked.any() and (found["quality"][asked] == dear[asked]).all()


@pytest.mark.slow
def test_serial_and_processes_write_the_same_scores(seeds, model, tmp_path, monkeypatch):
    """Through the stage, as a cascade: its seeds are files of the artifact."""
    monkeypatch.setattr(annotate, "TASK_BYTES", 1000)
    source = tmp_path / "source"
    source.mkdir()
    for number in range(4):
        write(source / f"{number}.jsonl", TESTED[number * 20 : number * 20 + 20])
    dear = {"kind": "neural", **seeds, **SMALL, "epochs": 1}
    spec = Data.read(
        {
            "source": str(source),
            "scorers": [
                {"kind": "cascade", "cheap": {"kind": "hashed_logistic", "word_runs": 1, **seeds}, "dear": dear}
            ],
            "filters": [{"kind": "expression", "keep": "quality >= 0.05", "reason": "poor"}],
            "dedups": [],
            "tokenizer": {"vocab_size": 300},
        }
    )
    assert sorted(spec.files()) == [
        f"scorers.0.{part}.{side}.0/." for part in ("cheap", "dear") for side in ("high", "low")
    ]
    made = {}
    for kind, options in (("serial", {}), ("processes", {"workers": 2})):
        run = Run(quiet=True, executor={"kind": kind, **options})
        folder = spec.make(tmp_path / kind, run=run).folder
        made[kind] = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for part in ("documents", "scorers", "tokens")
            for path in sorted((folder / part).rglob("*"))
            if path.is_file()
        }
        made[kind]["stats.json"] = (folder / "stats.json").read_bytes()
    assert made["serial"].keys() == made["processes"].keys()
    for name, content in made["serial"].items():
        assert content == made["processes"][name], name
    rows = parquet.read_table(tmp_path / "serial" / "documents").to_pylist()
    assert {"quality", "quality_dear"} <= rows[0].keys()
    planned = spec.plan({}, None)  # says what it leaves out
    assert planned.estimates["kept_bytes"].bound and planned.estimates["time_s"].bound
    assert "without cascade and the filters that use it" in planned.estimates["time_s"].formula


@pytest.mark.gpu
def test_a_gpu_scores_a_text_the_same_whatever_else_is_scored(seeds, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    spec = Neural(kind="neural", device="cuda", **seeds, **SMALL)
    spec.train(tmp_path)
    opened = spec.open(tmp_path)
    whole = opened.columns(Texts.of(TESTED))["quality"]
    alone = np.concatenate([opened.columns(Texts.of([text]))["quality"] for text in TESTED])
    order = np.random.default_rng(0).permutation(len(TESTED))
    assert (alone == whole).all()
    assert (opened.columns(Texts.of([TESTED[place] for place in order]))["quality"] == whole[order]).all()
    assert area_under_curve(TRUTH, whole) >= 0.95
    on_cpu = spec.model_copy(update={"device": "cpu"}).open(tmp_path).columns(Texts.of(TESTED))["quality"]
    assert np.abs(on_cpu - whole).max() <= 0.001
