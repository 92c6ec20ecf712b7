"""KV caches of 8 bits: tokens equal those of a model that rounds keys and values as it computes, for every source of scales."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hone
from hone.base.errors import SpecError
from hone.cost.cache import keys_and_values, page_bytes
from hone.model.decoder import Decoder
from hone.model.facts import CheckpointFacts
from hone.model.hf import load, save
from hone.model.incremental import generate
from hone.ops import quantize_kv
from hone.ops.dispatch import Where
from hone.serve.engine import Engine, EngineSpec
from hone.serve.paging.cache import KVCache
from hone.serve.paging.scales import cache_format, check_format
from hone.serve.planning import pages_bytes
from tests.serve.small import VOCAB, assert_all_free, decoder, dense_greedy, engine, greedy, poison_freed_pages

PROMPTS = [[(7 * i + 3 * j) % VOCAB for j in range(1, 4 + 5 * i)] for i in range(5)]
KINDS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
LLAMA = keys_and_values(8, 128)


class _EachToken(nn.Module):
    """Keys and values with a scale for each token and head, rounded and back."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        codes = [quantize_kv(one, self.dtype) for one in (k, v)]
        rounded = [(code.float() * scale[..., None]).to(k.dtype) for code, scale in codes]
        return rounded[0], rounded[1]


def rounding(model: Decoder, dtype: torch.dtype) -> Decoder:
    for layer in model.layers:
        layer.mixer.kv_rounding = _EachToken(dtype)
    return model


@pytest.mark.parametrize("dtype", KINDS)
def test_tokens_are_those_of_a_model_that_rounds_each_token(dtype: str) -> None:
    """In chunks, with prefix hits, in a pool too small for all, over poisoned pages."""
    one = engine(decoder(), num_pages=22, max_num_batched_tokens=9, kv_cache_dtype=dtype)
    poison_freed_pages(one)
    oracle = rounding(decoder(), KINDS[dtype])
    expected = [dense_greedy(oracle, prompt, 20) for prompt in PROMPTS]
    for _ in range(2):
        assert [done.tokens for done in one.generate(PROMPTS, greedy(20))] == expected
    assert one.stats()["prefix_hit_tokens"] > 0
    assert_all_free(one)
    done = one.generate([PROMPTS[3]], greedy(4, logprobs=0))[0]
    errors = []
    for model in (oracle, decoder()):
        with torch.no_grad():
            exact = model(torch.tensor([PROMPTS[3] + done.tokens]))[0].log_softmax(-1)
        places = range(len(PROMPTS[3]) - 1, len(PROMPTS[3]) + 3)
        logprobs = [exact[place, token] for place, token in zip(places, done.tokens)]
        errors.append(max(abs(float(a) - b.logprob) for a, b in zip(logprobs, done.logprobs)))
    assert errors[0] < 1e-4 < 1e-3 < errors[1], "nothing was rounded"
    assert one.cache_bytes == 23 * page_bytes([keys_and_values(2, 8)] * 2, 4, str(KINDS[dtype])[6:])
    assert one.cache_bytes == 23 * 4 * 2 * 2 * 2 * (8 + 4)  # pages, tokens, layers, k and v, heads, numbers and a scale


@pytest.mark.parametrize(
    "mixer", [{"window": 6}, {"softcap": 2.0}, {"sinks": True}, {"rotary_dim": 4}, {"qk_norm": True}]
)
def test_every_attention_reads_the_scales(mixer: dict) -> None:
    models = [_with_mixer(mixer), rounding(_with_mixer(mixer), torch.float8_e4m3fn)]
    one = engine(models[0], kv_cache_dtype="fp8")
    expected = [dense_greedy(models[1], prompt, 12) for prompt in PROMPTS]
    assert [done.tokens for done in one.generate(PROMPTS, greedy(12))] == expected


def _with_mixer(options: dict) -> Decoder:
    from hone.model.config import LayerSpec
    from tests.serve.paging.test_cache import stack

    plain = decoder().config.layers
    mixers = [{**layer.mixer.model_dump(), **options} for layer in plain]
    assert isinstance(plain[0], LayerSpec)
    return stack(*mixers)


def test_a_draft_model_has_a_cache_of_8_bits_too() -> None:
    oracle = rounding(decoder(), torch.int8)
    one = engine(decoder(), decoder(1), kv_cache_dtype="int8")
    expected = [dense_greedy(oracle, prompt, 16) for prompt in PROMPTS]
    assert [done.tokens for done in one.generate(PROMPTS, greedy(16))] == expected
    assert one.runner.guesser is not None and one.runner.guesser.cache.layers[0]["k"].dtype == torch.int8


@pytest.fixture
def scaled(tmp_path: Path):
    """scaled(number, per) -> a folder with scales of its KV cache."""

    def make(kind: str, strategy: str) -> Path:
        model = decoder()
        folder = tmp_path / f"{kind}-{strategy}"
        save(model, folder)
        values = json.loads((folder / "config.json").read_text())
        values["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "config_groups": {},
            "ignore": [],
            "kv_cache_scheme": {"num_bits": 8, "type": kind, "strategy": strategy, "dynamic": False, "symmetric": True},
        }
        (folder / "config.json").write_text(json.dumps(values))
        tensors = load_file(folder / "model.safetensors")
        largest = 448.0 if kind == "float" else 127.0
        for layer in range(2):
            for place, name in enumerate(("k_scale", "v_scale")):
                scale = torch.tensor([(6.0, 3.0)[place]]) if strategy == "tensor" else torch.tensor([5.0, 2.0 + place])
                scale = scale if strategy == "tensor" else scale.view(2, 1, 1)
                tensors[f"model.layers.{layer}.self_attn.{name}"] = scale / largest
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


@pytest.mark.parametrize(("kind", "strategy"), [("float", "tensor"), ("int", "attn_head")])
def test_a_folder_with_scales_is_served_from_them(kind: str, strategy: str, scaled) -> None:
    """Also what lies beyond the largest code; tokens are those of decoding with the simulated cache."""
    folder = scaled(kind, strategy)
    spec = {"num_pages": 40, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 9}
    one = Engine(folder, EngineSpec.read(spec))
    expected = [generate(load(folder), torch.tensor([prompt]), 12)[0, len(prompt) :].tolist() for prompt in PROMPTS]
    assert [done.tokens for done in one.generate(PROMPTS, greedy(12))] == expected
    assert expected != [dense_greedy(decoder(), prompt, 12) for prompt in PROMPTS], "nothing was rounded"
    asked = "fp8" if kind == "float" else "int8"
    assert [done.tokens for done in Engine(folder, EngineSpec.read({**spec, "kv_cache_dtype": asked})).generate(
        PROMPTS, greedy(12))] == expected  # fmt: skip
    name = {"float": "float8_e4m3fn", "int": "int8"}[kind]
    assert f"keys and values are {name} with the folder's scales" in one.sizes
    assert one.cache_bytes == 41 * page_bytes([keys_and_values(2, 8)] * 2, 4, name, fixed_scales=True) == 41 * 4 * 64
    assert pages_bytes(EngineSpec.read(spec), [CheckpointFacts.of(folder)]) * 41 == one.cache_bytes


def test_a_folders_codes_are_not_compacted(scaled) -> None:
    """Nobody asked for 8 bits: the folder has them."""
    folder, policy = scaled("int", "attn_head"), {"kind": "h2o", "budget": 8}
    with pytest.raises(SpecError, match=r"h2o.*int8: pages of 8 bits are not compacted"):
        Engine(folder, EngineSpec.read({"num_pages": 40, "kv_policy": policy}))
    Engine(folder, EngineSpec.read({"num_pages": 40, "kv_policy": policy, "kv_cache_dtype": "float32"}))
    Engine(folder, EngineSpec.read({"num_pages": 40, "kv_policy": {"kind": "streaming_llm"}}))


def test_scales_that_are_not_used_are_named(scaled) -> None:
    folder = scaled("float", "tensor")
    for asked, dtype in (("int8", "int8 with a scale for each token and head"), ("float32", "float32")):
        one = Engine(folder, EngineSpec.read({"num_pages": 40, "kv_cache_dtype": asked}))
        assert f"float8_e4m3fn, which are not used: keys and values are {dtype}" in one.sizes
    plain = Engine(folder, EngineSpec.read({"num_pages": 40, "kv_cache_dtype": "float32"}))
    assert plain.generate([PROMPTS[3]], greedy(12))[0].tokens == dense_greedy(decoder(), PROMPTS[3], 12)
    model = load(folder)
    assert cache_format("auto", "bfloat16", model.quantization).fixed
    assert cache_format("auto", "bfloat16", None) == ("bfloat16", False, "")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_pages_of_8_bits_are_wiped_with_their_scales(dtype: torch.dtype) -> None:
    cache = KVCache([keys_and_values(2, 8)] * 2, 3, 4, dtype=dtype)
    for tensors, scales in zip(cache.layers, cache.scales, strict=True):
        assert sorted(scales) == ["k_scale", "v_scale"] and scales["k_scale"].shape == (4, 2, 4)
        assert not tensors["k"][0].float().any() and not scales["v_scale"][0].any()
    cache.wipe([1, 2], float("nan"))
    if dtype != torch.int8:
        assert cache.layers[1]["v"][2].float().isnan().all()
    assert cache.scales[1]["k_scale"][1].isnan().all()
    cache.wipe([2])
    assert not cache.layers[1]["v"][2].float().any() and not cache.scales[0]["v_scale"][2].any()


def test_what_has_no_cache_of_8_bits_is_one_clear_error() -> None:
    hopper, ampere = Where("cuda", (9, 0), 132, (3, 6)), Where("cuda", (8, 0), 108, (3, 6))
    latent = (type(LLAMA[0])("latent", (576,)),)
    for dtype, layer, where, said in (
        ("float8_e4m3fn", LLAMA, ampere, "float8 needs compute capability 8.9"),
        ("int8", keys_and_values(8, 30), hopper, "heads of 30 and 30"),
        ("int8", keys_and_values(8, 32), hopper, "wider than 32"),
        ("float8_e4m3fn", latent, hopper, "layer 0 caches a latent"),
        ("int8", latent, Where(), "kv_cache_dtype is int8"),
    ):
        with pytest.raises(SpecError, match=said):
            check_format(dtype, [layer], "bfloat16", where)
    for dtype, where in (("int8", ampere), ("float8_e4m3fn", hopper), ("bfloat16", ampere), ("int8", Where())):
        check_format(dtype, [LLAMA], "bfloat16", where)
    check_format("int8", [keys_and_values(8, 30)], "float32", hopper)
    with pytest.raises(SpecError, match="kv_cache_dtype is fp8, and layer 0 caches a latent"):
        from tests.serve.paging.test_cache import MLA, stack

        Engine(stack(MLA), EngineSpec.read({"num_pages": 8, "kv_cache_dtype": "fp8"}))
    with pytest.raises(SpecError, match="kv_cache_dtype"):
        EngineSpec.read({"kv_cache_dtype": "fp4"})
    assert hone.Engine is Engine
