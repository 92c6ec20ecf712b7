"""Models with experts behind the engine: greedy text is that of dense passes, alone or in company."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hone.base.errors import SpecError
from hone.model import hf
from hone.model.decoder import Decoder, build
from hone.model.incremental import generate
from hone.model.quantized.layouts.nvfp4 import pack_nibbles
from hone.model.quantized.methods.mxfp4 import SCHEME
from hone.model.quantized.scheme import Scheme
from hone.model.shape import Shape
from hone.ops.rounding.float_grid import find_scales
from hone.ops.rounding.inputs import ACTIVATIONS
from hone.serve.engine import Engine, EngineSpec
from hone.serve.request import SamplingParams
from tests.model.parallel.quantized_folder import write_quantized
from tests.serve.small import (
    VOCAB,
    assert_all_free,
    decoder,
    dense_greedy,
    drain,
    engine,
    greedy,
    poison_freed_pages,
    request,
    tokens_of,
)

PROMPTS = [[(7 * i + 3 * j) % VOCAB for j in range(1, 4 + 5 * i)] for i in range(3)]


def experts(**options: Any) -> Any:
    return decoder(feed_forward=({"kind": "moe", "num_experts": 4, "intermediate_size": 24, **options},))


@pytest.mark.parametrize("router", ["softmax", "sigmoid", "hash"])
def test_text_does_not_depend_on_company(router: str) -> None:
    model = experts(router=router, capacity_factor=1.0, num_shared_experts=1)  # a capacity drops nothing in serving
    one = engine(model)
    for prompt, completion in zip(PROMPTS, one.generate(PROMPTS, greedy(12))):
        assert completion.tokens == dense_greedy(model, prompt, 12)
    assert_all_free(one)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latents_of_a_family_with_a_dense_first_layer(family: str) -> None:
    """DeepSeek's: chunks of prompts, shared pages and freed ones full of NaN change no token."""
    latent = {"kind": "mla", "head_dim": 8, "value_dim": 6, "rope_dim": 4, "latent_dim": 12}
    latent |= {"mscale_all_dim": 0.7, "rope": {"scaling": "yarn", "factor": 4.0, "original_max_seq_len": 16}}
    model = decoder(seed=3, family=family, num_layers=3, num_dense_layers=1, num_kv_heads=4, mixers=(latent,))
    assert [layer.feed_forward.kind for layer in model.config.layers] == ["swiglu", "moe", "moe"]
    with torch.no_grad():
        for layer in model.layers[1:] if family == "deepseek_v3" else ():
            layer.feed_forward.router_bias.normal_(0.0, 0.2)
    one = engine(model, num_pages=22, max_num_batched_tokens=9)
    poison_freed_pages(one)
    expected = [dense_greedy(model, prompt, 16) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    for _ in range(2):
        assert [done.tokens for done in one.generate(PROMPTS, greedy(16))] == expected
    assert [sorted(tensors) for tensors in one.runner.cache.layers] == [["latent"]] * 3
    assert one.cache_bytes == 3 * 23 * 4 * (12 + 4) * 4  # layers, pages and the null page, tokens, numbers, bytes
    assert_all_free(one)


@pytest.mark.parametrize("router", ["soft", "expert_choice"])
def test_routers_that_see_later_tokens_are_refused(router: str) -> None:
    with pytest.raises(SpecError, match=f"layer 0 routes by '{router}'"):
        engine(experts(router=router))


@torch.no_grad()
@pytest.mark.parametrize("quantized", [False, True])
def test_gpt_oss_is_served_as_whole_passes_compute_it(quantized: bool, tmp_path: Path) -> None:
    """Sinks, windows, biased experts: prompts in chunks, decoding from pages and a shared prefix, to the log-probability."""
    moe = {"kind": "moe", "num_experts": 4, "intermediate_size": 32, "biases": True, "swiglu_limit": 1.0}
    sizes = {
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 32,
    }
    shape = Shape(
        family="gpt_oss", **sizes, max_seq_len=64, tie_embeddings=False, window=9, mixers=("sliding_window", "attention"),
        feed_forward=(moe,),
    )  # fmt: skip
    model = build(shape.config(60), seed=3)
    for part in model.parameters():
        part.normal_(*((0.5, 0.5) if part.dim() == 1 else (0.0, 0.2)))
    if quantized:
        model = hf.load(in_mxfp4(model, tmp_path))
    one = engine(model, max_num_batched_tokens=16)
    long, short = [(7 * i + 3) % 60 for i in range(40)], [5, 9, 2, 40]
    for round in range(2):  # the second time the long prompt's pages are known
        for name, start in (("a", long), ("b", short)):
            one.add(request(f"{name}{round}", start, greedy(8, logprobs=0)))
        found = drain(one)
        for name, start in (("a", long), ("b", short)):
            made = tokens_of(found[f"{name}{round}"])
            assert generate(model, torch.tensor([start]), 8, chunk=7)[0, len(start) :].tolist() == made
            tokens = torch.tensor([start + made])
            expected = model(tokens)[0].log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[len(start) - 1 :, 0]
            served = [entry.logprob for output in found[f"{name}{round}"] for entry in output.logprobs]
            torch.testing.assert_close(torch.tensor(served), expected, atol=1e-4, rtol=1e-4)
    assert_all_free(one)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(8, layout="int-quantized", activations=ACTIVATIONS["int8_token"]),
        Scheme(4, 64, activations=ACTIVATIONS["int8_token"]),
        Scheme(8, layout="float-quantized", number="e4m3", activations=ACTIVATIONS["fp8_token"]),
    ],
    ids=["W8A8", "W4A8", "W8A8 fp8"],
)
def test_experts_that_round_inputs_are_served_in_graphs(scheme: Scheme, tmp_path: Path) -> None:
    """Log-probabilities are those of one expert after another without graphs, and near those of exact weights with exact inputs."""
    moe = {"kind": "moe", "num_experts": 8, "intermediate_size": 128, "router": {"kind": "softmax", "top_k": 2}}
    shape = Shape(
        family="qwen3_moe", hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=128,
        max_seq_len=256, tie_embeddings=False, feed_forward=(moe,),
    )  # fmt: skip
    folder = write_quantized(build(shape.config(VOCAB), seed=1), tmp_path / "codes", scheme, "compressed-tensors")
    prompts = [[(7 * i + 3 * j) % VOCAB for j in range(1, 20 + 30 * i)] for i in range(5)]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, prompt_logprobs=1)
    scores = {}
    for way in ("graphs", "apart"):
        spec = {
            "dtype": "bfloat16",
            "block_size": 16,
            "num_pages": 128,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 256,
        }
        one = Engine(folder, EngineSpec.read(spec), device="cuda")
        assert one.runner.graphs is not None
        feeds = [layer.feed_forward for layer in one.model.layers]
        assert all(feed.gate_up.at_once() is not None and feed.gate_up.rounding for feed in feeds)
        if way == "apart":
            one.runner.graphs = None
            for feed in feeds:
                feed.gate_up.stacked = feed.down.stacked = None
        found = one.generate(prompts, params)
        assert way == "apart" or one.runner.graphs.num_captured
        assert not any(output.error for output in found)
        scores[way] = torch.tensor([p.logprob for output in found for p in output.prompt_logprobs if p is not None])
    assert (scores["graphs"] - scores["apart"]).abs().mean() < 0.02
    assert (scores["graphs"] - scores["apart"]).abs().max() < 0.2


def in_mxfp4(model: Decoder, folder: Path) -> Path:
    """`model` in a folder whose experts are rounded to MXFP4."""
    hf.save(model, folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        rows = tensor.transpose(1, 2).flatten(0, 1).contiguous()
        stored = SCHEME.quantize(rows, find_scales(rows, "e2m1", 32, "absmax"))
        shape = (*tensor.transpose(1, 2).shape[:2], -1)
        tensors[f"{name}_blocks"] = pack_nibbles(stored.codes).view(*shape, 16)
        tensors[f"{name}_scales"] = stored.scales.view(torch.uint8).view(shape)
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(values))
    return folder
