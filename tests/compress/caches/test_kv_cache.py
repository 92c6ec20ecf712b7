"""Scales of the KV cache: those of transformers' own keys and values, the logits of its loader, and what checks and engines do with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import hone
from hone.base.artifact import Artifact
from hone.base.errors import ArtifactError, SpecError
from hone.base.run import Run
from hone.compress.caches.kv_cache import KVCache
from hone.compress.caches.ranges import observe
from hone.compress.calibration import Calibration, from_text
from hone.compress.capture import Flow
from hone.compress.stage import Compress
from hone.eval.score import score
from hone.model.decoder import build
from hone.model.facts import CheckpointFacts
from hone.model.hf import Checkpoint, load, save
from hone.model.incremental import generate
from hone.model.quantized.config import read, to_json
from hone.model.quantized.dense import dequantized
from hone.model.quantized.kv_cache import KVRounding
from hone.model.quantized.scheme import CacheScheme, Quantization
from hone.model.shape import Shape
from hone.serve.planning import sparse_saving
from hone.serve.spec import EngineSpec

TOKENS = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
CASES = [
    pytest.param({}, "llama"),
    pytest.param({"number": "int8", "per": "head"}, "qwen3"),  # norms on keys
    pytest.param({"per": "head"}, "phi3", marks=pytest.mark.slow),  # heads rotated in part, one qkv module
    pytest.param({"number": "int8", "observer": "mse"}, "llama", marks=pytest.mark.slow),
]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.fixture
def made(compress, calibration_text: Path):
    """made(model folder, *steps, **spec) -> the folder of the compressed model; calibrated."""

    def make(model: Path, *steps: dict, **spec) -> Artifact:
        with torch.enable_grad():
            return compress(model, *steps, calibration_text=str(calibration_text), **spec)

    return make


@torch.no_grad()
@pytest.mark.parametrize(("options", "family"), CASES)
def test_transformers_rounds_its_cache_to_the_same_logits(options: dict, family: str, family_folder, made) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    source = family_folder(family)
    artifact = made(source, {"kind": "kv_cache", **options})
    assert artifact.figures["model_bytes"].value == artifact.figures["model_bytes"].estimate.value
    ours, whole = load(artifact.folder)(TOKENS), load(source)(TOKENS)
    model = transformers.AutoModelForCausalLM.from_pretrained(artifact.folder, dtype=torch.float32)
    assert (ours - model(TOKENS).logits).abs().max() <= 1e-5 * whole.abs().max()
    assert (ours - whole).abs().max() > 1e-3 * whole.abs().max(), "nothing was rounded"


@torch.no_grad()
@pytest.mark.parametrize("per", ["tensor", "head"])
def test_scales_are_those_of_the_keys_and_values_that_transformers_caches(
    per: str, family_folder, made, calibration_text: Path
) -> None:
    """Of the first layer, whose inputs nothing has changed: the largest magnitude over 448, after the rotation."""
    transformers = pytest.importorskip("transformers")
    source = family_folder("llama")
    stored = tensors_of(made(source, {"kind": "kv_cache", "per": per}).folder)
    tokens = torch.from_numpy(from_text(calibration_text, source, num_sequences=16, seq_len=32, seed=0).tokens)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    cache = model(tokens, use_cache=True).past_key_values
    for name, heads in (("k", cache.layers[0].keys), ("v", cache.layers[0].values)):  # [B, KV, S, Dh]
        largest = heads.abs().amax((0, 2, 3)) if per == "head" else heads.abs().amax().view(1)
        scale = stored[f"model.layers.0.self_attn.{name}_scale"]
        assert scale.shape == ((2, 1, 1) if per == "head" else (1,)) and scale.dtype == torch.float32
        torch.testing.assert_close(scale.flatten(), largest / 448, rtol=1e-5, atol=0)


def test_rounding_is_that_of_the_codes_one_by_one() -> None:
    k, v = torch.randn(2, 3, 2, 8) * 3, torch.randn(2, 3, 2, 8)
    for number, least, most in (("e4m3", -448.0, 448.0), ("int", -128.0, 127.0)):
        rounding = KVRounding(CacheScheme(number, "head"), 2)
        rounding.k_scale, rounding.v_scale = (
            torch.tensor([0.004, 0.02]).view(2, 1, 1),
            torch.tensor([0.1, 0.2]).view(2, 1, 1),
        )
        for given, found, scale in zip((k, v), rounding(k, v), (rounding.k_scale, rounding.v_scale), strict=True):
            for head in range(2):
                for before, after in zip(given[:, :, head].flatten(), found[:, :, head].flatten()):
                    code = (before / scale[head, 0, 0]).clamp(least, most)
                    code = code.round() if number == "int" else code.to(torch.float8_e4m3fn).float()
                    assert after == code * scale[head, 0, 0]
    half = rounding.to(torch.bfloat16)(k.bfloat16(), v.bfloat16())
    assert half[0].dtype == torch.bfloat16


@torch.no_grad()
def test_padding_is_not_observed() -> None:
    model = build(Shape(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=32).config(20))
    ids = np.array([[0, 0, 0, 1, 1, -1], [0, 0, 0, 0, -1, -1]])
    tokens = np.arange(12).reshape(2, 6) % 20
    found = {}
    for name, content in (("one", tokens), ("other", np.where(ids < 0, 19, tokens))):
        flow = Flow(Calibration(content, ids, {}), 1, "cpu", torch.float32)
        flow.embed(model)
        found[name] = observe(model.layers[0], (2, 16), flow, {"extremes", "histogram"}, by_head=True)
    assert model.layers[0].mixer.kv_rounding is None
    for one, other in zip(*found.values(), strict=True):
        assert len(one) == 2 and [int(part["histogram"].sum()) for part in one] == [9 * 16] * 2
        assert all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)


def test_the_check_computes_with_the_rounded_cache(family_folder, made, calibration_text: Path) -> None:
    """Beside weights and inputs of 8 bits; its figure is that of the written folder, scored whole."""
    folder = family_folder("llama")
    steps = ({"kind": "rtn", "bits": 8, "group_size": 0, "activations": "int8_token"}, {"kind": "kv_cache"})
    artifact = made(folder, *steps, check_sequences=5)
    without = made(folder, steps[0], check_sequences=5, name="without")
    tokens = from_text(calibration_text, folder, num_sequences=16, seq_len=32, seed=0, num_spare=5).spare.tokens
    starts = np.arange(0, tokens.size + 1, 32)
    found = score(load(artifact.folder), tokens.ravel(), starts, window=32, reference=load(folder))
    figure = artifact.figures["kl_to_dense"].value
    assert figure == pytest.approx(found.mean_kl, rel=1e-3)
    assert figure != pytest.approx(without.figures["kl_to_dense"].value, rel=1e-2)
    assert [row["kind"] for row in artifact.techniques] == ["rtn", "kv_cache"]
    assert "keys and values" in artifact.figures["time_s"].estimate.formula


def test_later_layers_see_the_rounded_cache(family_folder, made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coarse cache (a scale a thousand times too large) in the first layer changes the second one's scales."""
    folder = family_folder("llama")
    plain = tensors_of(made(folder, {"kind": "kv_cache"}).folder)
    scale = KVCache._scale
    monkeypatch.setattr(KVCache, "_scale", lambda self, *given: scale(self, *given) * (1000 if given[1] == 0 else 1))
    coarse = tensors_of(made(folder, {"kind": "kv_cache"}, name="coarse").folder)
    assert coarse["model.layers.1.self_attn.v_scale"] != plain["model.layers.1.self_attn.v_scale"]


@torch.no_grad()
def test_saved_again_it_has_its_scales_and_dequantized_it_has_none(family_folder, made, tmp_path: Path) -> None:
    steps = ({"kind": "kv_cache", "per": "head"}, {"kind": "fp8"})  # the order of the two does not matter
    folder = made(family_folder("llama"), *steps).folder
    save(load(folder), tmp_path / "again")
    before, after = tensors_of(folder), tensors_of(tmp_path / "again")
    assert before.keys() == after.keys() and len([name for name in before if name.endswith("k_scale")]) == 2
    assert all(torch.equal(before[name].float(), after[name].float()) for name in before)
    assert torch.equal(load(folder)(TOKENS), load(tmp_path / "again")(TOKENS))
    half = load(folder, dtype=torch.bfloat16)
    assert half.layers[0].mixer.kv_rounding.k_scale.dtype == torch.float32, "scales stay as they are stored"
    dense = dequantized(Checkpoint(folder))
    assert not [name for name in dense.names() if name.endswith(("k_scale", "v_scale"))]
    assert dense.build().layers[0].mixer.kv_rounding is None


@pytest.mark.slow
def test_compressed_again_it_loses_its_scales_unless_they_are_asked_for(family_folder, made) -> None:
    folder = made(family_folder("llama"), {"kind": "kv_cache"}).folder
    with pytest.raises(SpecError, match="quantized already"):
        made(folder, {"kind": "rtn", "bits": 8, "group_size": 0}, name="refused")
    for name, steps in {"without": [], "with": [{"kind": "kv_cache", "per": "head"}]}.items():
        again = made(folder, {"kind": "rtn", "bits": 8, "group_size": 0}, *steps, requantize=True, name=name)
        assert again.figures["model_bytes"].value == again.figures["model_bytes"].estimate.value
        assert ("model.layers.0.self_attn.k_scale" in tensors_of(again.folder)) == bool(steps)
        load(again.folder)


def test_an_export_says_that_it_leaves_the_scales_out(family_folder, made, tmp_path: Path) -> None:
    source = family_folder("llama")
    exported = hone.export(made(source, {"kind": "kv_cache"}).folder, tmp_path / "small.gguf")
    assert exported.notes == ["the scales of the KV cache are left out: GGUF has no place for them"]
    assert exported.types == hone.export(source, tmp_path / "dense.gguf").types, "its weights are not quantized"


def test_a_folder_with_scales_alone_counts_as_dense_in_memory(family_folder, made) -> None:
    source = family_folder("llama")
    facts, whole = (CheckpointFacts.of(one) for one in (made(source, {"kind": "kv_cache"}).folder, source))
    assert facts.loaded_bytes("bfloat16") == whole.loaded_bytes("bfloat16") == 2 * whole.config.num_params
    sparse = EngineSpec(sparsity="2:4")
    assert sparse_saving(sparse, facts, "bfloat16") == sparse_saving(sparse, whole, "bfloat16") > 0
    packed = CheckpointFacts.of(made(source, {"kind": "fp8"}, {"kind": "kv_cache"}, name="packed").folder)
    assert packed.loaded_bytes("bfloat16") == packed.weights_bytes


@torch.no_grad()
def test_decoding_computes_what_a_whole_pass_does(family_folder, made) -> None:
    model = load(made(family_folder("llama"), {"kind": "kv_cache", "number": "int8"}).folder)
    tokens = generate(model, TOKENS[:, :8], 8)
    for place in range(8, 16):
        assert torch.equal(model(tokens[:, :place])[:, -1].argmax(-1), tokens[:, place])


def test_an_engine_serves_from_the_scales_and_says_so(family_folder, made) -> None:
    source = family_folder("llama")
    folder = made(source, {"kind": "kv_cache"}).folder
    rounded, plain = hone.Engine(folder), hone.Engine(source)
    assert "keys and values are float8_e4m3fn with the folder's scales for each tensor" in rounded.sizes
    assert "scales" not in plain.sizes
    params = hone.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    prompts = TOKENS[:, :12].tolist()
    for engine, model in ((rounded, load(folder)), (plain, load(source))):
        wanted = generate(model, TOKENS[:, :12], 8)[:, 12:].tolist()
        assert [one.tokens for one in engine.generate(prompts, params)] == wanted
    given = load(folder)
    hone.Engine(given)
    assert given.layers[0].mixer.kv_rounding is not None, "a given model is not changed"


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"num_bits": 4}, "kv_cache_scheme.num_bits = 4"),
        ({"symmetric": False}, "kv_cache_scheme.symmetric = False"),
        ({"strategy": "token"}, "kv_cache_scheme.strategy = 'token'"),
        ({"dynamic": True}, "kv_cache_scheme.dynamic = True"),
        ({"type": "nf"}, "kv_cache_scheme.type = 'nf'"),
    ],
)
def test_a_scheme_that_is_not_computed_is_named(values: dict, match: str) -> None:
    block = to_json(Quantization((), kv_cache=CacheScheme("int", "head")))
    assert read(block).kv_cache == CacheScheme("int", "head")
    with pytest.raises(ArtifactError, match=match):
        read(block | {"kv_cache_scheme": block["kv_cache_scheme"] | values})
    with pytest.raises(ArtifactError, match="kv_cache_scheme"):
        read(block | {"kv_cache_scheme": 8})


def test_a_folder_without_its_scales_is_an_error(family_folder, made, tmp_path: Path) -> None:
    source = family_folder("llama")
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    config = json.loads((made(source, {"kind": "kv_cache"}).folder / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=r"self_attn\.[kv]_scale"):
        load(broken)


@pytest.mark.parametrize("kind", ["mla", "shared_kv", "linformer"])
def test_scales_of_another_mixer_are_one_clear_error(kind: str, family_folder, made, tmp_path: Path) -> None:
    shape = Shape(
        hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=32, mixers=["attention", kind]
    )
    save(build(shape.config(300)), tmp_path / "other", tokenizer_from=family_folder("llama"))
    path = tmp_path / "other" / "config.json"
    scheme = to_json(Quantization((), kv_cache=CacheScheme()))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": scheme}))
    with pytest.raises(ArtifactError, match=f"kv_cache_scheme, and a layer's mixer is {kind}"):
        load(tmp_path / "other")
    if kind != "linformer":
        with pytest.raises(ArtifactError, match=f"mixer is {kind}"):
            dequantized(Checkpoint(tmp_path / "other"))


def test_what_cannot_be_calibrated_is_one_clear_error(family_folder, made, compress, tmp_path: Path) -> None:
    folder = family_folder("llama")
    with pytest.raises(SpecError, match="kv_cache needs calibration inputs"):
        compress(folder, {"kind": "kv_cache"})
    with pytest.raises(SpecError, match="kv_cache is given twice"):
        Compress.read({"steps": [{"kind": "kv_cache"}, {"kind": "kv_cache", "per": "head"}]})
    with pytest.raises(SpecError, match="the weights in gptq"):
        made(folder, {"kind": "rtn", "layout": "gptq", "group_size": 32}, {"kind": "kv_cache"})
    latent = Shape(hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=32, mixers=["mla"])
    save(build(latent.config(300)), tmp_path / "latent", tokenizer_from=folder)
    with pytest.raises(SpecError, match="layer 0 is mla"):
        made(tmp_path / "latent", {"kind": "kv_cache"})


def _scales(step: KVCache, layer: torch.nn.Module, flow: Flow, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The scales of layer 0, observed on the inputs in `flow`."""
    mixer = checkpoint.config.layers[0].mixer
    by_head = step.cache_scheme.per == "head"
    ranges = observe(layer, (mixer.num_kv_heads, mixer.head_dim), flow, step.cache_statistics, by_head=by_head)
    return step.scales(ranges, checkpoint.config, 0, checkpoint.dtype, flow.dtype)


def test_keys_that_are_not_finite_are_named(family_folder, calibration_text: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint(family_folder("llama"))
    layer = checkpoint.build_layer(0)
    with torch.no_grad():
        layer.mixer.qkv.weight[-1] = float("inf")
    flow = Flow(
        from_text(calibration_text, checkpoint.folder, num_sequences=2, seq_len=8, seed=0), 2, "cpu", torch.float32
    )
    flow.embed(checkpoint.build_ends())
    for observer in ("min_max", "percentile"):
        step = KVCache.read({"kind": "kv_cache", "observer": {"kind": observer}})
        with pytest.raises(ArtifactError, match="keys or values of layer 0 are not all finite in float32"):
            _scales(step, layer, flow, checkpoint)


def test_a_cache_of_zeros_has_a_scale(family_folder, calibration_text: Path) -> None:
    checkpoint = Checkpoint(family_folder("llama"))
    layer = checkpoint.build_layer(0)
    with torch.no_grad():
        layer.mixer.qkv.weight.zero_()
    flow = Flow(
        from_text(calibration_text, checkpoint.folder, num_sequences=2, seq_len=8, seed=0), 2, "cpu", torch.float32
    )
    flow.embed(checkpoint.build_ends())
    found = _scales(KVCache(kind="kv_cache"), layer, flow, checkpoint)
    assert all(float(scale) == pytest.approx(1 / 448) for scale in found.values())


def test_int8_says_who_reads_it(family_folder, made, capsys, calibration_text: Path, tmp_path: Path) -> None:
    spec = {"steps": [{"kind": "kv_cache", "number": "int8"}], "num_sequences": 4, "seq_len": 32}
    made = Compress.read(spec | {"calibration_text": str(calibration_text)}).make(
        tmp_path / "made", {"model": Artifact.read(family_folder("llama"))}, Run()
    )
    assert "vLLM reads scales of fp8 caches alone" in made.techniques[0]["note"]
