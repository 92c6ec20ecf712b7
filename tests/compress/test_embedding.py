"""A quantized embedding: looked up by hone and transformers with the same logits, to the byte as planned, and one matrix where it is tied."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hone.base.errors import SpecError
from hone.compress import calibration, stream
from hone.compress.engine import ends
from hone.compress.targets import embedding
from hone.exports.api import export
from hone.model.context import Causal
from hone.model.decoder import Decoder
from hone.model.facts import CheckpointFacts
from hone.model.hf import load, save
from hone.model.parallel.reading import LocalCheckpoint
from hone.model.quantized.dequantizing import Dequantizing
from hone.model.quantized.embedding import QuantizedEmbedding
from hone.model.quantized.packed_int import PackedInt
from hone.parallel.group import Group
from hone.parallel.place import Place
from hone.serve import planning
from hone.serve.spec import EngineSpec
from tests.compress.conftest import must_serve_what_it_computes
from tests.compress.test_targets import CONFIG
from tests.compress.written.test_export_loaders import TOKENS, logits_from, tensors_of

BOTH = {"targets": (r"\.layers\.", "embed_tokens")}
ALL = {"targets": (r"\.layers\.", "lm_head", "Embedding"), "ignore": ()}
INT4 = {"kind": "rtn", "group_size": 32, "scale": "search", "scale_dtype": "float32"}
INT8 = {"kind": "rtn", "bits": 8, "group_size": 0, "layout": "int-quantized", "scale_dtype": "float32"}
FORMATS = {
    "int4": INT4,
    "gptq int3": {"kind": "gptq", "bits": 3, "group_size": 32, "scale_dtype": "float32"},
    "int8": INT8,
    "w8a8": INT8 | {"activations": "int8_token"},
    "fp8": {"kind": "fp8", "activations": "none", "scale_dtype": "float32"},
}
QUICK = (("int4", "llama"), ("int8", "qwen2"))
CASES = [
    pytest.param(form, family, marks=() if (form, family) in QUICK else pytest.mark.slow)
    for form in FORMATS
    for family in ("llama", "qwen2", "gemma3_text")  # tied, untied, tied and multiplied
    if (form, family) not in (("w8a8", "llama"), ("w8a8", "gemma3_text"))  # inputs are rounded: refused, see below
]


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "layers.jsonl").read_text().splitlines()]


def loaded(folder: Path, *, dequantize: bool) -> torch.nn.Module:
    import transformers

    more = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more)


@pytest.mark.parametrize(("form", "family"), CASES)
def test_transformers_computes_the_same_logits(form: str, family: str, family_folder, compress) -> None:
    """Packed or tied with `dequantize`, which the plan says; codes under the name of a weight without.

    `dequantize` rounds weights to the dtype of their scales, which is float32 here.
    """
    pytest.importorskip("compressed_tensors")
    source, packed = family_folder(family), FORMATS[form]["kind"] != "fp8" and "layout" not in FORMATS[form]
    made = compress(source, FORMATS[form], engine="transformers", **BOTH)
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value
    assert [row["name"] for row in rows_of(made.folder)[:2]] == ["model.embed_tokens", "model.layers.0.mixer.qkv"]
    stored = tensors_of(made.folder)
    assert ("model.embed_tokens.weight_packed" in stored) == packed
    tied = json.loads((source / "config.json").read_text())["tie_word_embeddings"]
    assert any(name.startswith("lm_head.") for name in stored) == (not tied)
    ours, whole, theirs = load(made.folder), load(source), loaded(made.folder, dequantize=packed or tied)
    with torch.no_grad():
        dequantized = ours.embed_tokens.dequantize(torch.float32)
        assert torch.equal(ours.embed_tokens(TOKENS), dequantized[TOKENS])
        expected, ours, whole = logits_from(theirs), ours(TOKENS), whole(TOKENS)
    if form == "w8a8":  # an input on the border between two codes falls on either side after sums in another order
        assert (ours - expected).norm() <= 0.1 * whole.norm()
    else:
        assert (ours - expected).abs().max() <= 1e-5 * whole.abs().max()
    assert (ours - whole).abs().max() > 1e-3 * whole.abs().max(), "nothing was compressed"


def test_a_tied_matrix_is_stored_once_and_the_check_computes_with_it(family_folder, compress, calibration_text) -> None:
    """Embedding alone: the divergence is that of the loaded model, whose head multiplies the same codes."""
    source = family_folder("llama")
    said = {"calibration_text": str(calibration_text), "check_sequences": 8}
    made = compress(source, INT4 | {"bits": 3}, targets=("embed_tokens",), **said)
    model, dense = load(made.folder), load(source)
    assert json.loads((made.folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert model.lm_head is None and isinstance(model.embed_tokens.table, PackedInt)
    assert [row["name"] for row in rows_of(made.folder)] == ["model.embed_tokens"]
    before, after = dense.embedding.detach(), model.embed_tokens.dequantize(torch.float32)
    assert rows_of(made.folder)[0]["weight_error"] == pytest.approx(
        float((after - before).norm() / before.norm()), rel=1e-4
    )
    spare = calibration.from_text(
        str(calibration_text), source, num_sequences=16, seq_len=32, seed=0, num_spare=8
    ).spare
    tokens = torch.from_numpy(spare.tokens)
    with torch.no_grad():
        given, wanted = (one.head(one.hidden(tokens, Causal(tokens)))[:, :-1].log_softmax(-1) for one in (model, dense))
        assert torch.allclose(
            model.head(model.norm.weight[None]), F.linear(model.norm(model.norm.weight[None]), after), atol=1e-5
        )
    kl = (wanted.exp() * (wanted - given)).sum(-1).mean()
    assert made.figures["kl_to_dense"].value == pytest.approx(float(kl), rel=1e-3) and kl > 1e-4
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value
    assert made.figures["compression_ratio"].value > 1.2
    must_serve_what_it_computes(made.folder)


def test_head_and_embedding_of_a_tied_model_are_stored_apart_where_both_are_named(family_folder, compress) -> None:
    source = family_folder("llama")
    made = compress(source, {"kind": "gptq", "group_size": 32, "rules": [{"match": "embed_tokens", "bits": 8}]}, **ALL)
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value
    rows = rows_of(made.folder)
    assert [(row["name"], row["kind"], row["bits"]) for row in (rows[0], rows[-1])] == [
        ("model.embed_tokens", "rtn", 8), ("lm_head", "gptq", 4),
    ]  # fmt: skip
    groups = json.loads((made.folder / "config.json").read_text())["quantization_config"]["config_groups"].values()
    assert [(one["targets"], one["weights"]["num_bits"]) for one in groups] == [
        (["Embedding"], 8), (["Linear", "lm_head"], 4),
    ]  # fmt: skip
    model = load(made.folder)
    assert isinstance(model.embed_tokens.table, Dequantizing) and isinstance(model.lm_head, PackedInt)
    must_serve_what_it_computes(made.folder)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_saved_again_read_as_floats_and_compressed_again_it_is_the_same_model(
    family, family_folder, compress, tmp_path
) -> None:
    """Saving keeps every tensor; the dequantized weights, compressed in the same way, give the same codes."""
    made = compress(family_folder(family), INT4 | {"scale": "absmax"}, **BOTH)
    model = load(made.folder)
    save(model, tmp_path / "saved")
    before, after = tensors_of(made.folder), tensors_of(tmp_path / "saved")
    assert before.keys() == after.keys() and all(torch.equal(one, after[name]) for name, one in before.items())
    again = compress(made.folder, INT8, requantize=True, name="again", **BOTH)
    with torch.no_grad():
        one, other = model.embed_tokens(TOKENS), load(again.folder).embed_tokens(TOKENS)
    assert (one - other).norm() <= 0.01 * one.norm()


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ({"kind": "hqq", "group_size": 32}, 0.15),
        ({"kind": "rtn", "group_size": 32, "symmetric": False}, 0.15),
        ({"kind": "nvfp4", "activations": "nvfp4"}, 0.15),
        ({"kind": "mxfp4"}, 0.2),
        ({"kind": "mxfp8"}, 0.05),
        ({"kind": "fp8", "strategy": "tensor"}, 0.05),
    ],
)
def test_every_format_of_compressed_tensors_holds_it(step, error, family_folder, compress, calibration_text) -> None:
    """Never its inputs, which are tokens, where those of the linears are rounded."""
    source = family_folder("qwen2")
    text = {"calibration_text": str(calibration_text)} if step.get("activations") else {}
    made = compress(source, step, **BOTH, **text)
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value
    model, before = load(made.folder), load(source).embedding.detach()
    after = model.embed_tokens.dequantize(torch.float32)
    assert model.embed_tokens.scheme.activations is None
    assert 0.001 < (after - before).norm() / before.norm() < error
    assert torch.equal(model.embed(TOKENS), after[TOKENS])


def test_names_of_other_libraries_choose_it(family_folder, compress) -> None:
    """By its class as llm-compressor writes it, and by name."""
    made = compress(family_folder("qwen2"), INT4, **BOTH)
    config = made.folder / "config.json"
    values, wanted = json.loads(config.read_text()), load(made.folder)(TOKENS)
    group = values["quantization_config"]["config_groups"]["group_0"]
    assert group["targets"] == ["Embedding"] and values["quantization_config"]["ignore"] == ["lm_head"]
    for name in ("re:.*embed_tokens$", "model.embed_tokens"):
        group["targets"] = [name]
        config.write_text(json.dumps(values))
        assert torch.equal(load(made.folder)(TOKENS), wanted)
    group["input_activations"] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    config.write_text(json.dumps(values))
    with pytest.raises(Exception, match="rounds the inputs of the embedding"):
        load(made.folder)


def test_an_interrupted_run_ends_with_the_same_bytes(family_folder, compress, monkeypatch) -> None:
    """The embedding is on disk when the first layer is solved, and is read from there."""
    source, step = family_folder("llama"), {"kind": "gptq", "group_size": 32}
    whole = compress(source, step, **BOTH, name="whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stream.Stream, "_advance", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        compress(source, step, **BOTH, name="resumed")
    with monkeypatch.context() as patch:
        patch.setattr(ends, "quantized_embedding", None)  # is not called again
        resumed = compress(source, step, **BOTH, name="resumed")
    before, after = tensors_of(whole.folder), tensors_of(resumed.folder)
    assert before.keys() == after.keys() and all(torch.equal(one, after[name]) for name, one in before.items())
    assert resumed.figures["kl_to_dense"].value == whole.figures["kl_to_dense"].value
    assert rows_of(resumed.folder) == rows_of(whole.folder)


def test_an_export_keeps_its_codes(family_folder, compress, tmp_path: Path) -> None:
    """q8_0 and q4_0 hold them as they are; llama.cpp, too, has one matrix for a tied head."""
    import gguf

    step = INT4 | {"scale_dtype": "float16", "rules": [{"match": "embed_tokens", "bits": 8}]}
    made = compress(family_folder("llama"), step, engine="llama.cpp", **BOTH)
    written = export(made.folder, tmp_path / "model.gguf")
    assert written.types["token_embd.weight"] == "q8_0" and "output.weight" not in written.types
    assert "15 matrices keep the codes of the folder, without loss" in written.notes
    (tensor,) = (one for one in gguf.GGUFReader(written.path).tensors if one.name == "token_embd.weight")
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    ours = load(made.folder).embed_tokens.dequantize(torch.float32).numpy()
    assert np.abs(values - ours).max() == 0


@pytest.mark.parametrize(
    ("steps", "spec", "what", "fix"),
    [
        ([{"kind": "rtn", "layout": "gptq", "group_size": 32}], {}, "layout gptq cannot store the embedding", "pack-quantized"),
        ([{"kind": "nf4", "block_size": 32}], {}, "layout nf4 cannot store the embedding", "leave it out of targets"),
        ([{"kind": "magnitude"}], {}, "magnitude works on linears alone", "add a quantizer"),
        ([INT4], {"engine": "vllm"}, "a quantized embedding, which was not tried", "engine=any"),
        ([INT4 | {"rules": [{"match": "embed_tokens", "bits": 8}]}], {"engine": "transformers"}, "tied to the head beside", "same bits"),
        ([INT8 | {"activations": "int8_token"}], {"engine": "transformers"}, "tied to the head beside", "activations=none"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_it_is_one_error(steps, spec, what, fix, family_folder, compress) -> None:
    with pytest.raises(SpecError, match=what) as caught:
        compress(family_folder("llama"), *steps, **(BOTH | spec))
    assert fix in caught.value.fix


def test_tensor_parallel_ranks_refuse_it_and_stages_hold_it(family_folder, compress) -> None:
    made = compress(family_folder("llama"), INT4, **BOTH)
    with pytest.raises(SpecError, match="the embedding is quantized, and tensor-parallel ranks") as caught:
        LocalCheckpoint(made.folder, Place(0, 2), Group(Place(0, 2)))
    assert "tensor_parallel_size=1" in caught.value.fix
    ends = [
        LocalCheckpoint(made.folder, place, Group(place)).build() for place in (Place(0, 1, one, 2) for one in (0, 1))
    ]
    whole = load(made.folder)
    x = torch.randn(3, whole.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(ends[0].embed(TOKENS), whole.embed(TOKENS))
        assert torch.equal(ends[1].head(x), whole.head(x))


@pytest.mark.parametrize(
    ("targets", "ignore", "chosen"),
    [
        ((r"\.layers\.",), ("lm_head",), False),
        (("re:.*",), ("lm_head",), False),  # a pattern of linears, too
        (("re:.*", "re:.*embed_tokens$"), ("lm_head",), True),
        ((r"\.layers\.", "Embedding"), ("lm_head",), True),
        ((r"\.layers\.", "(embed_tokens|lm_head)"), (), True),
        ((r"\.layers\.", "Embedding"), ("lm_head", "embed_tokens"), False),
    ],
)
def test_only_a_pattern_of_its_own_chooses_it(targets, ignore, chosen: bool) -> None:
    found = embedding(CONFIG, targets, ignore)
    assert (found is not None) == chosen
    if found is not None:
        assert (found.modules, found.columns) == ((("model.embed_tokens", 256),), 32)


@pytest.mark.slow
def test_the_tied_embedding_of_a_trained_model(shared_data: Path, compress) -> None:
    """One matrix of 8 bits for lookup and head is a quarter smaller than the folder with a float one, and next to as good."""
    source = shared_data / "models" / "reference-29m"
    made = compress(source, INT8 | {"group_size": 128, "layout": "auto", "scale_dtype": "float32"}, **BOTH)
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value
    model, whole = load(made.folder, dtype=torch.float32), load(source, dtype=torch.float32)
    assert isinstance(model, Decoder) and isinstance(model.embed_tokens, QuantizedEmbedding)
    tokens = torch.randint(0, 8192, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, dense = model(tokens), whole(tokens)
        assert (ours - logits_from_rows(made.folder, tokens)).abs().max() <= 1e-5 * dense.abs().max()
    assert 1e-4 < (ours - dense).norm() / dense.norm() < 0.05


def logits_from_rows(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    return loaded(folder, dequantize=True)(tokens).logits


def test_a_plan_of_serving_reads_none_of_an_untied_one(family_folder, compress) -> None:
    """A decode step reads a row a token: the rest of the embedding, as it is stored, does not count."""
    made = compress(family_folder("qwen2"), INT4, **BOTH)
    facts = CheckpointFacts.of(made.folder)
    read = planning._read_bytes(EngineSpec(), facts, "float32")
    assert read == facts.weights_bytes - facts.config.vocab_size * facts.config.hidden_size / 2


def test_a_quantized_teacher_has_the_head_of_its_codes(family_folder, compress) -> None:
    """Losses without logits multiply the values of the codes, of a tied head and of one of its own."""
    for options in (BOTH, ALL):
        made = compress(family_folder("llama"), INT4, **options, name=f"teacher-{len(options)}")
        model = load(made.folder)
        x = torch.randn(3, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            assert torch.allclose(F.linear(model.head_input(x), model.head_weight), model.head(x), atol=1e-5)
