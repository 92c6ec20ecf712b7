"""Weights of the model itself that train with LoRA: token rows, modules to save, biases; tied embeddings; PEFT both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hone.base.errors import ArtifactError, SpecError
from hone.exports.merged.spec import MergeSpec
from hone.exports.merged.write import merge
from hone.model import hf
from hone.model.adapters import ADAPTERS, peft
from hone.model.adapters.trainable import Trainable
from hone.model.decoder import Decoder, build
from hone.model.shape import Shape
from tests.model.adapters.test_techniques import SIZES, TOKENS, adapters, library, theirs

LORA = {"kind": "lora", "rank": 2, "target_modules": ["q_proj", "k_proj", "v_proj"]}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "token rows": {"trainable_token_indices": [3, 7, 49]},
    "head and embedding": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "head": {"modules_to_save": ["lm_head"]},
    "norms": {"modules_to_save": ["norm"]},
    "biases": {"bias": "all"},
    "biases of wrapped": {"bias": "lora_only"},
    "pissa with rows": {"kind": "pissa", "trainable_token_indices": [1], "bias": "all"},
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "apart"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "model"
    shape = Shape(**SIZES, max_seq_len=64, family="qwen2", tie_embeddings=request.param)
    hf.save(build(shape.config(50), seed=1), folder)
    return folder


def begun(base: Path, spec: dict[str, Any], *, moved: bool = True) -> Decoder:
    model = Trainable(hf.Checkpoint(base), ADAPTERS.read({**LORA, **spec})).build("cpu", torch.float32)
    draw = torch.Generator().manual_seed(0)
    for name, part in adapters(model).items() if moved else ():
        with torch.no_grad():  # the model's own by their size, for logits of the size of the model's
            std = 0.2 if "lora_" in name else 0.02
            part.add_(torch.empty_like(part).normal_(std=std, generator=draw))
    return model


def written(model: Decoder, base: Path, folder: Path) -> Path:
    """Its PEFT folder, of the state that a training would write."""
    names, tensors = peft.keys(model.config), dict[str, torch.Tensor]()
    for name, tensor in hf.state(model):
        if name in names:
            tensors[names[name]] = tensor
    adapter, tensors = model.config.adapters[0].exported(tensors)
    peft.write(folder, model.config.model_copy(update={"adapters": (adapter,)}), tensors, str(base))
    return folder


@pytest.mark.parametrize("name", TECHNIQUES)
def test_what_is_trained_is_what_was_named(name: str, base: Path) -> None:
    model, plain = begun(base, TECHNIQUES[name], moved=False), hf.load(base)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), plain(TOKENS), rtol=0, atol=2e-6)
    own = adapters(model)
    assert sum(one.numel() for one in own.values()) == model.config.trained_params
    assert len(own) > len([key for key in own if "lora_" in key])
    model(TOKENS).square().sum().backward()
    assert all(one.grad is not None for one in own.values())
    assert all(one.grad is None for one in model.parameters() if not one.requires_grad)


@torch.no_grad()
@pytest.mark.parametrize("name", TECHNIQUES)
def test_peft_computes_what_hone_wrote(name: str, base: Path, tmp_path: Path) -> None:
    model = begun(base, TECHNIQUES[name])
    folder = written(model, base, tmp_path / "adapter")
    again = hf.load(folder)
    torch.testing.assert_close(again(TOKENS), model(TOKENS), rtol=0, atol=1e-5)
    assert again.config.tie_embeddings == model.config.tie_embeddings
    loaded = library().PeftModel.from_pretrained(theirs(base), str(folder)).eval()
    # Rounding: PEFT in float32 is as far as this from PEFT in float64.
    torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS), rtol=0, atol=1e-5)
    merged = merge(folder, tmp_path / "merged", MergeSpec(dtype="float32"))
    plain = hf.load(merged.path)
    assert not plain.config.adapters
    torch.testing.assert_close(plain(TOKENS), model(TOKENS), rtol=0, atol=5e-5)
    torch.testing.assert_close(theirs(merged.path)(TOKENS).logits, model(TOKENS), rtol=0, atol=5e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {"trainable_token_indices": [3, 7]},
        {"trainable_token_indices": {"embed_tokens": [3, 7]}},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["lm_head", "input_layernorm"]},
        {"bias": "all"},
    ],
    ids=str,
)
def test_hone_computes_what_peft_wrote(options: dict[str, Any], base: Path, tmp_path: Path) -> None:
    """Also where PEFT parted a tied head from its embedding."""
    config = library().LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=4, target_modules=["q_proj"], **options)
    model = library().get_peft_model(theirs(base), config)
    draw = torch.Generator().manual_seed(0)
    for part in model.parameters():
        if part.requires_grad:
            part.add_(torch.empty_like(part).normal_(std=0.2, generator=draw))
    model.save_pretrained(tmp_path / "adapter")
    ours = hf.load(tmp_path / "adapter")
    torch.testing.assert_close(ours(TOKENS), model.eval()(TOKENS).logits, rtol=0, atol=5e-6)


def test_a_tied_head_stays_tied(base: Path, tmp_path: Path) -> None:
    folder = written(begun(base, TECHNIQUES["head"]), base, tmp_path / "adapter")
    tensors = load_file(folder / peft.WEIGHTS)
    values = json.loads((folder / peft.CONFIG).read_text())
    head = tensors["base_model.model.lm_head.weight"]
    if hf.load(base).config.tie_embeddings:
        assert torch.equal(head, tensors["base_model.model.model.embed_tokens.weight"])
        assert values["modules_to_save"] == ["embed_tokens", "lm_head"] and values["ensure_weight_tying"]
        assert hf.load(folder).lm_head is None
    else:
        assert values["modules_to_save"] == ["lm_head"]
        assert "base_model.model.model.embed_tokens.weight" not in tensors


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"trainable_token_indices": [50]}, "outside the vocabulary of 50"),
        ({"trainable_token_indices": [3, 3]}, "named twice"),
        ({"trainable_token_indices": [3], "modules_to_save": ["embed_tokens"]}, "train whole"),
        ({"modules_to_save": ["q_proj"]}, "name no embedding, head or norm"),
        ({"bias": "lora_only", "target_modules": ["q_proj"]}, "give target_modules all|holds with those of"),
    ],
)
def test_what_is_not_there_is_one_error(spec: dict[str, Any], said: str, base: Path) -> None:
    with pytest.raises(SpecError, match=said):
        begun(base, spec)


def test_rows_of_other_modules_are_refused(base: Path, tmp_path: Path) -> None:
    folder = written(begun(base, TECHNIQUES["token rows"]), base, tmp_path / "adapter")
    values = json.loads((folder / peft.CONFIG).read_text())
    (folder / peft.CONFIG).write_text(json.dumps(values | {"trainable_token_indices": {"lm_head": [3]}}))
    with pytest.raises(ArtifactError, match="not of embed_tokens alone"):
        hf.load(folder)
