"""The stage end to end on a hand-made data folder: figures, eval.json, repeatability, mistakes."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

import hone
from hone.base.errors import ArtifactError, HoneError, SpecError
from hone.eval.score import score
from hone.eval.stage import Eval, evaluate
from hone.model.decoder import build
from hone.model.shape import Shape
from hone.model.tokenizer import load_tokenizer

TEXTS = ["the quick brown fox jumps over the lazy dog", "a cat sat on the mat; " * 20, "x", "caf\u00e9 \u2603 " * 9]


@pytest.fixture(scope="module")
def data(tiny_llama, tmp_path_factory) -> Path:
    """A data artifact by hand, in the tokens of `tiny_llama`."""
    return write_data(tmp_path_factory.mktemp("made") / "data-hand", tiny_llama, TEXTS)


def write_data(folder: Path, tokenizer_from: Path, texts: list[str]) -> Path:
    import pyarrow
    import pyarrow.parquet

    (folder / "tokens").mkdir(parents=True)
    (folder / "documents").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, folder / name)
    tokenizer = load_tokenizer(tokenizer_from)
    documents = [[*tokenizer.encode(text), *tokenizer.eos_ids[:1]] for text in texts]
    flat = np.array([token for document in documents for token in document], "<u2")
    flat.tofile(folder / "tokens" / "val.bin")
    np.save(folder / "tokens" / "val.starts.npy", np.cumsum([0, *map(len, documents)]).astype(np.int64))
    row = {"tokens": len(flat), "documents": len(texts), "bytes": sum(len(text.encode()) for text in texts)}
    meta = {"dtype": "uint16", "vocab_size": 320, "eos_token_id": tokenizer.eos_ids[0], "splits": {"val": row}}
    (folder / "tokens" / "meta.json").write_text(json.dumps(meta))
    rows = pyarrow.table({"text": texts, "split": ["val"] * len(texts)})
    pyarrow.parquet.write_table(rows, folder / "documents" / "0.parquet")
    return folder


def test_figures(tiny_llama, data, tmp_path):
    made = evaluate(tmp_path / "eval-tiny", tiny_llama, data, reference=tiny_llama)
    figures = {name: figure.value for name, figure in made.figures.items()}
    tokenizer = load_tokenizer(tiny_llama)
    decoder = hone.load(tiny_llama)
    nats, count, num_bytes = 0.0, 0, 0
    for text in TEXTS:
        tokens = np.array([*tokenizer.encode(text), *tokenizer.eos_ids[:1]])
        loss = score(decoder, tokens, window=512).loss[1:]
        nats, count = nats + loss.sum(dtype=np.float64), count + len(loss)
        num_bytes += len(text.encode()) - len(tokenizer.token_bytes(int(tokens[0])))
    assert figures["tokens_evaluated"] == count
    assert figures["loss"] == pytest.approx(nats / count, rel=1e-6)
    assert figures["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-5)
    assert figures["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-6)
    assert figures["kl_to_reference"] == 0.0 and figures["top1_agreement"] == 1.0
    assert figures["model_bytes"] == (tiny_llama / "model.safetensors").stat().st_size
    assert figures["loss_over_reference"] == 0.0 and made.figures["kl_to_reference"].half_width == 0.0
    assert (
        figures["bigram_perplexity"] is None and made.figures["bigram_perplexity"].note == "the data has no train split"
    )
    assert figures["energy_j"] is None or figures["energy_j"] > 0
    for name in ("time_s", "peak_memory_bytes", "memory_growth_bytes"):
        assert made.figures[name].estimate is not None and figures[name] > 0
    assert "window 512, stride 512, join documents" in made.figures["perplexity"].note
    rows = json.loads((made.folder / "eval.json").read_text())["documents"]
    assert [row[0] for row in rows] == [len(tokenizer.encode(text)) for text in TEXTS]


@pytest.mark.slow
def test_content_repeats(tiny_llama, data, tmp_path):
    one = evaluate(tmp_path / "eval-one", tiny_llama, data, window=32, stride=16)
    two = evaluate(tmp_path / "eval-two", tiny_llama, data, window=32, stride=16)
    assert one.content == two.content
    assert "kl_to_reference" not in one.figures


def test_max_tokens_and_stream(tiny_llama, data, tmp_path):
    made = evaluate(tmp_path / "eval-few", tiny_llama, data, max_tokens=20, join="stream", window=8)
    assert made.figures["tokens_evaluated"].value == 19


def test_another_tokenizer_scores_the_text_itself(tiny_llama, data, tmp_path):
    """A character tokenizer: bits per byte stay comparable because they count the text's bytes."""
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    made = json.loads((model / "tokenizer.json").read_text())
    made["model"]["merges"] = []
    (model / "tokenizer.json").write_text(json.dumps(made))
    found = evaluate(tmp_path / "eval-other", model, data)
    total = sum(len(text.encode()) + 1 for text in TEXTS)  # every byte is a token, and one end each
    assert found.figures["tokens_evaluated"].value == total - len(TEXTS)
    assert "own tokens" in found.figures["loss"].note
    assert "no train split in the tokens of the model" in found.figures["bigram_perplexity"].note


@pytest.mark.parametrize("ending", ["jsonl.gz", "parquet"])
def test_a_file_of_texts_gives_the_figures_of_a_data_folder(ending, tiny_llama, data, tmp_path):
    import gzip

    import pyarrow
    import pyarrow.parquet

    file = tmp_path / f"texts.{ending}"
    if ending == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), file)
    else:
        file.write_bytes(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()))
    found = evaluate(tmp_path / "eval-a", tiny_llama, text=str(file), reference=tiny_llama, window=64)
    wanted = evaluate(tmp_path / "eval-b", tiny_llama, data, reference=tiny_llama, window=64)
    for name in ("perplexity", "loss", "bits_per_byte", "kl_to_reference", "tokens_evaluated"):
        assert found.figures[name].value == wanted.figures[name].value, name
    assert [one.name for one in found.figures.values()] == [one.name for one in wanted.figures.values()]
    few = evaluate(tmp_path / "eval-c", tiny_llama, text=str(file), max_tokens=20)
    assert (
        few.figures["tokens_evaluated"].value
        == evaluate(tmp_path / "eval-d", tiny_llama, data, max_tokens=20).figures["tokens_evaluated"].value
    )


def test_a_plain_file_is_one_document_and_part_of_the_identity(tiny_llama, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXTS[1], encoding="utf8")
    made = evaluate(tmp_path / "eval-a", tiny_llama, text=str(file))
    tokens = np.array([*load_tokenizer(tiny_llama).encode(TEXTS[1]), load_tokenizer(tiny_llama).eos_ids[0]])
    loss = score(hone.load(tiny_llama), tokens, window=512).loss[1:]
    assert made.figures["loss"].value == pytest.approx(loss.mean(dtype=np.float64), rel=1e-5)
    bits = (
        loss.sum(dtype=np.float64) / math.log(2) / (len(TEXTS[1].encode()) - 1)
    )  # the first token, "a", is not scored
    assert made.figures["bits_per_byte"].value == pytest.approx(bits, rel=1e-5)
    file.write_text(TEXTS[0], encoding="utf8")
    with pytest.raises(HoneError, match="made from"):
        evaluate(tmp_path / "eval-a", tiny_llama, text=str(file))


def test_text_and_data_are_one_or_the_other(tiny_llama, data, tmp_path):
    with pytest.raises(SpecError, match="neither text nor the input data"):
        evaluate(tmp_path / "eval-a", tiny_llama)
    with pytest.raises(SpecError, match="both text and the input data"):
        evaluate(tmp_path / "eval-a", tiny_llama, data, text=__file__)
    with pytest.raises(SpecError, match="split test is of a data set"):
        Eval.read({"text": "x", "split": "test"})
    with pytest.raises(SpecError, match=r"text /nowhere\.txt: No such file"):
        evaluate(tmp_path / "eval-a", tiny_llama, text="/nowhere.txt")


def test_mistakes(tiny_llama, data, tmp_path):
    with pytest.raises(SpecError, match="longer than the model's context of 512"):
        evaluate(tmp_path / "eval-a", tiny_llama, data, window=513)
    other = shutil.copytree(tiny_llama, tmp_path / "other")
    values = json.loads((other / "tokenizer.json").read_text())
    values["model"]["merges"].reverse()
    (other / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(SpecError, match="tokenize differently: their predictions cannot be compared"):
        evaluate(tmp_path / "eval-a", tiny_llama, data, other)
    shorter = shutil.copytree(tiny_llama, tmp_path / "shorter")
    config = json.loads((shorter / "config.json").read_text())
    (shorter / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    with pytest.raises(SpecError, match="longer than the reference's context of 256"):
        evaluate(tmp_path / "eval-a", tiny_llama, data, shorter)
    with pytest.raises(SpecError, match="stride 20 is longer than window 10"):
        Eval.read({"window": 10, "stride": 20})
    with pytest.raises(SpecError, match="no split 'test'"):
        evaluate(tmp_path / "eval-b", tiny_llama, data, split="test")
    empty = write_data(tmp_path / "data-empty", tiny_llama, [""])
    with pytest.raises(SpecError, match="nothing to predict"):
        evaluate(tmp_path / "eval-c", tiny_llama, empty)


def test_reading_the_spec_needs_no_torch():
    import subprocess
    import sys

    code = "import sys, hone.eval.stage; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_model_that_sees_later_tokens_is_refused(tiny_llama, data, tmp_path):
    encoder = build(Shape(mixers=({"kind": "longformer", "window": 8, "encoder": True},)).config(320))
    with pytest.warns(RuntimeWarning):
        hone.save(encoder, tmp_path / "encoder")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_llama / name, tmp_path / "encoder" / name)
    with pytest.raises(SpecError, match="layer 0 mixes with 'longformer', which attends to later tokens"):
        evaluate(tmp_path / "eval-encoder", tmp_path / "encoder", data)
    with pytest.raises(SpecError, match="'longformer'"):
        evaluate(tmp_path / "eval-against", tiny_llama, data, reference=tmp_path / "encoder")


def changed(folder: Path, to: Path, name: str, value: float) -> Path:
    """A copy of model folder `folder` whose tensor `name` holds `value` everywhere."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    tensors[name].fill_(value)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.slow
@pytest.mark.parametrize("role", ["model", "reference"])
def test_weights_that_are_not_finite_give_no_figure(role, tiny_llama, data, tmp_path):
    name = "model.layers.1.mlp.down_proj.weight"
    broken = changed(tiny_llama, tmp_path / "broken", name, float("nan"))
    with pytest.raises(ArtifactError, match=f"{name} has values that are not finite"):
        evaluate(tmp_path / "eval", **{"model": tiny_llama, "data": data, role: broken})
    assert not (tmp_path / "eval").exists()


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_no_figure(tiny_llama, data, tmp_path):
    large = changed(tiny_llama, tmp_path / "large", "model.norm.weight", 6e4)
    made = evaluate(tmp_path / "eval-32", large, data)
    assert made.figures["loss"].value > 710, "so large that its perplexity is beyond a float"
    absent = made.figures["perplexity"]
    assert absent.value is None and absent.note.startswith("inf, which is not finite; window 512")
    with pytest.raises(HoneError, match=r"the model's loss is not finite at \d+ of \d+ tokens in float16") as caught:
        evaluate(tmp_path / "eval-16", large, data, dtype="float16")
    assert "float32" in caught.value.fix
    assert not (tmp_path / "eval-16").exists()
