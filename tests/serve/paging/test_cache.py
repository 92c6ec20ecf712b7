"""Caches that a mixer declares: the engine allocates, shares, wipes and measures them without knowing what they hold."""

from __future__ import annotations

import pytest
import torch

from hone.base.errors import SpecError
from hone.model.config import LayerSpec
from hone.model.decoder import Decoder, build
from hone.model.incremental import generate
from hone.model.mixers import MIXERS
from hone.serve.engine import Engine, EngineSpec
from tests.serve.small import VOCAB, assert_all_free, decoder, dense_greedy, engine, greedy, poison_freed_pages

PROMPTS = [[(7 * i + 3 * j) % VOCAB for j in range(1, 4 + 5 * i)] for i in range(5)]
MLA = {"kind": "mla", "num_heads": 3, "head_dim": 8, "rope_dim": 4, "latent_dim": 12}


def stack(*mixers: dict) -> Decoder:
    """A random model of these mixers whose greedy text is not constant."""
    plain = decoder(num_layers=len(mixers)).config
    layers = [LayerSpec(mixer=mixer, feed_forward=layer.feed_forward) for mixer, layer in zip(mixers, plain.layers)]
    model = build(plain.model_copy(update={"layers": tuple(layers)}), seed=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(1.0 / 0.02 * (0.6 if "embedding" in name else 0.35))
    return model


def check_served(model: Decoder, **spec) -> Engine:
    """Same tokens as full forward passes: chunks, prefix hits, a pool too small for all, poisoned pages."""
    one = engine(model, num_pages=22, max_num_batched_tokens=9, **spec)
    poison_freed_pages(one)
    expected = [dense_greedy(model, prompt, 20) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS), "texts that are all alike show nothing"
    for _ in range(2):
        assert [done.tokens for done in one.generate(PROMPTS, greedy(20))] == expected
    assert one.stats()["prefix_hit_tokens"] > 0
    assert_all_free(one)
    return one


def test_a_latent_cache_is_one_new_file_and_one_line_in_the_table(monkeypatch):
    monkeypatch.setitem(MIXERS.rows, "latent", "tests.serve.latent:LatentMixer")
    model = stack(
        {"kind": "latent", "num_heads": 4, "latent_dim": 10}, {"kind": "latent", "num_heads": 2, "latent_dim": 6}
    )
    one = check_served(model)
    assert one.cache_bytes == 23 * 4 * (10 + 6) * 4  # pages and the null page, tokens, latents, bytes
    assert model.config.kv_bytes_per_token(4) == (10 + 6) * 4
    prompt = torch.tensor([PROMPTS[2]])
    assert generate(model, prompt, 20)[0, len(PROMPTS[2]) :].tolist() == dense_greedy(model, PROMPTS[2], 20)


@pytest.mark.parametrize("more", [{}, {"q_latent_dim": 6, "value_dim": 5}])
def test_multi_head_latent_attention_is_served(more):
    check_served(stack({**MLA, **more}, {**MLA, **more}))


def test_one_stack_may_keep_latents_keys_and_nothing():
    """A layer that borrows keys keeps none; sizes differ from layer to layer."""
    attention = {"kind": "attention", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    borrowing = {"kind": "shared_kv", "num_heads": 4, "head_dim": 8}
    one = check_served(stack(MLA, attention, borrowing))
    assert [sorted(tensors) for tensors in one.runner.cache.layers] == [["latent"], ["k", "v"], []]


def test_a_draft_model_may_have_a_latent_cache_of_its_own():
    """A draft model with a latent cache of its own shares the model's page numbers."""
    model, draft = stack(MLA, MLA), stack(MLA)
    one = engine(model, draft)
    assert [done.tokens for done in one.generate(PROMPTS, greedy(16))] == [dense_greedy(model, p, 16) for p in PROMPTS]
    assert one.stats()["draft_tokens"] > 0
    assert one.cache_bytes == 65 * 4 * 16 * 4 * 3


def test_state_that_is_in_no_page_is_refused_by_name():
    with pytest.raises(SpecError, match="layer 1: mixer 'retnet'"):
        Engine(stack(MLA, {"kind": "retnet", "num_heads": 4, "head_dim": 8}), EngineSpec(num_pages=8))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_cache_may_have_fewer_bits_than_the_weights(dtype):
    model = decoder()
    one = engine(model, kv_cache_dtype=dtype)
    assert one.cache_bytes == engine(model).cache_bytes / 2
    assert one.runner.cache.layers[0]["k"].dtype == getattr(torch, dtype)
    done = one.generate([PROMPTS[2]], greedy(8, logprobs=0))[0]
    logits = model(torch.tensor([PROMPTS[2] + done.tokens]))[0].log_softmax(-1)
    for place, (token, found) in enumerate(zip(done.tokens, done.logprobs)):
        exact = float(logits[len(PROMPTS[2]) + place - 1, token].detach())
        assert found.logprob == pytest.approx(exact, abs=0.1)
    assert done.logprobs[0].logprob != float(logits[len(PROMPTS[2]) - 1, done.tokens[0]].detach())
