"""Models with mixtures of experts: declared, counted, patterned, saved, generated from and refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hone.ops
from hone.base.errors import SpecError
from hone.model import hf
from hone.model.config import ModelConfig
from hone.model.context import Causal
from hone.model.decoder import build
from hone.model.feed_forwards import moe_fused
from hone.model.incremental import generate
from hone.model.shape import Shape
from hone.ops.dispatch import Choice

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 24}
TOKENS = torch.arange(40).view(2, 20) * 7 % 50


def config(*entries: Any, **sizes: Any) -> ModelConfig:
    return Shape(**{**SIZES, **sizes}, max_seq_len=64, feed_forward=entries).config(50)


def moe(**options: Any) -> dict[str, Any]:
    return {"kind": "moe", "num_experts": 4, **options}


def test_a_pattern_repeats_over_the_layers() -> None:
    made = config("swiglu", moe(intermediate_size=8), num_layers=4)
    assert [layer.feed_forward.kind for layer in made.layers] == ["swiglu", "moe"] * 2
    assert [layer.feed_forward.intermediate_size for layer in made.layers] == [24, 8] * 2
    assert Shape(**SIZES, feed_forward="moe").feed_forward == ("moe",)
    with pytest.raises(SpecError, match="there is no feed-forward 'moo'"):
        Shape.read({"feed_forward": "moo"})
    with pytest.raises(SpecError, match="feed_forward names 3 layers, num_layers is 2"):
        config("swiglu", "swiglu", "moe")


def test_parameters_and_operations_count_what_a_token_visits() -> None:
    made = config(moe(router={"kind": "softmax", "top_k": 2}, num_shared_experts=1, balance=["bias"]))
    model = build(made, seed=1)
    expert = 3 * 24 * 32
    assert made.num_params == sum(one.numel() for one in model.parameters())
    assert made.num_params - made.active_params == 2 * 2 * expert  # two layers, two of four experts each
    one_token = made.dims().layers[0].matmul_params
    assert one_token == 2 * 32 * 32 + 2 * 16 * 32 + (2 + 1) * expert + 4 * 32  # attention, visits and shared, router
    assert made.dims().layers[0].intermediate_size == 3 * 24


@pytest.mark.parametrize("router", ["softmax", "sigmoid", "switch", "gshard", "hash"])
def test_a_model_is_saved_with_its_bias_and_decodes_as_whole_passes(router: str, tmp_path: Path) -> None:
    balance = ["bias"] if router in ("softmax", "sigmoid") else []
    made = config(moe(router=router, balance=balance, capacity_factor=1.0, jitter=0.0))
    model = build(made, seed=1).eval()
    with torch.no_grad():
        for layer in model.layers if balance else ():
            layer.feed_forward.router_bias.copy_(torch.randn(4, generator=torch.Generator().manual_seed(0)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that transformers cannot read it
        hf.save(model, tmp_path)
    again = hf.load(tmp_path)
    assert again.config == made
    with torch.no_grad():
        assert torch.equal(again(TOKENS), model(TOKENS))
        written = generate(again, TOKENS[:, :5], 6)
        whole = again(written[:, :-1]).argmax(-1)
    assert torch.equal(written[:, 5:], whole[:, 4:])
    if balance:
        assert not again.layers[0].feed_forward.router_bias.requires_grad
        assert torch.equal(again.layers[0].feed_forward.router_bias, model.layers[0].feed_forward.router_bias)


@pytest.mark.parametrize("router", ["expert_choice", "soft"])
def test_routers_that_see_later_tokens_do_not_generate(router: str) -> None:
    model = build(config(moe(router=router)), seed=1)
    assert model(TOKENS).isfinite().all()
    with pytest.raises(SpecError, match=f"layer 0 routes by '{router}'"):
        generate(model, TOKENS, 2)


def test_a_pass_counts_once_and_only_with_gradients() -> None:
    model, seen = build(config(moe()), seed=1), Causal(TOKENS)
    model(TOKENS, seen)
    assert sorted(seen.routing) == [0, 1] and all(one[:4].sum() == 2 * TOKENS.numel() for one in seen.routing.values())
    with torch.no_grad():
        model(TOKENS, silent := Causal(TOKENS))
    assert not silent.routing


ROUTERS = [
    {"kind": "softmax", "top_k": 3, "normalize": False, "scale": 1.5},
    {"kind": "sigmoid", "top_k": 2},
    {"kind": "softmax", "top_k": 2, "num_groups": 2, "top_groups": 1},  # a choice that the kernel does not make
    {"kind": "switch"},
    {"kind": "hash"},
]


@pytest.mark.parametrize("router", ROUTERS, ids=[f"{one['kind']}{one.get('num_groups', '')}" for one in ROUTERS])
def test_the_layer_in_few_kernels_is_the_layer_in_steps(
    router: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    balance = ["bias"] if router["kind"] in ("softmax", "sigmoid") else []
    model = build(config(moe(router=router, balance=balance, num_shared_experts=1)), seed=1).eval()
    for layer in model.layers if balance else ():
        layer.feed_forward.router_bias.data.copy_(torch.linspace(-0.3, 0.3, 4))
    with torch.no_grad():
        wanted = model(TOKENS)
    called = fused_on_a_cpu(monkeypatch)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), wanted, rtol=1e-5, atol=1e-6)
    own = router["kind"] in ("softmax", "sigmoid") and "num_groups" not in router
    assert called == (["choose_experts", "expert_swiglu"] if own else ["expert_swiglu"]) * 2


def test_what_watches_a_linear_of_experts_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = build(config(moe()), seed=1), []
    called = fused_on_a_cpu(monkeypatch)
    model(TOKENS)
    assert not called  # with gradients
    hook = model.layers[0].feed_forward.down.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    with torch.no_grad():
        model(TOKENS)
        assert seen == [2 * TOKENS.numel()] and called == ["choose_experts", "expert_swiglu"]  # of the other layer
        hook.remove()
        model(TOKENS)
    assert len(seen) == 1 and len(called) == 6


def fused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets CPUs take the path of GPUs, with the operations' references; the names of those that are called come to the list."""
    called: list[str] = []

    def told(name: str) -> Callable[..., Any]:
        operation = getattr(hone.ops, name)
        return lambda *given, **options: called.append(name) or operation(*given, **options)

    monkeypatch.setattr(moe_fused, "_on_gpu", lambda tokens: True)
    monkeypatch.setattr(moe_fused, "choose", lambda *given, **options: Choice("triton", ""))
    monkeypatch.setattr(moe_fused, "runs_kernel", lambda *given, **options: True)
    for name in ("choose_experts", "expert_swiglu"):
        monkeypatch.setattr(moe_fused, name, told(name))
    return called
