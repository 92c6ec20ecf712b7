"""Float formats and rounded inputs from end to end: the folder against transformers with compressed-tensors, scales, plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hone.base.errors import SpecError
from hone.compress import QUANTIZERS
from hone.compress.capture import Flow
from hone.compress.matrix import Matrix
from hone.compress.quantizers.microscaling import MXFP4, MXFP8
from hone.compress.quantizers.nvfp4 import NVFP4
from hone.model.hf import load, save
from hone.model.quantized.rounded_inputs import RoundedInputs
from hone.model.quantized.scheme import Scheme
from hone.ops.rounding import float_grid

STEPS = {
    "nvfp4": {"kind": "nvfp4"},
    "nvfp4 a4": {"kind": "nvfp4", "activations": "nvfp4"},
    "mxfp4": {"kind": "mxfp4"},
    "mxfp4 a4": {"kind": "mxfp4", "activations": "mxfp4"},
    "mxfp8": {"kind": "mxfp8"},
    "mxfp8 a8": {"kind": "mxfp8", "activations": "mxfp8"},
    "w8a8 token": {"kind": "rtn", "bits": 8, "group_size": 0, "activations": "int8_token"},
    "w8a8 tensor": {"kind": "rtn", "bits": 8, "group_size": 0, "activations": "int8_tensor", "observer": "percentile"},
    "w8a8 asymmetric": {"kind": "rtn", "bits": 8, "group_size": 0, "activations": "int8_tensor_asymmetric"},
    "w8a8 blocks": {"kind": "block_int8", "block_size": 32, "activations": "int8_token"},
    "w4a4": {"kind": "gptq", "bits": 4, "group_size": 0, "activations": "int4_token_asymmetric"},
    "w4a8": {"kind": "gptq", "bits": 4, "group_size": 32, "activations": "int8_token"},
}
FLOATS = [name for name in STEPS if "fp" in name]
TOKENS = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def made(compress, family_folder, calibration_text: Path):
    """made(name): the folder of a small Llama compressed with STEPS[name], calibrated."""

    def make(name: str, **spec):
        return compress(family_folder("llama"), STEPS[name], calibration_text=str(calibration_text), **spec)

    return make


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for path in sorted(folder.glob("*.safetensors")) for name, one in load_file(path).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_transformers_computes_every_linear_as_hone_does(name: str, made, tmp_path: Path) -> None:
    import transformers

    pytest.importorskip("compressed_tensors")
    artifact = made(name)
    assert artifact.figures["model_bytes"].value == artifact.figures["model_bytes"].estimate.value
    dtype = (
        torch.bfloat16 if name in FLOATS else torch.float32
    )  # compressed-tensors gives 4-bit floats in bfloat16 alone
    theirs = transformers.AutoModelForCausalLM.from_pretrained(artifact.folder, dtype=dtype)
    with torch.no_grad():
        theirs(TOKENS)  # the first pass decompresses
    for module in theirs.modules():
        module._apply(
            torch.Tensor.float, recurse=False
        )  # the weights stay those of bfloat16, inputs are rounded in float32
    ours = load(artifact.folder, dtype=torch.float32)
    for index, layer in enumerate(ours.layers):
        attention, mlp = theirs.model.layers[index].self_attn, theirs.model.layers[index].mlp
        pairs = {
            layer.mixer.qkv: (attention.q_proj, attention.k_proj, attention.v_proj),
            layer.mixer.out: (attention.o_proj,),
            layer.feed_forward.gate_up: (mlp.gate_proj, mlp.up_proj),
            layer.feed_forward.down: (mlp.down_proj,),
        }
        for linear, parts in pairs.items():
            x = torch.randn(2, 7, linear.in_features, generator=torch.Generator().manual_seed(index))
            with torch.no_grad():
                expected = torch.cat([part(x) for part in parts], -1)
                found = linear(x)
            lost = (found - expected).abs().max() / expected.abs().max()
            assert lost <= (0.005 if dtype == torch.bfloat16 else 1e-5), (name, linear)
    with torch.no_grad():
        logits, whole = ours(TOKENS), theirs(TOKENS).logits
    # A value on the border between two codes may fall on either side after sums in another order; with 4-bit inputs that is
    # a large change, and compressed-tensors' weights are rounded to bfloat16.
    assert name.endswith("a4") or (logits - whole).norm() <= 0.1 * whole.norm()
    save(load(artifact.folder), tmp_path / "again")
    before, after = tensors(artifact.folder), tensors(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(
        one.dtype == after[key].dtype and torch.equal(one.view(torch.uint8), after[key].view(torch.uint8))
        for key, one in before.items()
    )


def test_projections_of_one_matrix_share_scales_of_the_whole(made) -> None:
    found = tensors(made("nvfp4 a4").folder)
    names = [f"model.layers.0.self_attn.{one}_proj" for one in "qkv"]
    for suffix in ("weight_global_scale", "input_global_scale"):
        values = {float(found[f"{name}.{suffix}"]) for name in names}
        assert len(values) == 1, suffix
        assert found[f"{names[0]}.{suffix}"].dtype == torch.float32
    assert found[f"{names[0]}.weight_scale"].dtype == torch.float8_e4m3fn
    assert {float(found[f"{name}.input_global_scale"]) for name in names} != {
        float(found["model.layers.0.mlp.down_proj.input_global_scale"])
    }


def test_scales_of_inputs_are_those_of_the_calibration(made, family_folder, calibration_text: Path) -> None:
    """W8A8 tensor: the first layer's inputs are those of the dense model, the second's of the compressed first layer."""
    from hone.compress import calibration

    folder = family_folder("llama")
    step = {**STEPS["w8a8 tensor"], "observer": "min_max"}
    STEPS["here"] = step
    artifact = made("here")
    del STEPS["here"]
    found = tensors(artifact.folder)
    samples = calibration.from_text(calibration_text, folder, num_sequences=16, seq_len=32, seed=0)
    largest = {}
    dense, packed = load(folder, dtype=torch.float32), load(artifact.folder, dtype=torch.float32)

    def watch(name: str):
        def hook(module, args) -> None:
            largest[name] = max(largest.get(name, 0.0), float(args[0].abs().max()))

        return hook

    dense.layers[0].mixer.qkv.register_forward_pre_hook(watch("first"))
    packed.layers[1].mixer.qkv.register_forward_pre_hook(watch("second"))
    with torch.no_grad():
        for part in torch.from_numpy(samples.tokens).split(8):
            dense(part), packed(part)
    for index, name in enumerate(("first", "second")):
        scale = float(found[f"model.layers.{index}.self_attn.q_proj.input_scale"])
        assert scale == pytest.approx(largest[name] / 127.5, rel=1e-5), name


def test_after_a_transform_ranges_are_gathered_again(compress, family_folder, calibration_text: Path) -> None:
    """SmoothQuant makes inputs smaller: scales from the inputs before it would be far too large."""
    step = {**STEPS["w8a8 tensor"], "observer": "min_max"}
    text = {"calibration_text": str(calibration_text)}
    smooth = {"kind": "smoothquant", "alpha": 0.9}
    plain = compress(family_folder("llama"), step, name="plain", **text)
    made = compress(family_folder("llama"), smooth, step, name="smooth", **text)
    name = "model.layers.0.self_attn.q_proj.input_scale"
    before, after = (float(tensors(one.folder)[name]) for one in (plain, made))
    model = load(made.folder, dtype=torch.float32)
    seen = []
    model.layers[0].mixer.qkv.register_forward_pre_hook(lambda module, args: seen.append(float(args[0].abs().max())))
    with torch.no_grad():
        model(TOKENS)
    assert abs(after / before - 1) > 0.02
    assert max(seen) < 3 * 127.5 * after


def test_the_second_pass_rounds_inputs(compress, family_folder, calibration_text: Path, monkeypatch) -> None:
    from hone.compress import stream

    kinds: list[type] = []
    through = Flow.through

    def watched(self, layer) -> None:
        kinds.append(type(layer.mixer.qkv))
        through(self, layer)

    monkeypatch.setattr(stream.Flow, "through", watched)
    compress(family_folder("llama"), STEPS["w4a8"], check_sequences=0)
    assert kinds == [RoundedInputs]


@pytest.mark.parametrize("technique", [NVFP4, MXFP4, MXFP8])
def test_a_search_finds_the_best_scale_of_its_neighbourhood(technique) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 64, generator=generator) * (torch.rand(6, 64, generator=generator) < 0.9) * 0.1
    importance = torch.rand(64, generator=generator) + 0.01
    step = technique(kind=technique.__name__.lower())
    matrix = Matrix("w", weight, torch.float32, {"hessian": torch.diag(importance)})
    step.apply(matrix)
    stored, size = matrix.stored, step.group_size
    divisor = stored.global_scale
    plain = float_grid.find_scales(weight, step.number, size, "absmax", divisor=divisor)
    kind = plain.dtype
    scheme: Scheme = step.scheme(64)
    for row in range(6):
        for group in range(64 // size):
            here = slice(group * size, (group + 1) * size)
            errors = {}
            for move in (0, *float_grid.STEPS[kind]):
                code = min(max(int(plain.view(torch.uint8)[row, group]) + move, 1), float_grid._LARGEST_CODE[kind])
                scales = torch.tensor([[code]], dtype=torch.uint8).view(kind)
                one = Scheme(**scheme.__dict__).quantize(weight[row : row + 1, here], scales, None, divisor)
                lost = one.weight(torch.float32)[0] - weight[row, here]
                errors[code] = float((lost.square() * importance[here]).sum())
            chosen = errors[int(stored.scales.view(torch.uint8)[row, group])]
            assert chosen <= min(errors.values()) * (1 + 1e-5)
    unweighted = Matrix("w", weight, torch.float32)
    technique(kind="x", scale="absmax").apply(unweighted)
    assert torch.equal(unweighted.stored.scales.view(torch.uint8), plain.view(torch.uint8))


def test_scales_are_those_of_compressed_tensors() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight = torch.randn(16, 96, generator=torch.Generator().manual_seed(0)) * 0.05
    weight[3, :32] = 0
    divisor = float_grid.global_scale_of(weight)
    assert torch.equal(divisor, generate_gparam(weight.min(), weight.max()))
    for preset, number, size in (("NVFP4A16", "e2m1", 16), ("MXFP4A16", "e2m1", 32), ("MXFP8A16", "e4m3", 32)):
        args = preset_name_to_scheme(preset, ["Linear"]).weights
        groups = weight.view(16, -1, size)
        given = divisor if size == 16 else None
        theirs, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=given)
        ours = float_grid.find_scales(weight, number, size, "absmax", divisor=given)
        there = groups.abs().amax(-1) > 0
        assert torch.equal(ours.float()[there], theirs.float()[there]), preset


def test_a_matrix_of_zeros_stays_one() -> None:
    for name in ("nvfp4", "mxfp4", "mxfp8"):
        matrix = Matrix("w", torch.zeros(4, 64), torch.float32)
        QUANTIZERS.read(name).apply(matrix)
        assert not matrix.weight.any() and torch.isfinite(matrix.weight).all()


def test_misuse_names_the_field(compress, family_folder) -> None:
    llama = family_folder("llama")
    with pytest.raises(
        SpecError, match=r"rtn with activations int8_tensor needs calibration inputs(?s:.)*calibration_text"
    ):
        compress(llama, {**STEPS["w8a8 tensor"], "observer": "min_max"})
    with pytest.raises(SpecError, match="e4m3 weights with int inputs"):
        compress(llama, {"kind": "mxfp8", "activations": "int8_token"})
    with pytest.raises(SpecError, match="groups of 128, which do not divide the 64 input features"):
        compress(llama, {"kind": "mxfp8", "activations": "fp8_group"})
    with pytest.raises(SpecError, match="scale_dtype is float16"):
        compress(llama, {"kind": "nvfp4", "scale_dtype": "float16"})
    with pytest.raises(SpecError, match="unknown observer 'minmax'"):
        compress(llama, {**STEPS["w8a8 tensor"], "observer": "minmax"})


def test_a_quantizer_that_stores_no_rounding_says_so() -> None:
    class Plain(NVFP4):
        def scheme(self, columns: int) -> Scheme:
            return replace(super().scheme(columns), activations=None)

    Plain(kind="plain").check("w", 64, 64)
    with pytest.raises(SpecError, match="plain stores no rounding of inputs, and activations is nvfp4"):
        Plain(kind="plain", activations="nvfp4").check("w", 64, 64)


def test_dynamic_scales_need_no_calibration(compress, family_folder) -> None:
    made = compress(family_folder("llama"), STEPS["w8a8 token"])
    values = json.loads((made.folder / "config.json").read_text())["quantization_config"]
    (group,) = values["config_groups"].values()
    assert group["input_activations"]["strategy"] == "token" and group["input_activations"]["dynamic"] is True
    assert not [name for name in tensors(made.folder) if "input" in name.rpartition(".")[2]]


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_every_quantizer_rounds_inputs_or_says_that_it_does_not(kind: str) -> None:
    from hone.model.quantized.layouts import problem

    fields = {"group_size": 0, "bits": 8} if "group_size" in QUANTIZERS[kind].model_fields else {}
    for activations in ("int8_token", "fp8_token"):
        step = QUANTIZERS.read({"kind": kind, "activations": activations, **fields})
        scheme = step.scheme(128)
        if scheme.activations is None:
            with pytest.raises(SpecError, match="stores no rounding of inputs"):
                step.check("w", 128, 128)
        else:
            assert scheme.activations == step.rounding
            if problem(scheme) is None:
                step.check("w", 128, 128)
