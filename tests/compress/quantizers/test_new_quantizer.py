"""A new quantizer is one file and one line in the table: three-bit integers, 8-bit floats, with rounded inputs or without."""

from __future__ import annotations

import sys
import textwrap
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hone.base.errors import SpecError
from hone.compress import QUANTIZERS, STEPS
from hone.model.hf import load, save
from hone.model.quantized.dequantizing import Dequantizing
from hone.model.quantized.packed_int import PackedInt
from hone.model.quantized.rounded_inputs import RoundedInputs
from tests.compress.written.test_export import transformers_logits


@pytest.mark.slow
def test_a_new_technique_is_one_file_and_one_table_line(
    tiny_llama: Path, compress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = '''
        """Round to nearest with three bits, as someone new would add it."""
        from pydantic import Field
        from hone.ops.rounding.integer_grid import find_scales
        from hone.compress.quantizers.integer import IntegerQuantizer

        class Int3(IntegerQuantizer):
            """Rounds every weight to one of eight levels."""
            bits: int = Field(3, ge=3, le=3, description="Bits a weight.")
            group_size: int = Field(16, description="Columns that share a scale.")

            def apply(self, matrix):
                dtype = self.stored_scale_dtype(matrix.stored_dtype)
                scales = find_scales(matrix.weight, 3, self.group_size, "signed", dtype)
                matrix.stored = self.scheme(matrix.weight.shape[1]).quantize(matrix.weight, scales)
    '''
    (tmp_path / "someones_int3.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(QUANTIZERS, "rows", {**QUANTIZERS.rows, "int3": "someones_int3:Int3"})
    assert "int3" in STEPS
    made = compress(tiny_llama, {"kind": "int3"})
    assert made.techniques == [{"slot": "quantizer", **STEPS.read("int3").model_dump(mode="json")}]
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value
    packed = [module for module in load(made.folder).modules() if isinstance(module, PackedInt)]
    assert len(packed) == 8 and all(module.scheme.bits == 3 for module in packed)


def test_a_class_of_another_package_is_a_step_without_a_table_line(
    tiny_llama: Path, compress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By module:Class, and by the short name that its package offers."""
    code = '''
        from hone.compress.quantizers.rtn import RoundToNearest

        class Mine(RoundToNearest):
            """Rounds."""
    '''
    (tmp_path / "someones_package.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(str(tmp_path))
    offered = EntryPoint("quantizer.mine", "someones_package:Mine", "hone.techniques")
    monkeypatch.setattr("hone.base.table.entry_points", lambda group: [offered])
    step = {"kind": "someones_package:Mine", "bits": 4, "group_size": 32}
    made, named = compress(tiny_llama, step), compress(tiny_llama, {**step, "kind": "mine"}, name="named")
    assert [(one["slot"], one["kind"]) for one in made.techniques] == [("quantizer", "someones_package:Mine")]
    assert [(one["slot"], one["kind"]) for one in named.techniques] == [("quantizer", "mine")]
    shards = [path.name for path in made.folder.glob("*.safetensors")]
    assert shards and all(made.manifest["files"][one] == named.manifest["files"][one] for one in shards)


FP8 = '''
    """8-bit floats with one scale a row, as someone new would add them."""
    from hone.base.lazy import lazy
    from hone.ops.rounding.integer_grid import stored
    from hone.compress.quantizers.base import Quantizer
    from hone.model.quantized.scheme import Scheme

    class FP8(Quantizer):
        """Rounds every weight to the nearest e4m3 number. Micikevicius et al. 2022, arXiv:2209.05433."""

        def scheme(self, columns):
            return Scheme(8, layout="float-quantized", number="e4m3")

        def apply(self, matrix):
            scales = stored(matrix.weight.abs().amax(1, keepdim=True) / 448, self.stored_scale_dtype(matrix.stored_dtype))
            matrix.stored = self.scheme(matrix.weight.shape[1]).quantize(matrix.weight, scales)
'''


def test_an_8_bit_float_quantizer_is_one_file_and_one_table_line(
    tiny_llama: Path, compress, tmp_path: Path, calibration_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("compressed_tensors")
    (tmp_path / "someones_fp8.py").write_text(textwrap.dedent(FP8))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(QUANTIZERS, "rows", {**QUANTIZERS.rows, "fp8": "someones_fp8:FP8"})
    made = compress(tiny_llama, {"kind": "fp8"}, calibration_text=str(calibration_text))
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value
    assert 0.005 < made.figures["relative_output_error"].value < 0.05  # three bits of mantissa: 2^-4 at most, each
    model, tokens = load(made.folder), torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    layers = [module for module in model.modules() if isinstance(module, Dequantizing)]
    assert len(layers) == 8 and {module.scheme.number for module in layers} == {"e4m3"}
    with torch.no_grad():
        ours, whole = model(tokens), load(tiny_llama)(tokens)
    assert (ours - transformers_logits(made.folder, tokens)).abs().max() <= 1e-5
    assert 1e-3 < (ours - whole).abs().max() < 0.2 * whole.abs().max()
    save(model, tmp_path / "again")
    shards = [load_file(path) for path in sorted(made.folder.glob("*.safetensors"))]
    before = {name: tensor for shard in shards for name, tensor in shard.items()}
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(tensor.dtype == after[name].dtype for name, tensor in before.items())
    assert all(torch.equal(tensor.double(), after[name].double()) for name, tensor in before.items())


@pytest.mark.parametrize("activations", ["fp8_token", "fp8_tensor"])
def test_it_rounds_inputs_too_where_its_scheme_has_them(
    activations: str,
    tiny_llama: Path,
    compress,
    tmp_path: Path,
    calibration_text: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scheme names the rounding; option, statistics, scales from calibration and the module come from the base."""
    code = FP8.replace('number="e4m3")', 'number="e4m3", activations=self.rounding)')
    (tmp_path / "someones_w8a8.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "someones_w8a8", raising=False)
    monkeypatch.setattr(QUANTIZERS, "rows", {**QUANTIZERS.rows, "w8a8": "someones_w8a8:FP8"})
    step = {"kind": "w8a8", "activations": activations}
    made = compress(tiny_llama, step, calibration_text=str(calibration_text))
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value
    layers = [module for module in load(made.folder).modules() if isinstance(module, RoundedInputs)]
    assert len(layers) == 8 and {module.rounding.dynamic for module in layers} == {activations == "fp8_token"}
    assert all(float(module.input_scale) > 0 for module in layers if activations == "fp8_tensor")
    tokens = torch.randint(0, 300, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, whole = load(made.folder)(tokens), load(tiny_llama)(tokens)
    assert 0 < (ours - whole).norm() < 0.2 * whole.norm()


@pytest.mark.parametrize(("block", "fits"), [((32, 32), True), ((24, 32), False)])
def test_blocks_of_rows_stay_within_a_module(
    block: tuple[int, int], fits: bool, tiny_llama: Path, compress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = FP8.replace('number="e4m3"', f'number="e4m3", block={block}').replace(
        "matrix.weight.abs().amax(1, keepdim=True) / 448",
        "torch.ones(scheme.grid(*matrix.weight.shape)) / 448",
    )
    code = code.replace("def apply(self, matrix):", "def apply(self, matrix):\n            scheme = self.scheme(0)")
    (tmp_path / "someones_block.py").write_text("import torch\n" + textwrap.dedent(code))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "someones_block", raising=False)
    monkeypatch.setattr(QUANTIZERS, "rows", {**QUANTIZERS.rows, "block": "someones_block:FP8"})
    if not fits:
        with pytest.raises(SpecError, match=r"blocks of 24 rows do not divide the 64 rows of .*q_proj"):
            compress(tiny_llama, {"kind": "block"})
        return
    made = compress(tiny_llama, {"kind": "block"})
    tokens = torch.randint(0, 300, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = load(made.folder)(tokens)
    assert (ours - transformers_logits(made.folder, tokens)).abs().max() <= 1e-5
