"""Phases: the order of steps, an engine that knows none by name, and steps that are one new file and one table line."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest
import torch

import hone.compress
from hone.base.errors import SpecError
from hone.compress import ALLOCATIONS, QUANTIZERS, STEPS, TRANSFORMS
from hone.compress.stage import Compress
from hone.compress.step import PHASES
from hone.model.hf import load
from hone.model.quantized.rounded_inputs import RoundedInputs

ROOM = Path(hone.compress.__file__).parent
ENGINE = (
    "stage.py", "spec.py", "step.py", "planning.py", "stream.py", "shards.py", "sizes.py", "matrix.py",
    "engine/job.py", "engine/running.py", "engine/layer_run.py", "engine/solving.py", "engine/modules.py", "engine/ends.py",
    "engine/head.py", "plans/matrices.py", "plans/to_cost.py", "plans/calibrated.py", "structured/chain.py", "written/result.py",
)  # fmt: skip
RTN, GPTQ = {"kind": "rtn"}, {"kind": "gptq"}


@pytest.mark.parametrize("name", ENGINE)
def test_the_engine_knows_no_step_by_name(name: str) -> None:
    """It imports none, and asks no step which class it is of."""
    techniques = {row.partition(":")[0] for table in (STEPS, ALLOCATIONS) for row in table.rows.values()}
    tree = ast.parse((ROOM / name).read_text(encoding="utf8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not imported & techniques
    for node in ast.walk(tree):
        assert not (isinstance(node, ast.Name) and node.id == "isinstance"), f"line {node.lineno}"


@pytest.mark.parametrize("kind", STEPS)
def test_every_step_declares_its_phase(kind: str) -> None:
    step = STEPS[kind]
    assert step.phase in PHASES
    if step.stores:
        assert step.gives & {"weights:quantized", "weights:low_rank"} and "weights:float" in step.takes


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([{"kind": "wanda"}, {"kind": "depth"}], "depth changes the shapes of matrices: put it before wanda"),
        ([RTN, {"kind": "depth"}], "depth needs weights:float, which rtn removes"),
        ([{"kind": "kv_cache"}, {"kind": "depth"}], "depth changes the shapes of matrices: put it before kv_cache"),
        ([{"kind": "rotation"}, {"kind": "depth"}], "depth changes the shapes of matrices: put it before rotation"),
        ([{"kind": "kv_cache"}, {"kind": "kv_cache"}], "kv_cache is given twice"),
        (
            [{"kind": "magnitude"}, {"kind": "smoothquant"}],
            "smoothquant comes after magnitude: transforms are the first",
        ),
        (
            [{"kind": "magnitude"}, {"kind": "rotation"}],
            "rotation comes after magnitude: transforms are the first steps",
        ),
        (
            [{"kind": "smoothquant"}, {"kind": "rotation"}, RTN],
            "rotation comes after smoothquant: it changes the model",
        ),
        ([{"kind": "rotation"}, {"kind": "rotation"}, RTN], "rotation comes after rotation: it changes the model"),
        (
            [{"kind": "rotation", "r4": True}, {"kind": "smoothquant"}, RTN],
            "rotation with r4 stands between up and down",
        ),
        (
            [{"kind": "rotation", "r4": True}, {"kind": "kv_cache"}, {"kind": "smoothquant"}, RTN],
            "rotation with r4 stands between up and down",
        ),
        ([{"kind": "rotation", "r4": True}], "with r4 multiplies inputs at run time, which gains nothing"),
        ([{"kind": "awq"}], "awq is fitted to a quantizer: add one after it"),
        ([RTN, {"kind": "awq"}], "awq needs weights:float, which rtn removes"),
        ([RTN, GPTQ], "gptq needs weights:float, which rtn removes"),
        ([{"kind": "svd"}, RTN], "svd comes before rtn: it is the last step"),
        (
            [{"kind": "magnitude"}, {"kind": "svd"}],
            "svd stores factors of the weight and loses what magnitude did to it",
        ),
        ([{"kind": "eora"}], "eora corrects the error of a quantizer or pruner"),
        ([{"kind": "magnitude"}, {"kind": "loftq", "iterations": 2}], "loftq with iterations 2 quantizes again"),
        ([{"kind": "rotation", "r4": True}, RTN, {"kind": "eora"}], "before rotation r4: use r4: false"),
    ],
)
def test_steps_in_another_order_are_refused(steps: list[dict], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Compress.read({"steps": steps})


@pytest.mark.parametrize(
    "steps",
    [
        [
            {"kind": "depth"},
            {"kind": "width"},
            {"kind": "rotation"},
            {"kind": "awq"},
            {"kind": "wanda"},
            GPTQ,
            {"kind": "eora"},
        ],
        [{"kind": "depth"}, {"kind": "kv_cache"}, {"kind": "smoothquant"}, RTN],
        [RTN, {"kind": "kv_cache"}, {"kind": "loftq", "iterations": 2}],
    ],
)
def test_the_phases_in_order_are_accepted(steps: list[dict]) -> None:
    """A step of a cache may stand among those of matrices."""
    spec = Compress.read({"steps": steps})
    ranks = [PHASES.index(step.phase) for step in spec.ordered]
    assert ranks == sorted(ranks) and len(ranks) == len(steps)


def add(monkeypatch: pytest.MonkeyPatch, folder: Path, table, name: str, code: str, cls: str) -> None:
    """One new file and one table line."""
    (folder / f"someones_{name}.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(table, "rows", {**table.rows, name: f"someones_{name}:{cls}"})


def test_a_quantizer_with_activations_is_one_file_and_one_table_line(
    tiny_llama: Path, compress, tmp_path: Path, calibration_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checks and the folder that it writes compute with rounded inputs, whose scales come from calibration."""
    code = '''
        """Eight bits for weights and inputs, with one scale for all inputs, as someone new would add them."""
        from pydantic import Field
        from hone.compress.quantizers.base import INPUTS_SAID, Inputs, Quantizer
        from hone.model.quantized.scheme import Scheme
        from hone.ops.rounding.integer_grid import find_scales

        class Int8Static(Quantizer):
            """Rounds weights by row and inputs by one calibrated scale."""
            activations: Inputs = Field("int8_tensor", description=INPUTS_SAID)

            def scheme(self, columns):
                return Scheme(8, layout="int-quantized", activations=self.rounding)

            def apply(self, matrix):
                dtype = self.stored_scale_dtype(matrix.stored_dtype)
                scales = find_scales(matrix.weight, 8, 0, "absmax", dtype)
                matrix.stored = self.scheme(matrix.weight.shape[1]).quantize(matrix.weight, scales)
    '''
    add(monkeypatch, tmp_path, QUANTIZERS, "int8_static", code, "Int8Static")
    made = compress(tiny_llama, {"kind": "int8_static"}, calibration_text=str(calibration_text))
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value
    (done,) = made.techniques
    assert (done["slot"], done["kind"]) == ("quantizer", "int8_static") and "calibration" in done
    model, tokens = load(made.folder), torch.arange(60, 84)[None]
    rounding = [module for module in model.modules() if isinstance(module, RoundedInputs)]
    assert len(rounding) == 8 and all(float(module.input_scale) > 0 for module in rounding)
    ready = compress(
        tiny_llama,
        {"kind": "rtn", "bits": 8, "group_size": 0, "activations": "int8_tensor"},
        calibration_text=str(calibration_text),
        name="ready",
    )
    with torch.no_grad():
        assert torch.equal(model(tokens), load(ready.folder)(tokens))
    assert made.figures["kl_to_dense"].value == ready.figures["kl_to_dense"].value


def test_a_step_of_the_model_is_one_file_and_one_table_line(
    tiny_llama: Path, compress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is planned with the config that it leaves, runs before the layers, and its words are in the artifact."""
    code = '''
        """A model with one feed-forward matrix zeroed, as someone new would add it."""
        from hone.compress.step import ModelStep
        from hone.model.weights.source import View

        class Silent(View):
            def tensor(self, name):
                found = self.source.tensor(name)
                return found * 0 if "layers.0.mlp.down_proj" in name else found

        class Silence(ModelStep):
            """Silences the first feed-forward."""

            def reshape(self, config):
                return config

            def rewrite(self, checkpoint, flow, targets, state, run):
                return checkpoint.viewed(Silent(checkpoint.weights)), {"layers": checkpoint.config.num_layers}
    '''
    add(monkeypatch, tmp_path, TRANSFORMS, "silence", code, "Silence")
    made = compress(tiny_llama, {"kind": "silence"}, {"kind": "rtn", "bits": 8, "group_size": 0})
    assert [one["kind"] for one in made.techniques] == ["silence", "rtn"] and made.techniques[0]["layers"] == 2
    model, given = load(made.folder), load(tiny_llama)
    assert not model.layers[0].feed_forward.down.dequantize(torch.float32).any()
    after = model.layers[1].feed_forward.down.dequantize(torch.float32)
    assert (after - given.layers[1].feed_forward.down.weight).norm() < 0.02 * after.norm()
