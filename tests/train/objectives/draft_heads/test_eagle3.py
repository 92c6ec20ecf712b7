"""EAGLE-3 heads: the layer against plain torch, unrolled steps against guessing one token after another, files under both peers' names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from hone.base.errors import ArtifactError, SpecError
from hone.model.context import Causal, Packed
from hone.model.decoder import Decoder
from hone.model.drafters import eagle3
from hone.model.drafters.eagle3_config import default_taps
from hone.train import OBJECTIVES
from hone.train.objectives.draft_heads.fits import with_heads
from hone.train.stage import Train
from tests.serve.small import decoder

TOKENS = torch.arange(18).reshape(2, 9) * 5 % 61


def beside(model: Decoder, **options: Any) -> Any:
    """The objective, whose head is beside `model` and not what it was at the start."""
    objective = OBJECTIVES.read({"kind": "eagle3", "ttt_length": 3, "decay": 0.5, **options})
    with_heads(objective, model, None, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return objective


def tapped(model: Decoder, objective: Any, context: Any, tokens: Tensor = TOKENS) -> Tensor:
    context.taps = context.memo["taps"] = dict.fromkeys(objective.own_taps(len(model.layers)))
    return model.hidden(tokens, context)


def plain_layer(tensors: dict[str, Tensor], config: dict[str, Any], embedded: Tensor, h: Tensor) -> Tensor:
    """The head's layer [S, D] -> [S, D] from the tensors of its file, without anything of hone's."""
    eps, heads, kv, width = (
        config[name] for name in ("rms_norm_eps", "num_attention_heads", "num_key_value_heads", "head_dim")
    )

    def weight(name: str) -> Tensor:
        return tensors[f"midlayer.{name}.weight"]

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight(name)

    both = torch.cat((norm(embedded, "input_layernorm"), norm(h, "hidden_norm")), -1)
    q, k, v = ((both @ weight(f"self_attn.{one}_proj").T).unflatten(-1, (-1, width)).transpose(0, 1) for one in "qkv")
    angles = torch.arange(len(h))[:, None] * config["rope_theta"] ** (-torch.arange(0, width, 2) / width)
    cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    k, v = (one.repeat_interleave(heads // kv, 0) for one in (turned(k), v))
    mixed = F.scaled_dot_product_attention(turned(q), k, v, is_causal=True).transpose(0, 1).flatten(1)
    x = h + mixed @ weight("self_attn.o_proj").T
    fed = norm(x, "post_attention_layernorm")
    gate, up = (fed @ weight(f"mlp.{one}_proj").T for one in ("gate", "up"))
    return x + (F.silu(gate) * up) @ weight("mlp.down_proj").T


@torch.no_grad()
def test_the_layer_is_that_of_its_file(tmp_path: Path) -> None:
    model = decoder()
    objective = beside(model, draft_vocab_size=40)
    objective.save(model.drafter, model.config, tmp_path, "nowhere", torch.float32)
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == 40
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    assert tensors["t2d"].dtype == torch.bool and int(tensors["t2d"].sum()) == 40
    ids = torch.arange(40) + tensors["d2t"]
    assert torch.equal(ids, tensors["t2d"].nonzero().flatten())
    context = Causal(TOKENS[:1])
    tapped(model, objective, context, TOKENS[:1])
    head = eagle3.load(tmp_path, len(model.layers), "cpu", torch.float32)
    h, embedded = head.fuse(context.memo["taps"]), head.embed(TOKENS[:1].roll(-1, 1), model)
    states = torch.cat([context.memo["taps"][layer] for layer in default_taps(2)], -1)
    assert torch.allclose(h, states @ tensors["fc.weight"].T, atol=1e-5)
    own = Causal(TOKENS[:1])
    head.prepare(embedded, own)
    found = head(embedded, h, own)
    assert torch.allclose(found[0], plain_layer(tensors, config, embedded[0], h[0]), atol=1e-4)
    logits = F.rms_norm(found, (32,), tensors["norm.weight"], config["rms_norm_eps"]) @ tensors["lm_head.weight"].T
    assert torch.allclose(head.logits(found), logits, atol=1e-4)


@torch.no_grad()
def test_the_loss_is_of_guessing_on_from_every_position() -> None:
    """Every position guesses token after token with a whole pass each, which the unrolled steps do for all positions at once."""
    model = decoder()
    objective = beside(model, draft_vocab_size=50)
    ids = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
    targets = torch.where(ids == ids.roll(-1, 1), TOKENS.roll(-1, 1), -100)
    targets[:, -1] = -100
    context, expected = Packed(ids), 0.0
    loss = objective.total_in(model, tapped(model, objective, context), targets, context, None, None)
    head = model.drafter
    for row, (first, last) in ((0, (0, 4)), (0, (4, 9)), (1, (0, 9))):
        tokens = TOKENS[row : row + 1, first:last]
        whole = Causal(tokens)
        theirs = model.head(tapped(model, objective, whole, tokens))[0, :, head.draft_ids]
        states = head.fuse(whole.memo["taps"])
        for at in range(last - first):
            h = states[:, : at + 1]
            for step in range(3):
                if at + step + 2 >= last - first:
                    break  # no token follows that the head could have guessed
                read = tokens[:, 1 : at + step + 2]
                own = Causal(read)
                embedded = head.embed(read, model)
                head.prepare(embedded, own)
                g = head(embedded, h, own)[:, -1:]
                p = theirs[at + step + 1].log_softmax(-1)
                expected += 0.5**step * float((p.exp() * (p - head.logits(g)[0, 0].log_softmax(-1))).sum())
                h = torch.cat((h, g), 1)
    assert float(loss) == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def test_a_folder_of_speculators_is_the_same_head(tmp_path: Path) -> None:
    """Its config has the layer's sizes inside, its tensors other names, and layers are counted as vLLM does."""
    model = decoder(num_layers=6)
    objective = beside(model, layers=(0, 2, 5))
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    objective.save(model.drafter, model.config, ours, "nowhere", torch.float32)
    theirs.mkdir()
    values = json.loads((ours / "config.json").read_text())
    layer = {name: one for name, one in values.items() if not name.startswith(("eagle", "draft", "arch", "target"))}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": values["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        "norm_before_residual": True,
    }
    (theirs / "config.json").write_text(json.dumps(config))
    tensors = load_file(ours / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): one for name, one in tensors.items()}
    save_file({**renamed, "embed_tokens.weight": model.embedding.detach().clone() * 2}, theirs / "model.safetensors")
    one, other = (eagle3.load(folder, 6, "cpu", torch.float32) for folder in (ours, theirs))
    assert one.config.taps == other.config.taps == (0, 2, 5)
    assert other.config.norm_before_residual and not one.config.norm_before_residual
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    assert torch.equal(other.embed(TOKENS, model), 2 * one.embed(TOKENS, model))


def test_the_heads_tokens_are_the_most_frequent_ones() -> None:
    import numpy as np

    model = decoder()
    counts = np.zeros(61, dtype=np.int64)
    counts[[7, 3, 50]] = 5, 9, 1
    head = OBJECTIVES.read({"kind": "eagle3", "draft_vocab_size": 4}).begin(model, counts, 0)
    assert head.draft_ids.tolist() == [0, 3, 7, 50]


def test_broken_folders_are_named(tmp_path: Path) -> None:
    model = decoder()
    objective = beside(model, draft_vocab_size=40)
    objective.save(model.drafter, model.config, tmp_path, "nowhere", torch.float32)
    path, config = tmp_path / "config.json", json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(SpecError, match="after layer 1, the model has layers 0 to 0"):
        eagle3.load(tmp_path, 1, "cpu", torch.float32)
    path.write_text(json.dumps({**config, "draft_vocab_size": 39}))
    with pytest.raises(ArtifactError, match=r"lm_head.weight is \[40, 32\], config.json says \[39, 32\]"):
        eagle3.load(tmp_path, 2, "cpu", torch.float32)
    path.write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(SpecError, match="the head has 2 layers"):
        eagle3.load(tmp_path, 2, "cpu", torch.float32)
    path.write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if name != "d2t"}, tmp_path / "model.safetensors")
    with pytest.raises(ArtifactError, match="no d2t that says which"):
        eagle3.load(tmp_path, 2, "cpu", torch.float32)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers": (0, 1)}, "reads three of the layers 0 to 1"),
        ({"layers": (0, 1, 2)}, "reads three of the layers 0 to 1"),
        ({"ttt_length": 16}, "unrolls 16 steps, and sequences of 16 tokens"),
    ],
)
def test_options_that_do_not_fit_the_model_are_named(options: dict[str, Any], said: str) -> None:
    objective = Train.read({"objective": {"kind": "eagle3", **options}}).objective
    with pytest.raises(SpecError, match=said):
        objective.check(decoder().config, 16)
