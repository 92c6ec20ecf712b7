"""Bottleneck adapters: a torch implementation on transformers' layers as the oracle, AdapterHub's names, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from hone.base.errors import ArtifactError, SpecError
from hone.exports.merged.write import merge
from hone.model import hf
from hone.model.adapters import ADAPTERS
from hone.model.adapters.trainable import Trainable
from hone.model.decoder import Decoder, build
from hone.model.incremental import generate
from hone.model.shape import Shape
from tests.model.adapters.test_techniques import SIZES, TOKENS, adapters, theirs, written

TECHNIQUES: dict[str, dict[str, Any]] = {
    "houlsby": {"kind": "houlsby", "reduction_factor": 4},
    "pfeiffer": {"kind": "pfeiffer", "adapter_name": "task"},
    "parallel": {"kind": "parallel"},
    "houlsby with gelu": {"kind": "houlsby", "non_linearity": "gelu", "scaling": 0.5},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bottlenecks") / "model"
    hf.save(build(Shape(**SIZES, max_seq_len=64).config(50), seed=1), folder)
    return folder


def begun(base: Path, name: str, *, moved: bool = True) -> Decoder:
    model = Trainable(hf.Checkpoint(base), ADAPTERS.read(TECHNIQUES[name])).build("cpu", torch.float32)
    draw = torch.Generator().manual_seed(0)
    for part in adapters(model).values() if moved else ():
        with torch.no_grad():
            part.add_(torch.empty_like(part).normal_(std=0.2, generator=draw))
    return model


def with_hooks(model: nn.Module, folder: Path) -> nn.Module:
    """transformers' model with the adapter in AdapterHub's `folder`, by the formulas of its library, read from its config alone."""
    values = json.loads((folder / "adapter_config.json").read_text())
    how, tensors = values["config"], load_file(folder / "adapter.safetensors")
    f = {"relu": F.relu, "swish": F.silu, "gelu": F.gelu}[how["non_linearity"]]

    def bottleneck(at: str, z: Tensor) -> Tensor:
        down = F.linear(z, tensors[f"{at}.adapter_down.0.weight"], tensors[f"{at}.adapter_down.0.bias"])
        return how["scaling"] * F.linear(f(down), tensors[f"{at}.adapter_up.weight"], tensors[f"{at}.adapter_up.bias"])

    def placed(place: str, norm: nn.Module, block: nn.Module) -> None:
        stream: dict[str, Tensor] = {}
        norm.register_forward_pre_hook(lambda _, given: stream.update(x=given[0]))

        def behind(_: nn.Module, __: Any, made: Any) -> Any:
            y = made[0] if isinstance(made, tuple) else made
            x = stream["x"]
            z = x if how["is_parallel"] else x + y if how["original_ln_before"] else y
            y = y + bottleneck(place, z)
            return (y, *made[1:]) if isinstance(made, tuple) else y

        block.register_forward_hook(behind)

    for index, layer in enumerate(model.model.layers):
        where = f"model.layers.{index}"
        if how["mh_adapter"]:
            placed(f"{where}.attention_adapters.adapters.{values['name']}", layer.input_layernorm, layer.self_attn)
        if how["output_adapter"]:
            placed(f"{where}.output_adapters.adapters.{values['name']}", layer.post_attention_layernorm, layer.mlp)
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", TECHNIQUES)
def test_the_formulas_on_transformers_layers_give_its_logits(name: str, base: Path, tmp_path: Path) -> None:
    model = begun(base, name)
    folder, plain = written(model, base, tmp_path / "adapter"), hf.load(base)
    again = hf.load(folder)
    assert again.config.adapters == model.config.adapters
    assert torch.equal(again(TOKENS), model(TOKENS)) and not torch.equal(again(TOKENS), plain(TOKENS))
    torch.testing.assert_close(with_hooks(theirs(base), folder)(TOKENS).logits, again(TOKENS), rtol=0, atol=2e-6)
    assert torch.equal(generate(again, TOKENS, 3)[:, 20], again(TOKENS)[:, -1].argmax(-1))


@pytest.mark.parametrize("name", TECHNIQUES)
def test_it_begins_near_the_model_and_trains_itself_alone(name: str, base: Path) -> None:
    model, plain = begun(base, name, moved=False), hf.load(base)
    apart = float((model(TOKENS) - plain(TOKENS)).abs().max().detach())
    assert apart == 0 if name == "parallel" else 0 < apart < 0.02
    own = adapters(model)
    width = max(1, int(32 // model.config.adapters[0].reduction_factor))
    places = 2 * len(model.config.adapters[0].blocks)
    assert sum(one.numel() for one in own.values()) == places * (2 * 32 * width + width + 32)
    assert model.config.trained_params == sum(one.numel() for one in own.values())
    model(TOKENS).square().sum().backward()
    assert all(one.grad is not None for one in own.values())
    assert all(one.grad is None for one in model.parameters() if not one.requires_grad)


def test_what_other_folders_say_is_refused(base: Path, tmp_path: Path) -> None:
    folder = written(begun(base, "pfeiffer"), base, tmp_path / "adapter")
    with pytest.raises(SpecError, match="'pfeiffer' is not around linears"):
        merge(folder, tmp_path / "merged")
    values = json.loads((folder / "adapter_config.json").read_text())
    for name, value in {"phm_layer": True, "ln_after": True, "non_linearity": "tanh", "mh_adapter": True}.items():
        changed = {**values, "config": {**values["config"], name: value}}
        (folder / "adapter_config.json").write_text(json.dumps(changed))
        with pytest.raises(ArtifactError, match="none of AdapterHub's") as caught:
            hf.load(folder)
        assert name in str(caught.value) or name in ("ln_after", "mh_adapter")
    (folder / "adapter_config.json").write_text(json.dumps({**values, "model_name": "owner/base"}))
    with pytest.raises(ArtifactError, match="belongs to owner/base"):
        hf.load(folder)
