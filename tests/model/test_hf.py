"""Folders in and out: shards, dtypes, lazy layers, and one clear error for every way in which a folder can be wrong."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hone.base.errors import ArtifactError, HoneError, SpecError
from hone.model import hf
from hone.model.context import Causal
from hone.model.decoder import build
from hone.model.families.config_json import from_hf
from hone.model.quantized import config as config_of
from hone.model.quantized.layouts import layout_of
from hone.model.quantized.scheme import Quantization, Scheme, Stored
from hone.model.shape import Shape
from hone.model.shards import INDEX, SINGLE
from hone.model.weights.tensors import layer_modules
from hone.model.weights.values import finite

TOKENS = torch.arange(24).view(2, 12) % 60


def model(**changes):
    shape = Shape(hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=48)
    return build(shape.model_copy(update=changes).config(64, bos=1, eos=(2, 3)), seed=5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hf.save(model(tie_embeddings=False), tmp_path / "model")
    return tmp_path / "model"


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_save_and_load_give_the_same_weights(family: str, tmp_path: Path) -> None:
    one = model(family=family, tie_embeddings=family == "qwen3")
    hf.save(one, tmp_path)
    two = hf.load(tmp_path)
    assert two.config == one.config
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, two.get_parameter(name)), name


def test_weights_are_as_readable_as_the_rest(folder: Path) -> None:
    assert (folder / SINGLE).stat().st_mode == (folder / "config.json").stat().st_mode


def test_a_full_disk_is_an_oserror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("hone.model.shards.save_file", full)
    with pytest.raises(OSError) as caught:
        hf.save(model(), tmp_path)
    assert caught.value.errno == errno.ENOSPC and str(tmp_path) in caught.value.filename


@torch.no_grad()
def test_shards_hold_at_most_what_was_asked_and_load_in_transformers(tmp_path: Path) -> None:
    import transformers

    one = model(tie_embeddings=False)
    hf.save(one, tmp_path, max_shard_bytes=20_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and not (tmp_path / SINGLE).exists() and not list(tmp_path.glob("*.shard"))
    sizes = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in files]
    assert max(sizes) <= 20_000
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(sizes) == one.config.num_params * 4
    assert torch.equal(hf.load(tmp_path)(TOKENS), one(TOKENS))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(theirs(TOKENS).logits, one(TOKENS), atol=1e-6, rtol=0)
    hf.save(one, tmp_path)  # one file again: the index must not point at the old shards
    assert not (tmp_path / INDEX).exists()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    one = model()
    hf.save(one, tmp_path, dtype=dtype)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == str(dtype).removeprefix("torch.")
    stored = hf.load(tmp_path)
    assert {parameter.dtype for parameter in stored.parameters()} == {dtype}
    wide = hf.load(tmp_path, dtype=torch.float32)
    assert torch.equal(wide.embedding, one.embedding.to(dtype).float())


@torch.no_grad()
def test_a_model_can_be_saved_over_the_folder_it_came_from(folder: Path) -> None:
    one = hf.load(folder)
    before = one(TOKENS)
    one.embedding.mul_(2)
    hf.save(one, folder)
    one.embedding.div_(2)
    assert torch.equal(one(TOKENS), before)
    assert torch.equal(hf.load(folder).embedding, 2 * one.embedding)


@torch.no_grad()
def test_layer_by_layer_equals_the_whole_model(folder: Path) -> None:
    whole, checkpoint = hf.load(folder), hf.Checkpoint(folder)
    ends = checkpoint.build_ends()
    assert len(ends.layers) == 0
    x, context = ends.embed(TOKENS), Causal(TOKENS)
    for index in range(checkpoint.config.num_layers):
        x = checkpoint.build_layer(index)(x, context)
    assert torch.equal(ends.head(x), whole(TOKENS))


def test_layer_modules_name_every_matrix_and_its_rows(folder: Path) -> None:
    checkpoint = hf.Checkpoint(folder)
    layer = checkpoint.build_layer(1)
    modules = list(layer_modules(checkpoint.config, 1))
    assert [module.name.removeprefix("model.layers.1.") for module in modules] == [
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    ]  # fmt: skip
    for module in modules:
        fused = layer.get_submodule(module.path).weight[module.rows]
        assert torch.equal(fused, checkpoint.tensor(f"{module.name}.weight"))


def test_parts_and_load_are_inverse() -> None:
    linear = model(family="qwen2").layers[0].mixer.qkv
    with torch.no_grad():
        linear.bias.normal_()
    before = linear.weight.clone(), linear.bias.clone()
    linear.load(linear.parts([32, 16, 16]))
    assert torch.equal(linear.weight, before[0]) and torch.equal(linear.bias, before[1])
    with torch.device("meta"):
        empty = type(linear)(32, 64, True)
    empty.load(linear.parts([64]))
    assert torch.equal(empty.weight, linear.weight)


def edit(folder: Path, change) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE)


V_PROJ = "model.layers.1.self_attn.v_proj.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop(V_PROJ), V_PROJ),
        (
            lambda tensors: tensors.update({V_PROJ: torch.zeros(8, 32)}),
            r"v_proj.weight has shape \[8, 32\].*\[16, 32\]",
        ),
        (lambda tensors: tensors.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(1)}), "layers.9"),
        (lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}), "q_proj.bias"),
        (lambda tensors: tensors.pop("lm_head.weight"), "lm_head.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, named: str, folder: Path) -> None:
    edit(folder, change)
    with pytest.raises(ArtifactError, match=named) as error:
        hf.load(folder)
    assert error.value.fix and str(folder) in error.value.what


def test_tied_checkpoints_may_store_their_head_and_rotary_buffers(tmp_path: Path) -> None:
    hf.save(model(), tmp_path)
    edit(
        tmp_path,
        lambda tensors: tensors.update(
            {
                "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
            }
        ),
    )
    assert hf.load(tmp_path).lm_head is None


@pytest.mark.parametrize("keep", [0, 5, 100, -7])
def test_truncated_weights_are_corrupt(keep: int, folder: Path) -> None:
    raw = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(raw[:keep])
    with pytest.raises(ArtifactError, match=SINGLE):
        hf.load(folder)


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no folder .*nowhere"):
        hf.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match=r"config\.json"):
        hf.load(tmp_path / "empty")
    (folder / SINGLE).unlink()
    with pytest.raises(ArtifactError, match="neither"):
        hf.load(folder)
    hf.save(model(), folder, max_shard_bytes=20_000)
    next(folder.glob("model-00002*")).unlink()
    with pytest.raises(ArtifactError, match="model-00002-of"):
        hf.load(folder)
    (folder / INDEX).write_text("{}")
    with pytest.raises(ArtifactError, match="weight_map"):
        hf.load(folder)
    (folder / "config.json").write_text("{not json")
    with pytest.raises(ArtifactError, match="corrupt"):
        hf.load(folder)


def test_tokenizer_files_come_along(tiny_llama: Path, tmp_path: Path) -> None:
    hf.save(hf.load(tiny_llama), tmp_path, tokenizer_from=tiny_llama)
    assert (tmp_path / "tokenizer.json").read_bytes() == (tiny_llama / "tokenizer.json").read_bytes()
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        hf.save(hf.load(tiny_llama), tmp_path / "other", tokenizer_from=tmp_path / "empty")


GOOD = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 4,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention"],
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": [2],
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
}
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.just(2.5), st.text(max_size=3), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["factor", "rope_type", "x", "rope_theta"]), st.integers(-1, 2), max_size=2),
)  # fmt: skip


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(sorted(GOOD)), JUNK, min_size=1, max_size=3))
def test_any_broken_config_is_a_spec_error(changes: dict) -> None:
    try:
        from_hf({**GOOD, **changes})
    except HoneError as error:
        assert isinstance(error, SpecError) and error.fix


def test_quantization_of_another_kind_is_refused(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    for block in ({"quant_method": "hqq"}, {"quant_method": "aqlm"}):
        (folder / "config.json").write_text(json.dumps({**values, "quantization_config": block}))
        with pytest.raises(ArtifactError, match=block["quant_method"]):
            hf.load(folder)


def quantize(folder: Path, scheme: Scheme) -> dict[str, torch.Tensor]:
    """Writes the folder's layers as codes of 4 bits or less in groups of 16; returns its tensors."""
    tensors = load_file(folder / SINGLE)
    for index in range(3):
        for module in layer_modules(hf.Checkpoint(folder).config, index):
            weight = tensors.pop(f"{module.name}.weight")
            scales = weight.view(len(weight), -1, 16).abs().amax(-1) / 7
            codes = (weight / scales.repeat_interleave(16, 1)).round().to(torch.int8)
            for suffix, tensor in layout_of(scheme).write(Stored(scheme, codes, scales.half())).items():
                tensors[f"{module.name}.{suffix}"] = tensor
    save_file(tensors, folder / SINGLE)
    values = json.loads((folder / "config.json").read_text())
    block = config_of.to_json(Quantization(((("Linear",), scheme),), ignore=("lm_head",)))
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": block}))
    return tensors


@torch.no_grad()
def test_a_quantized_model_is_saved_as_it_was_loaded(folder: Path, tmp_path: Path) -> None:
    tensors = quantize(folder, Scheme(bits=4, group_size=16))
    one = hf.load(folder)
    hf.save(one, tmp_path / "again", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "again" / SINGLE)
    assert set(stored) == set(tensors)
    for name, tensor in tensors.items():
        dense = name.endswith(("norm.weight", "layernorm.weight", "embed_tokens.weight", "lm_head.weight"))
        assert torch.equal(stored[name], tensor.bfloat16() if dense else tensor), name
    two = hf.load(tmp_path / "again", dtype=torch.float32)
    torch.testing.assert_close(two(TOKENS), one(TOKENS), atol=0.02, rtol=0)


def test_a_copy_of_the_folder_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    assert torch.equal(hf.load(tmp_path / "copy")(TOKENS), hf.load(folder)(TOKENS))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn])
def test_weights_that_are_no_floats_are_refused_not_cast(folder, dtype):
    path = folder / SINGLE
    tensors = load_file(path)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=r"q_proj\.weight is .* a weight must be a float"):
        hf.load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.self_attn.v_proj.weight", "model.norm.weight"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_named(folder, name, value, dtype):
    path = folder / SINGLE
    tensors = load_file(path)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(
        ArtifactError, match=rf"{name} has values that are not finite .*\nfix: use a checkpoint without"
    ):
        hf.load(folder, dtype=dtype)


def test_weights_beyond_the_format_asked_for_are_named(folder):
    path = folder / SINGLE
    tensors = load_file(path)
    tensors["model.norm.weight"][0] = 1e5
    save_file(tensors, path, metadata={"format": "pt"})
    hf.load(folder, dtype=torch.bfloat16)
    with pytest.raises(ArtifactError, match=r"norm\.weight has values that float16 cannot hold"):
        hf.load(folder, dtype=torch.float16)


def test_finite_sees_every_place_of_any_layout():
    for count in (1, 7, 33, 5000):
        whole = torch.randn(count, 3)
        assert finite(whole) and finite(whole.T) and finite(whole[:0])
        for value in (float("nan"), float("inf"), -float("inf")):
            broken = whole.clone()
            broken[count // 2, 1] = value
            assert not finite(broken) and not finite(broken.T) and not finite(broken.half())


@pytest.mark.parametrize("scheme", [Scheme(4, 16), Scheme(8, 16, "int-quantized")])
def test_a_quantized_folder_holds_integers_where_codes_are_and_floats_elsewhere(folder, scheme):
    tensors = quantize(folder, scheme)
    hf.load(folder)
    layer = "model.layers.0"
    codes = f"{layer}.mlp.down_proj.{'weight' if scheme.bits == 8 else 'weight_packed'}"
    wrong = {
        codes: (torch.float32, "codes of a quantized weight are integers"),
        f"{layer}.mlp.down_proj.weight_scale": (torch.int8, "a weight must be a float"),
        f"{layer}.input_layernorm.weight": (torch.int32, "a weight must be a float"),
        "model.embed_tokens.weight": (torch.int8, "a weight must be a float"),
    }
    for name, (dtype, words) in wrong.items():
        save_file({**tensors, name: tensors[name].to(dtype)}, folder / SINGLE)
        kind = str(dtype).removeprefix("torch.")
        with pytest.raises(ArtifactError, match=rf"{name} is {kind}, but {words}"):
            hf.load(folder)
    scales = f"{layer}.self_attn.q_proj.weight_scale"
    save_file({**tensors, scales: tensors[scales] * float("inf")}, folder / SINGLE)
    with pytest.raises(ArtifactError, match=f"{scales} has values that are not finite"):
        hf.load(folder)
