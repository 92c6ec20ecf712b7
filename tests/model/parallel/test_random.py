"""Random weights of a config.json: every tensor is there, quantized ones as their format stores them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.serve_bits import FORMS, write_form
from hone.base.errors import SpecError
from hone.model.hf import write_config
from hone.model.parallel.random import RandomCheckpoint
from hone.model.quantized.config import to_json
from hone.model.quantized.scheme import Quantization, Scheme
from hone.model.shape import Shape
from hone.ops.rounding.inputs import ACTIVATIONS
from hone.serve.engine import Engine, EngineSpec
from tests.serve.small import greedy

SHAPE = Shape(hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=256, max_seq_len=64)


def folder(path: Path, scheme: Scheme | None) -> Path:
    write_config(SHAPE.config(100, None, 0), path, torch.float32)
    values = json.loads((path / "config.json").read_text())
    if scheme is not None:
        values["quantization_config"] = to_json(Quantization(((("Linear",), scheme),), ("lm_head",)))
    (path / "config.json").write_text(json.dumps(values))
    return path


@pytest.mark.parametrize("form", [form for form in FORMS if form != "mxfp4"])
def test_an_engine_runs_on_a_config_alone(form: str, tmp_path: Path) -> None:
    made = RandomCheckpoint(folder(tmp_path, FORMS[form])).build()
    again = RandomCheckpoint(tmp_path).build()
    qkv = made.layers[1].mixer.qkv
    weight = qkv.weight.detach() if FORMS[form] is None else qkv.dequantize(torch.float32)
    assert float(weight.std()) == pytest.approx(0.02, rel=0.05) and abs(float(weight.mean())) < 0.003
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(made.buffers(), again.buffers(), strict=True))
    engine = Engine(tmp_path, EngineSpec(load_format="dummy", num_pages=8))
    assert len(engine.generate([[5, 6, 7]], greedy(4))[0].tokens) == 4


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """gpt-oss's, made small: scales are powers of two, so that the deviation is no more than near."""
    path = write_form("gpt-oss-20b", "mxfp4", tmp_path)
    values = json.loads((path / "config.json").read_text())
    values |= {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "vocab_size": 300,
    }
    values |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_types": values["layer_types"][:2],
    }
    (path / "config.json").write_text(json.dumps(values))
    experts = RandomCheckpoint(path).build().layers[1].feed_forward.gate_up
    assert 0.014 < float(experts.dequantize(torch.float32).std()) < 0.029
    engine = Engine(path, EngineSpec(load_format="dummy", num_pages=8))
    assert len(engine.generate([[5, 6, 7]], greedy(4))[0].tokens) == 4


def test_formats_whose_codes_are_no_numbers_are_refused(tmp_path: Path) -> None:
    scheme = Scheme(4, 16, "nvfp4-pack-quantized", "e2m1", scales="e4m3", activations=ACTIVATIONS["nvfp4"])
    with pytest.raises(SpecError, match="no random weights"):
        RandomCheckpoint(folder(tmp_path, scheme)).build()
