"""Dense models that become mixtures of experts: the same losses, by transformers too, tensors that are those of the dense one, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hone.base.errors import SpecError
from hone.model import hf
from hone.model.decoder import Decoder
from hone.model.growth import GROWTHS
from hone.model.growth.base import grown_checkpoint
from hone.model.shape import Shape
from tests.model.growth.test_growth import losses, random_weights

TOKENS = torch.arange(2 * 40).reshape(2, 40) * 7 % 97
EXACT: dict[str, dict[str, Any]] = {
    "copies": {"num_experts": 4},
    "one of four": {"num_experts": 4, "router": {"top_k": 1}},
    "quarters": {"num_experts": 8, "granularity": 4, "router": {"top_k": 4}, "capacity_factor": 1.5},
    "every second layer": {"num_experts": 6, "granularity": 2, "router": {"top_k": 4}, "every_nth": 2},
    "shared": {"num_experts": 4, "granularity": 2, "num_shared_experts": 3, "shared_gate": True},
    "sigmoid": {
        "num_experts": 8, "granularity": 2, "num_shared_experts": 1, "balance": ["bias"],
        "router": {"kind": "sigmoid", "scale": 2.5, "num_groups": 2, "top_groups": 1},
    },
}  # fmt: skip
_MIXTRAL = dict.fromkeys(("copies", "one of four", "quarters"), "mixtral")
FAMILIES: dict[str, dict[str, str]] = {
    "llama": _MIXTRAL,
    "mistral": _MIXTRAL,
    "qwen3": dict.fromkeys((*_MIXTRAL, "every second layer"), "qwen3_moe"),
    "qwen2": {"shared": "qwen2_moe"},
    "phi3": {},
    "olmo2": {},
}
"""Of a dense family the families of its upcycled models; those that are not named stay in its own, which hone alone reads."""


def dense(family: str, folder: Path, **sizes: Any) -> Decoder:
    """A random model of four layers, norms and biases included, written to `folder`."""
    options = {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48, "max_seq_len": 64, **sizes}
    model = random_weights(Shape(family=family, hidden_size=32, **options).config(97)).eval()
    hf.save(model, folder)
    return model


def upcycled(folder: Path, seed: int = 0, **options: Any) -> Decoder:
    growth = GROWTHS.read({"kind": "upcycle", **options})
    return grown_checkpoint(hf.Checkpoint(folder), [growth], seed).build(dtype=torch.float32).eval()


@pytest.mark.filterwarnings("ignore:Only hone reads this folder")
@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_the_dense_models_by_transformers_too(family: str, tmp_path: Path) -> None:
    before = losses(dense(family, tmp_path / "dense"), TOKENS)
    for name, options in EXACT.items():
        assert GROWTHS.read({"kind": "upcycle", **options}).exact
        made = upcycled(tmp_path / "dense", **options)
        assert made.config.num_params == sum(one.numel() for one in made.parameters())
        torch.testing.assert_close(losses(made, TOKENS), before, atol=1e-5, rtol=0)
        theirs = FAMILIES[family].get(name)
        assert made.config.family == (theirs or family)
        hf.save(made, tmp_path / name)
        assert hf.Checkpoint(tmp_path / name).config == made.config
        if theirs:
            again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
            assert again.num_parameters() == made.config.num_params
            torch.testing.assert_close(losses(again.eval(), TOKENS), before, atol=2e-5, rtol=0)


def test_counts_of_parameters(tmp_path: Path) -> None:
    """By hand: each expert has 3 D w weights, each layer a router, and a bias or a gate where there is one."""
    small = dense("llama", tmp_path).config
    each, per_layer = small.num_params, 3 * 32 * 48
    for name, options in EXACT.items():
        config = upcycled(tmp_path, **options).config
        layers = 2 if name == "every second layer" else 4
        experts, shared = options["num_experts"], options.get("num_shared_experts", 0)
        width = 48 // options.get("granularity", 1)
        added = (experts + shared) * 3 * 32 * width - per_layer + 32 * experts
        added += {"shared": 32, "sigmoid": experts}.get(name, 0)
        assert config.num_params == each + layers * added
        visited = options.get("router", {}).get("top_k", 2)
        assert config.active_params == config.num_params - layers * (experts - visited) * 3 * 32 * width


def test_experts_are_the_dense_tensors(tmp_path: Path) -> None:
    block = dense("phi3", tmp_path).layers[2].feed_forward  # its gate and up are one module
    gate, up = block.gate_up.weight.split(48)
    made = upcycled(tmp_path, num_experts=6, granularity=3, router={"top_k": 3, "scale": 2.0}, num_shared_experts=4).layers[2].feed_forward  # fmt: skip
    for expert in range(6):
        part = slice(16 * (expert % 3), 16 * (expert % 3 + 1))
        assert torch.equal(made.gate_up.weight[expert], torch.cat((gate[part], up[part])))
        share = 1 / 3 if expert % 3 == 0 else 1 / 2  # the first part has two shared copies, the others one
        torch.testing.assert_close(made.down.weight[expert], block.down.weight[:, part] * share * 3 / 2.0)
    shared_gate, shared_up = made.shared_gate_up.weight.split(64)
    assert torch.equal(shared_gate, torch.cat((gate, gate[:16]))) and torch.equal(shared_up, torch.cat((up, up[:16])))
    router = made.router.weight
    assert torch.equal(router, router[::3].repeat_interleave(3, 0)) and not torch.equal(router[0], router[3])
    assert 0.01 < router.std() < 0.03


def test_noise_and_channels_that_are_drawn_anew(tmp_path: Path) -> None:
    """The seed decides; noise has the size that is said, and the same channels leave gate, up and down of an expert."""
    block = dense("llama", tmp_path).layers[0].feed_forward
    noisy = upcycled(tmp_path, num_experts=4, noise_std=0.1).layers[0].feed_forward
    for mine, given in (
        (noisy.gate_up.weight[:, :48], block.gate_up.weight[:48]),
        (noisy.down.weight, block.down.weight),
    ):
        relative = (mine - given).std((1, 2)) / given.square().mean().sqrt()
        torch.testing.assert_close(relative, torch.full_like(relative, 0.1), atol=0.012, rtol=0)
    made = upcycled(tmp_path, num_experts=4, reinitialize=0.25)
    drawn = made.layers[0].feed_forward
    kept = []
    for expert in range(4):
        gate, up = (drawn.gate_up.weight[expert] == block.gate_up.weight).all(1).split(48)
        down = (drawn.down.weight[expert] == block.down.weight).all(0)
        assert torch.equal(gate, up) and torch.equal(gate, down) and int(gate.sum()) == 36
        kept.append(tuple(gate.tolist()))
        new, old = drawn.down.weight[expert][:, ~down], block.down.weight[:, ~down]
        assert abs(new.std() / old.std() - 1) < 0.15 and abs(new.mean() - old.mean()) < 0.15 * old.std()
    assert len(set(kept)) == 4
    again, other = (upcycled(tmp_path, seed, num_experts=4, reinitialize=0.25) for seed in (0, 1))
    same = [torch.equal(mine, one) for mine, one in zip(made.parameters(), again.parameters(), strict=True)]
    assert all(same) and not torch.equal(other.layers[0].feed_forward.down.weight, drawn.down.weight)
    for name in ("noise_std", "reinitialize"):
        assert not GROWTHS.read({"kind": "upcycle", name: 0.5}).exact


@torch.no_grad()
def test_without_normalization_the_mean_is_the_dense_one(tmp_path: Path) -> None:
    """Where all scores are equal it is exact; it does not say that it is."""
    before = dense("llama", tmp_path)(TOKENS)
    for router, size in (
        ({"top_k": 2, "normalize": False}, 1),
        ({"kind": "sigmoid", "top_k": 4, "normalize": False}, 2),
    ):
        options = {"num_experts": 8, "granularity": size, "router": router}
        assert not GROWTHS.read({"kind": "upcycle", **options}).exact
        made = upcycled(tmp_path, **options)
        for layer in made.layers:
            layer.feed_forward.router.weight.mul_(1e-3)  # groups stay in order, scores are nearly equal
        torch.testing.assert_close(made(TOKENS), before, atol=2e-3, rtol=1e-3)
    assert not GROWTHS.read({"kind": "upcycle", "granularity": 2, "router": {"top_k": 3}}).exact, "half a copy"


def test_copies_part_in_training(tmp_path: Path) -> None:
    """Experts see other tokens, so that their gradients differ."""
    dense("llama", tmp_path)
    made = upcycled(tmp_path, num_experts=4, router={"top_k": 1}).train()
    torch.nn.functional.cross_entropy(made(TOKENS)[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    gradients = made.layers[1].feed_forward.down.weight.grad
    assert all((gradients[one] - gradients[0]).norm() > 0.1 * gradients[0].norm() for one in range(1, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 6, "granularity": 4}, "6 is no multiple of granularity 4"),
        ({"num_experts": 10, "granularity": 5}, "48 feed-forward channels, which granularity 5 does not divide"),
        ({"router": "hash"}, "'hash' does not let copies"),
        ({"num_experts": 4, "router": {"top_k": 5}}, "sends a token to 5 of 4 experts"),
        ({"shared_gate": True}, "shared_gate needs num_shared_experts"),
        ({"every_nth": 5}, "every_nth is 5, and the model has 4 layers"),
    ],
)
def test_what_cannot_be_upcycled_is_said(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    dense("llama", tmp_path)
    with pytest.raises(SpecError) as error:
        upcycled(tmp_path, **options)
    assert message in str(error.value) and error.value.fix


def test_other_feed_forwards_are_refused(tmp_path: Path) -> None:
    dense("gemma2", tmp_path / "gelu")
    with pytest.raises(SpecError, match="'geglu' of layer 0 computes something else"):
        upcycled(tmp_path / "gelu")
    dense("llama", tmp_path / "llama")
    growths = [GROWTHS.read({"kind": "upcycle", "every_nth": 2})] * 2
    with pytest.raises(SpecError, match="'moe' of layer 1 already has experts"):
        grown_checkpoint(hf.Checkpoint(tmp_path / "llama"), growths)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
@torch.no_grad()
def test_experts_grow_wider_with_the_same_logits(family: str, tmp_path: Path) -> None:
    """Every expert's channels, and with them the shared experts'; transformers computes the same."""
    moe = {"kind": "moe", "num_experts": 4, "intermediate_size": 12}
    moe |= {"num_shared_experts": 2, "shared_gate": True} if family == "qwen2_moe" else {}
    before = dense(family, tmp_path / "small", num_layers=2, feed_forward=(moe,))(TOKENS)
    for options in (
        {"kind": "net2net", "intermediate_size": 24, "hidden_size": 64},
        {"kind": "net2net", "intermediate_size": 20, "mapping": "random", "shares": "even"},
        {"kind": "zero_expansion", "intermediate_size": 28, "num_heads": 8, "num_kv_heads": 4},
        {"kind": "bert2bert", "intermediate_size": 24},
    ):
        growth = GROWTHS.read(options)
        made = grown_checkpoint(hf.Checkpoint(tmp_path / "small"), [growth]).build(dtype=torch.float32).eval()
        assert made.config.layers[1].feed_forward.intermediate_size == options["intermediate_size"]
        assert made.config.num_params == sum(one.numel() for one in made.parameters())
        hf.save(made, tmp_path / "large")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "large", dtype=torch.float32).eval()
        torch.testing.assert_close(again(TOKENS).logits, made(TOKENS), atol=2e-5, rtol=1e-4)
        same = torch.allclose(made(TOKENS), before, atol=2e-5, rtol=1e-4)
        assert same == growth.exact
