"""Every storage format of other libraries loads in its own loader with hone's logits; saved again it keeps every tensor."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hone.compress import QUANTIZERS
from hone.compress.matrix import Matrix
from hone.compress.quantizers.integer import IntegerQuantizer
from hone.compress.stage import Compress
from hone.model.hf import load, save
from hone.model.quantized.dequantizing import Dequantizing
from hone.model.quantized.packed_int import PackedInt
from hone.model.quantized.scheme import Scheme, Stored
from tests.compress.conftest import stopped_before

EXACT, FLOAT16 = 1e-5, 2e-3
"""Largest difference of logits, of their largest magnitude: of float32 sums in another order, of a kernel in float16."""
FORMATS = {
    "gptq": ({"kind": "rtn", "layout": "gptq", "group_size": 32}, ("optimum", "gptqmodel"), FLOAT16),
    "gptq-8": ({"kind": "rtn", "layout": "gptq", "bits": 8}, ("optimum", "gptqmodel"), FLOAT16),
    "gptq_v2": ({"kind": "gptq", "layout": "gptq_v2"}, ("optimum", "gptqmodel"), FLOAT16),
    "sorted-groups": ({"kind": "sorted_groups", "group_size": 32}, ("optimum", "gptqmodel"), FLOAT16),
    "awq": ({"kind": "gptq", "layout": "awq", "scale": "signed"}, ("gptqmodel",), FLOAT16),
    "fp8-block": ({"kind": "fp8", "strategy": "block"}, ("accelerate",), EXACT),
    "fp8-channel": ({"kind": "fp8", "activations": "none"}, ("compressed_tensors",), EXACT),
    "fp8-tensor": ({"kind": "fp8", "strategy": "tensor", "activations": "none"}, ("compressed_tensors",), EXACT),
    "int8-block": ({"kind": "block_int8"}, ("compressed_tensors",), EXACT),
    "nf4": ({"kind": "nf4"}, ("bitsandbytes", "accelerate"), EXACT),
    "nf4-double": ({"kind": "nf4", "double_quant": True}, ("bitsandbytes", "accelerate"), EXACT),
    "nf4-128": ({"kind": "nf4", "block_size": 128}, ("bitsandbytes", "accelerate"), EXACT),
    "fp4": ({"kind": "fp4"}, ("bitsandbytes", "accelerate"), EXACT),
    "fp4-double": ({"kind": "fp4", "double_quant": True}, ("bitsandbytes", "accelerate"), EXACT),
    "llm_int8": ({"kind": "llm_int8"}, ("bitsandbytes", "accelerate"), EXACT),
}
QUICK = ("gptq", "sorted-groups", "awq", "fp8-block", "int8-block", "nf4-double", "llm_int8")
"""One of each layout for the default tier."""
FORMS = [pytest.param(form, marks=() if form in QUICK else pytest.mark.slow) for form in FORMATS]
FAMILIES = ("llama", "qwen3", "mistral")
SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
TOKENS = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))


def logits_of(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return load(folder)(TOKENS)


def loaded(folder: Path) -> torch.nn.Module:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logits_from(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits.float()


def bound_of_4_bits(dequantized: torch.nn.Module) -> float:
    """Largest difference of logits between bitsandbytes' products of 4-bit weights and those of `dequantized`, its weights in float32.

    On a CPU with AVX512-BF16 it rounds inputs, scales and outputs to bfloat16: up to as much as the whole model in bfloat16
    differs, three times over. On others it dequantizes and multiplies in float32.
    """
    from bitsandbytes.functional import has_avx512bf16

    exact = logits_from(dequantized)
    if not has_avx512bf16():
        return EXACT * exact.abs().max().item()
    return 3 * (logits_from(deepcopy(dequantized).bfloat16()) - exact).abs().max().item()


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", FORMATS)
def test_its_loader_computes_the_same_logits(form: str, family: str, family_folder, compress) -> None:
    step, packages, bound = FORMATS[form]
    for package in packages:
        pytest.importorskip(package)
    source = family_folder(family, **SIZES)
    made = compress(source, step)
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value
    ours, whole = logits_of(made.folder), logits_of(source)
    model = loaded(made.folder)
    theirs = logits_from(model)
    if "bitsandbytes" in packages:  # its own products round inputs; its dequantized weights are hone's
        dequantized = loaded(made.folder).dequantize(dtype=torch.float32)
        rounded = 0.1 * whole.abs().max() if form == "llm_int8" else bound_of_4_bits(dequantized)
        assert (ours - theirs).abs().max() <= rounded
        theirs = logits_from(dequantized)
    assert (ours - theirs).abs().max() <= bound * whole.abs().max()
    assert (ours - whole).abs().max() > 1e-3 * whole.abs().max(), "nothing was compressed"


@pytest.mark.parametrize("form", FORMS)
def test_saved_again_it_has_the_same_tensors(form: str, family_folder, compress, tmp_path: Path) -> None:
    source = family_folder("llama", **SIZES)
    made = compress(source, FORMATS[form][0])
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value
    model = load(made.folder)
    kind = PackedInt if form.startswith(("gptq", "awq", "int8", "llm")) else Dequantizing
    assert sum(isinstance(module, kind) for module in model.modules()) == 8
    save(model, tmp_path / "again")
    before, after = tensors_of(made.folder), tensors_of(tmp_path / "again")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and tensor.shape == after[name].shape, name
        assert bool((tensor.double() == after[name].double()).all()), name
    assert torch.equal(logits_of(tmp_path / "again"), logits_of(made.folder))
    half = load(made.folder, dtype=torch.bfloat16)
    with torch.no_grad():
        assert (half(TOKENS).float() - logits_of(made.folder)).abs().max() < 0.1 * logits_of(source).abs().max()


@pytest.mark.parametrize("form", ["gptq", "fp8-block", "nf4-double"])
def test_modules_that_stay_dense_are_named_for_every_loader(form: str, family_folder, compress) -> None:
    source = family_folder("llama", **SIZES)
    made = compress(source, FORMATS[form][0], ignore=["lm_head", r"layers\.1\.", "o_proj"])
    model = load(made.folder)
    quantized = [name for name, one in model.named_modules() if isinstance(one, PackedInt | Dequantizing)]
    assert quantized == ["layers.0.mixer.qkv", "layers.0.feed_forward.gate_up", "layers.0.feed_forward.down"]
    ours = logits_of(made.folder)
    assert torch.isfinite(ours).all() and not torch.equal(ours, logits_of(source))


@pytest.mark.slow
def test_which_kernel_of_bitsandbytes_multiplies_4_bits_here(family_folder, compress, record_property) -> None:
    """Where the CPU has AVX512-BF16, a first pass packs the weights for a kernel in bfloat16; elsewhere they stay as stored."""
    for package in FORMATS["nf4"][1]:
        pytest.importorskip(package)
    from bitsandbytes.functional import has_avx512bf16
    from bitsandbytes.nn import Linear4bit

    model = loaded(compress(family_folder("llama", **SIZES), FORMATS["nf4"][0]).folder)
    logits_from(model)
    states = [module.weight.quant_state for module in model.modules() if isinstance(module, Linear4bit)]
    packed = {bool(getattr(state, "packing_format_for_cpu", False)) for state in states}
    record_property("kernel", "bfloat16" if packed == {True} else "float32")
    assert packed == {bool(has_avx512bf16())}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fp8-block", "nf4-double"])
def test_transformers_leaves_the_same_modules_dense(form: str, family_folder, compress) -> None:
    for package in FORMATS[form][1]:
        pytest.importorskip(package)
    made = compress(family_folder("llama", **SIZES), FORMATS[form][0], ignore=["lm_head", r"layers\.1\.", "o_proj"])
    model = loaded(made.folder)
    theirs = logits_from(model.dequantize(dtype=torch.float32) if form == "nf4-double" else model)
    ours = logits_of(made.folder)
    assert (ours - theirs).abs().max() <= EXACT * ours.abs().max()


@pytest.mark.parametrize("form", QUICK)
def test_it_is_served(form: str, family_folder, compress) -> None:
    import hone
    from hone.model.incremental import generate

    made = compress(family_folder("llama", **SIZES), FORMATS[form][0])
    model, prompt = load(made.folder), list(range(60, 72))
    with torch.no_grad():
        wanted = generate(model, torch.tensor([prompt]), 8)[0].tolist()[-8:]
    params = hone.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    done = hone.Engine(made.folder).generate([prompt], params)[0]
    assert done.error is None and done.tokens == wanted


# What other libraries write and hone's quantizers do not


class Asymmetric(IntegerQuantizer):
    """Rounds to nearest between the smallest and largest weight of a group; a group's columns may be scattered."""

    group_size: int = 32
    desc_act: bool = False

    def scheme(self, columns: int) -> Scheme:
        return Scheme(4, self.group_size, self.stored_layout, symmetric=False, permuted=self.desc_act)

    def apply(self, matrix: Matrix) -> None:
        weights = matrix.weight
        rows, columns = weights.shape
        order = torch.arange(columns)
        if self.desc_act:
            order = torch.randperm(columns, generator=torch.Generator().manual_seed(0))
        groups = weights[:, order].view(rows, -1, self.group_size)
        scales = ((groups.amax(-1) - groups.amin(-1)) / 15).half()
        zeros = (-groups.amin(-1) / scales.float()).round().clamp(0, 15)
        codes = (groups / scales.float().unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, 15).view(rows, columns)
        back = torch.argsort(order)
        index = (back // self.group_size).to(torch.int32) if self.desc_act else None
        codes, points = ((values - 8).to(torch.int8) for values in (codes[:, back], zeros))
        matrix.stored = Stored(self.scheme(columns), codes, scales, points, index)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "desc_act"), [("gptq", False), ("gptq_v2", False), ("awq", False), ("gptq", True)])
def test_zero_points_and_scattered_groups_mean_the_same_to_gptqmodel(
    layout: str, desc_act: bool, family_folder, compress, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(QUANTIZERS, "rows", {**QUANTIZERS.rows, "asymmetric": f"{__name__}:Asymmetric"})
    source = family_folder("llama", **SIZES)
    made = compress(source, {"kind": "asymmetric", "layout": layout, "desc_act": desc_act})
    ours, whole = logits_of(made.folder), logits_of(source)
    assert 1e-3 * whole.abs().max() < (ours - whole).abs().max() < whole.abs().max()
    save(load(made.folder), tmp_path / "again")
    assert all(
        torch.equal(tensor, tensors_of(made.folder)[name]) for name, tensor in tensors_of(tmp_path / "again").items()
    )
    for package in FORMATS[layout][1]:
        pytest.importorskip(package)
    theirs = logits_from(loaded(made.folder))
    assert (ours - theirs).abs().max() <= FLOAT16 * whole.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32},
        {"load_in_8bit": True},
    ],
)
def test_a_folder_that_transformers_wrote_with_bitsandbytes(options: dict, family_folder, tmp_path: Path) -> None:
    import transformers

    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    config = transformers.BitsAndBytesConfig(**options)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        family_folder("mistral", **SIZES), quantization_config=config, dtype=torch.float32
    )
    model.save_pretrained(tmp_path / "theirs")
    ours = logits_of(tmp_path / "theirs")
    model = model.dequantize(dtype=torch.float32)
    assert (logits_from(model) - ours).abs().max() <= EXACT * ours.abs().max()
    save(load(tmp_path / "theirs"), tmp_path / "again")
    before, after = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(
        tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]) for name, tensor in before.items()
    )


# A quantized folder compressed again


@pytest.mark.parametrize(
    "form", ["nf4-double", *(pytest.param(form, marks=pytest.mark.slow) for form in ("gptq", "fp8-block"))]
)
def test_a_quantized_folder_is_compressed_again_from_its_dequantized_weights(
    form: str, family_folder, compress, tmp_path: Path
) -> None:
    source = family_folder("mistral", **SIZES)  # its head has weights of its own
    first = compress(source, FORMATS[form][0], name="first")
    again = compress(first.folder, {"kind": "rtn", "bits": 8, "group_size": 32}, name="again", requantize=True)
    assert again.figures["model_bytes"].value == again.figures["model_bytes"].estimate.value
    method = load(first.folder).quantization["quant_method"]
    assert f"weights of a {method} checkpoint" in again.figures["relative_weight_error"].note
    assert again.figures["relative_weight_error"].value < 0.01
    assert load(again.folder).quantization["quant_method"] == "compressed-tensors"
    ours, before = logits_of(again.folder), logits_of(first.folder)
    assert (ours - before).abs().max() < 0.1 * before.abs().max()
    assert not torch.equal(ours, before)
    dense = compress(first.folder, {"kind": "magnitude", "sparsity": 0.1}, name="dense", requantize=True)
    assert load(dense.folder).quantization is None
    assert tensors_of(dense.folder).keys() == tensors_of(source).keys()


@pytest.mark.slow
def test_a_kill_does_not_change_what_is_made_of_a_quantized_folder(
    family_folder, compress, calibration_text: Path
) -> None:
    """Finished layers are read back from their shards, the others from the quantized checkpoint."""
    first = compress(family_folder("llama", **SIZES), {"kind": "nf4", "double_quant": True}, name="first")
    spec = {"calibration_text": str(calibration_text), "requantize": True}
    whole = compress(first.folder, {"kind": "nf4"}, name="whole", **spec)
    with stopped_before(1):
        compress(first.folder, {"kind": "nf4"}, name="resumed", **spec)
    resumed = compress(first.folder, {"kind": "nf4"}, name="resumed", **spec)
    before, after = tensors_of(whole.folder), tensors_of(resumed.folder)
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert resumed.figures["relative_output_error"].value == whole.figures["relative_output_error"].value


def test_without_requantize_the_error_says_how(family_folder, compress) -> None:
    from hone.base.errors import SpecError

    first = compress(family_folder("llama", **SIZES), {"kind": "nf4"}, name="first")
    with pytest.raises(SpecError, match=r"quantized already \(bitsandbytes\)") as caught:
        compress(first.folder, {"kind": "rtn"}, name="again")
    assert "requantize=true" in caught.value.fix
    assert not Compress.read({"steps": ["rtn"]}).requantize
