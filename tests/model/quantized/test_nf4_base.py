"""QLoRA: a dense checkpoint whose linears become NF4 while it is loaded, under LoRA factors that are trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hone.base.errors import SpecError
from hone.model import hf
from hone.model.config import ModelConfig
from hone.model.context import Causal
from hone.model.decoder import build
from hone.model.quantized.nf4 import NF4
from hone.model.quantized.nf4_base import nf4_base
from hone.model.shape import Shape
from hone.ops import linear_cross_entropy

SIZES = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 128}
TOKENS = torch.arange(40).view(2, 20) * 7 % 50


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dense model with a LoRA whose B are not zero, in PEFT's form."""
    values = Shape(**SIZES, max_seq_len=64).config(50).model_dump(mode="json")
    model = build(ModelConfig.read({**values, "adapters": [{"kind": "lora", "rank": 4, "alpha": 6}]}), seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    hf.save(model, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("double_quant", [True, False])
def test_gradients_of_the_factors_are_those_over_the_dequantized_weights(folder: Path, double_quant: bool) -> None:
    """Against float64 autograd over a dense model that has the values of the codes."""
    model = nf4_base(hf.Checkpoint(folder), double_quant=double_quant).build().double()
    dense = hf.load(folder).double()
    for name, module in model.named_modules():
        if isinstance(module, NF4):
            dense.get_submodule(name).weight.data = module.dequantize(torch.float64)
            assert not any(one.requires_grad for one in module.parameters())
    kinds = [type(one).__name__ for one in model.modules()]
    assert kinds.count("NF4") == 8
    grads = []
    for one in (model, dense):
        trained = {name: p for name, p in one.named_parameters() if "lora_" in name}
        loss = linear_cross_entropy(
            one.head_input(one.hidden(TOKENS, Causal(TOKENS))), one.head_weight, TOKENS.roll(-1, 1)
        )
        grads.append(dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True)))
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) == 28
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], atol=1e-10, rtol=1e-8)
        assert grad.abs().max() > 0


def test_no_dense_weight_is_kept_for_the_backward_pass(folder: Path) -> None:
    model = nf4_base(hf.Checkpoint(folder)).build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        model(TOKENS)
    widths = {(one.in_features, one.out_features) for one in model.modules() if isinstance(one, NF4)}
    shapes = {tuple(one.shape) for one in kept}
    assert not shapes & ({(out, into) for into, out in widths} | widths)
    assert (40, 128) not in {(one.numel() // one.shape[-1], one.shape[-1]) for one in kept if one.dim()}, (
        "an activation"
    )


def test_the_model_is_that_of_a_compressed_folder(folder: Path, tmp_path: Path) -> None:
    """Codes do not depend on how they came about, and the saved folder is bitsandbytes'."""
    source = nf4_base(hf.Checkpoint(folder))
    model = source.build()
    hf.save(model, tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["quantization_config"]["load_in_4bit"] and config["quantization_config"]["bnb_4bit_use_double_quant"]
    again = hf.load(tmp_path / "saved")
    assert torch.equal(model(TOKENS), again(TOKENS))
    functional = pytest.importorskip("bitsandbytes.functional")
    dense = hf.load(folder)
    packed, _ = functional.quantize_4bit(
        dense.layers[1].feed_forward.down.inner.weight.data, quant_type="nf4", compress_statistics=True
    )
    assert torch.equal(packed.flatten(), model.layers[1].feed_forward.down.inner.codes.flatten())


def test_what_cannot_be_quantized_is_said(folder: Path) -> None:
    with pytest.raises(SpecError, match="64 input features, no multiple of the 128"):
        nf4_base(hf.Checkpoint(folder), block_size=128)
    quantized = nf4_base(hf.Checkpoint(folder))
    with pytest.raises(SpecError, match="is quantized already"):
        nf4_base(quantized)
