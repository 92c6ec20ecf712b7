"""A compressed head: read by other libraries with hone's logits, to the byte as planned, also where it was tied to the embedding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.run import Run
from hone.compress import calibration, stream
from hone.compress.engine import running
from hone.compress.stage import Compress
from hone.model.context import Causal
from hone.model.decoder import build
from hone.model.hf import load, save
from hone.model.quantized.packed_int import PackedInt
from hone.model.shape import Shape
from tests.compress.conftest import must_serve_what_it_computes
from tests.compress.written.test_export import transformers_logits
from tests.compress.written.test_export_loaders import loaded, logits_from

HEAD = {"targets": (r"\.layers\.", "lm_head"), "ignore": ()}
TOKENS = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
SIZES = {"hidden_size": 256, "intermediate_size": 384}
FORMATS = {
    "gptq int4": ({"kind": "gptq", "group_size": 32}, "compressed_tensors"),
    "int4 with a rule": ({"kind": "rtn", "group_size": 32, "rules": [{"match": "lm_head", "bits": 8}]}, "compressed_tensors"),
    "w8a8": ({"kind": "rtn", "bits": 8, "group_size": 0, "activations": "int8_token"}, "compressed_tensors"),
    "fp8": ({"kind": "fp8", "activations": "none"}, "compressed_tensors"),
    "nf4": ({"kind": "nf4"}, "bitsandbytes"),
    "llm_int8": ({"kind": "llm_int8"}, "bitsandbytes"),
    "pruned": ({"kind": "wanda"}, "transformers"),
}  # fmt: skip
QUICK = ("gptq int4",)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for path in sorted(folder.glob("*.safetensors")) for name, one in load_file(path).items()}


def row_of(folder: Path) -> dict:
    """The head's row, which is the last."""
    return [json.loads(line) for line in (folder / "layers.jsonl").read_text().splitlines()][-1]


@pytest.mark.parametrize("family", ["qwen2", "llama"])  # untied, tied
@pytest.mark.parametrize("form", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in FORMATS])
def test_its_loader_computes_the_same_logits(form: str, family: str, family_folder, compress, calibration_text) -> None:
    step, package = FORMATS[form]
    pytest.importorskip(package)
    source = family_folder(family, **({} if package == "compressed_tensors" else SIZES))
    text = {"calibration_text": str(calibration_text)} if form == "pruned" else {}
    made = compress(source, step, **HEAD, **text)
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value
    assert row_of(made.folder)["name"] == "lm_head"
    stored, given = tensors_of(made.folder), tensors_of(source)
    assert torch.equal(stored["model.embed_tokens.weight"], given["model.embed_tokens.weight"])
    assert any(name.startswith("lm_head.") for name in stored)
    assert json.loads((made.folder / "config.json").read_text())["tie_word_embeddings"] is False
    ours, model = load(made.folder), loaded(made.folder)
    model = model.dequantize(dtype=torch.float32) if package == "bitsandbytes" else model
    x = torch.randn(2, 7, ours.config.hidden_size, generator=torch.Generator().manual_seed(1))
    theirs = logits_from(model)
    with torch.no_grad():
        head, expected = ours.lm_head(x), model.lm_head(x)
        ours, whole = ours(TOKENS), load(source)(TOKENS)
    assert (head - expected).abs().max() <= 1e-5 * expected.abs().max()
    if form == "w8a8":  # an input on the border between two codes falls on either side after sums in another order
        assert (ours - theirs).norm() <= 0.1 * whole.norm()
    else:
        assert (ours - theirs).abs().max() <= 1e-5 * whole.abs().max()
    assert (ours - whole).abs().max() > 1e-3 * whole.abs().max(), "nothing was compressed"


def test_the_head_alone_and_what_it_costs(family_folder, compress, calibration_text: Path) -> None:
    """Its error is that of its outputs on the calibration text, and the check predicts with it."""
    source = family_folder("llama")
    made = compress(source, {"kind": "gptq", "bits": 3, "group_size": 32}, targets=("lm_head",), ignore=())
    model, row = load(made.folder), row_of(made.folder)
    kinds = [name for name, module in model.named_modules() if isinstance(module, PackedInt)]
    assert kinds == ["lm_head"] and row["name"] == "lm_head" and row["bits"] == 3
    samples = calibration.from_text(str(calibration_text), source, num_sequences=16, seq_len=32, seed=0, num_spare=8)
    dense, tokens = load(source), torch.from_numpy(samples.tokens)
    with torch.no_grad():
        x = dense.norm(dense.hidden(tokens, Causal(tokens))).flatten(0, 1).double()
    before, after = dense.embedding.detach().double(), model.lm_head.dequantize(torch.float32).double()
    wanted = (x @ (after - before).T).norm() / (x @ before.T).norm()
    assert row["error"] == pytest.approx(float(wanted), rel=1e-3)
    assert made.figures["kl_to_dense"].value > 1e-4
    params = made.figures["num_params"]
    assert params.value == params.estimate.value == dense.config.num_params + dense.embedding.numel()


def test_an_interrupted_run_ends_with_the_same_bytes(family_folder, compress, monkeypatch) -> None:
    """Stopped before the head, and again before the end, when all layers are read back from their shards."""
    source, step = family_folder("llama"), FORMATS["gptq int4"][0]
    whole = compress(source, step, **HEAD, name="whole")
    done = stream.Stream._compress_layer

    def stop(*args):
        if not isinstance(args[-1], int) or args[-1] == 2:
            raise KeyboardInterrupt
        return done(*args)

    for owner, name in ((stream.Stream, "_compress_layer"), (running, "_finished")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, stop)
            with pytest.raises(KeyboardInterrupt):
                compress(source, step, **HEAD, name="resumed")
    resumed = compress(source, step, **HEAD, name="resumed")
    before, after = tensors_of(whole.folder), tensors_of(resumed.folder)
    assert before.keys() == after.keys() and all(torch.equal(one, after[name]) for name, one in before.items())
    assert resumed.figures["kl_to_dense"].value == whole.figures["kl_to_dense"].value


@pytest.fixture
def padded(tmp_path: Path) -> Path:
    """A model whose vocabulary is a multiple of 32, which the gptq layout needs."""
    shape = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 96}
    save(build(Shape(**shape, tie_embeddings=False).config(320)), tmp_path / "padded")
    return tmp_path / "padded"


def test_the_gptq_layout_says_so_for_gptqmodel_and_vllm(padded: Path, compress) -> None:
    source, step = padded, {"kind": "rtn", "group_size": 32}
    made = compress(source, step | {"layout": "gptq"}, **HEAD)
    assert json.loads((made.folder / "config.json").read_text())["quantization_config"]["lm_head"] is True
    packed = compress(source, step | {"scale_dtype": "float16"}, **HEAD, name="packed")
    with torch.no_grad():
        assert (load(made.folder)(TOKENS) - load(packed.folder)(TOKENS)).abs().max() <= 1e-5


def test_an_allocation_leaves_the_head_its_own_bits(family_folder, compress, calibration_text: Path) -> None:
    made = compress(
        family_folder("llama"),
        {"kind": "rtn", "bits": 6, "group_size": 32},
        allocation={"kind": "kl", "bits_per_weight": 4.0, "bits": (2, 3, 4), "num_sequences": 4},
        calibration_text=str(calibration_text),
        **HEAD,
    )
    rows = [json.loads(line) for line in (made.folder / "layers.jsonl").read_text().splitlines()]
    assert rows[-1]["bits"] == 6 and max(row["bits"] for row in rows[:-1]) <= 4
    estimate = made.figures["model_bytes"].estimate
    assert made.figures["model_bytes"].value <= estimate.value <= made.figures["model_bytes"].value * 1.05


def test_the_server_computes_with_it(family_folder, compress) -> None:
    made = compress(family_folder("llama"), {"kind": "rtn", "group_size": 32}, **HEAD)
    must_serve_what_it_computes(made.folder)


@pytest.mark.parametrize(
    ("steps", "spec", "what", "fix"),
    [
        ([{"kind": "rtn", "layout": "awq", "group_size": 32}], {}, "awq cannot store lm_head", "layout=pack-quantized"),
        ([{"kind": "svd"}], {}, "svd makes factors .* not for lm_head", "ignore=['lm_head']"),
        ([{"kind": "rtn", "group_size": 32}, {"kind": "loftq", "rank": 2}], {}, "loftq makes factors", "ignore"),
        ([{"kind": "rtn", "group_size": 32, "layout": "gptq"}], {"engine": "transformers"}, "lm_head in the layout gptq", "pack"),
        ([{"kind": "nf4", "block_size": 32}], {"engine": "vllm"}, "a quantized lm_head, which was not tried", "engine=any"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_a_head_is_one_error(steps, spec, what, fix, padded: Path, compress) -> None:
    with pytest.raises(SpecError, match=what) as caught:
        compress(padded, *steps, **(HEAD | spec))
    assert fix in caught.value.fix


@pytest.mark.slow
def test_the_tied_head_of_a_trained_model(shared_data: Path, tmp_path: Path) -> None:
    """Its bytes are those planned, and transformers reads the folder with hone's logits."""
    pytest.importorskip("compressed_tensors")
    source = shared_data / "models" / "reference-29m"
    spec = Compress.read({"steps": [{"kind": "rtn", "rules": [{"match": "re:.*down_proj", "bits": 8}]}], **HEAD})
    made = spec.make(tmp_path / "small", {"model": Artifact.read(source)}, Run(quiet=True))
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value
    tokens = torch.randint(0, 8192, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, whole = load(made.folder, dtype=torch.float32)(tokens), load(source, dtype=torch.float32)(tokens)
    assert (ours - transformers_logits(made.folder, tokens)).abs().max() <= 1e-5 * whole.abs().max()
    assert 1e-3 < (ours - whole).abs().max() / whole.abs().max() < 0.5
