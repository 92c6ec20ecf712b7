"""Decode steps as one compiled call: the same tokens as layer by layer, for dense and packed weights; others say why not."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from hone.model.decoder import Decoder, build
from hone.model.mixers.attention import Attention
from hone.model.quantized.packed_int import PackedInt
from hone.model.quantized.scheme import Scheme
from hone.model.shape import Shape
from hone.ops.cpu.isa import cpu_isa
from hone.serve.engine import Engine, EngineSpec
from hone.serve.paging import compiled_step
from hone.serve.paging.cache import KVCache, cache_tensors
from hone.serve.paging.compiled_step import MOST_ROWS, why_not
from hone.serve.paging.paged import Paged
from hone.serve.request import SamplingParams
from hone.serve.step import ForwardBatch

pytestmark = pytest.mark.skipif(not cpu_isa(), reason="no vector instructions that there are compiled kernels for")

VOCAB = 97


def model_of(family: str = "llama", dtype: torch.dtype = torch.float32, **more: object) -> Decoder:
    sizes = {
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
    }
    return build(Shape(family=family, **{**sizes, **more}).config(VOCAB), dtype=dtype).eval().requires_grad_(False)


def packed(model: Decoder, bits: int, group_size: int) -> Decoder:
    """The model with every linear of its layers rounded to codes."""
    for layer in model.layers:
        for block in (layer.mixer, layer.feed_forward):
            for name, linear in list(block.named_children()):
                if not hasattr(linear, "in_features"):
                    continue
                scheme = Scheme(bits, group_size)
                module = PackedInt(linear.in_features, linear.out_features, False, scheme=scheme)
                groups = scheme.num_groups(linear.in_features)
                weight = linear.weight.view(linear.out_features, groups, -1)
                scales = weight.abs().amax(-1) / (2 ** (bits - 1) - 1)
                codes = (weight / scales[..., None]).round().to(torch.int8).view(linear.out_features, -1)
                module._keep(codes, scales)
                setattr(block, name, module)
    return model


def tokens_of(model: Decoder, count: int, spec: EngineSpec | None = None) -> list[list[int]]:
    prompts = [[(7 * i + j) % VOCAB for j in range(1 + 5 * i)] for i in range(count)]
    engine = Engine(model, spec or EngineSpec(max_num_seqs=count))
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    return [one.tokens for one in engine.generate(prompts, params)]


def layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Paged, "run_layers", lambda *_: None)


@pytest.mark.parametrize("family", ["mistral", "qwen3", "qwen2"])
def test_tokens_equal_those_of_layer_by_layer(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(family, window=9 if family == "mistral" else None)
    if family == "qwen2":
        for layer in model.layers:
            layer.mixer.qkv.bias.normal_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it would warn if the model were unlike
        found = tokens_of(model, 5)
    layer_by_layer(monkeypatch)
    assert found == tokens_of(model, 5)


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "group_size"), [(8, 0), (8, 32), (4, 32), (4, 0)])
def test_packed_weights_too(bits: int, group_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed(model_of(), bits, group_size)
    found = tokens_of(model, 5)
    layer_by_layer(monkeypatch)
    assert found == tokens_of(model, 5)


def test_prefixes_chunks_and_preemption_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    spec = EngineSpec(max_num_seqs=4, num_pages=12, block_size=8, max_num_batched_tokens=16, max_model_len=64)
    found = tokens_of(model, 7, spec)
    layer_by_layer(monkeypatch)
    assert found == tokens_of(model, 7)


def test_a_model_that_it_does_not_cover_says_why() -> None:
    def reason(model: Decoder, dtype: torch.dtype = torch.float32) -> str | None:
        cache = KVCache(cache_tensors(model.config), 4, 8, dtype=dtype, rope_len=64)
        return why_not(model, cache)

    assert reason(model_of()) is None
    assert "multiples of 32" in reason(model_of(head_dim=16))
    assert "one dtype" in reason(model_of(), torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_step, "cpu_isa", lambda: "")
        assert "numba" in reason(model_of())
    capped = model_of()
    capped.layers[1].mixer.spec = Attention(num_heads=4, num_kv_heads=2, head_dim=32, softcap=30.0)
    assert "layer 1" in reason(capped) and "softcap" in reason(capped)


def test_a_pipelines_later_stage_is_compiled_on_its_own_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first layer is not layer 0, whose pages another stage has."""
    stage, found = model_of(num_layers=3), []
    stage.layers = stage.layers[1:]
    batch = ForwardBatch.of([5, 9], [0, 0], [1, 1], np.array([[1], [2]], dtype=np.int32), 8)
    for by_layer in (False, True):
        declared = cache_tensors(stage.config)
        cache = KVCache([(), *declared[1:]], 4, 8, rope_len=64)
        cache.wipe([1, 2], 0.25)  # the sequences' first tokens, which nobody wrote
        if by_layer:
            layer_by_layer(monkeypatch)
        context = Paged(cache, batch)
        with torch.inference_mode():
            found.append((stage.hidden(context.tokens, context), cache.layers[2]["k"][1:3, :, 0]))
        assert by_layer or cache.steps[stage] is not None
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
        assert one.any()


def test_more_sequences_than_a_step_holds_run_layer_by_layer() -> None:
    model = model_of(num_layers=1)
    few, many = tokens_of(model, 3), tokens_of(model, MOST_ROWS + 3)
    assert many[:3] == few
