"""The families on a CUDA device, with heads of the published widths, against transformers on the same device."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers

from hone.model import hf
from hone.model.context import Causal
from hone.serve.engine import Engine, EngineSpec
from tests.model.families.published import PUBLISHED, SMALL, longrope, make_folder
from tests.serve.small import drain, greedy, request, tokens_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

HEAD_DIMS = {
    "qwen2.5-yarn": 128,
    "qwen3-yarn": 128,
    "llama-dynamic": 64,
    "gemma2": 256,
    "gemma2-27b": 128,
    "gemma3-1b": 256,
    "gemma3-4b-text": 256,
    "phi3-mini-4k": 96,
    "phi3-mini-128k": 96,
    "phi4-mini": 128,
    "granite3": 64,
    "olmo2": 128,
    "smollm3": 128,
}
"""The width of a head as published."""


@pytest.fixture(scope="module", params=HEAD_DIMS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, width = request.param, HEAD_DIMS[request.param]
    values = {**copy.deepcopy(PUBLISHED[name]), **SMALL, "hidden_size": 4 * width, "intermediate_size": 6 * width}
    if "head_dim" in values:
        values["head_dim"] = width
    if (values.get("rope_scaling") or {}).get("type") == "longrope":
        values["rope_scaling"] = longrope(int(width * values.get("partial_rotary_factor", 1.0)) // 2)
    return make_folder(tmp_path_factory.mktemp(name), values, std=0.8 * values["hidden_size"] ** -0.5)


def theirs(folder: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.to("cuda").eval()


def prompt(length: int, rows: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(length)
    return torch.randint(3, SMALL["vocab_size"], (rows, length), generator=draw).cuda()


@torch.no_grad()
def test_logits_are_those_of_transformers(folder: Path) -> None:
    """In float32 nearly; in bfloat16 hone is no further from float32 than transformers is."""
    exact, rounded = theirs(folder, torch.float32), theirs(folder, torch.bfloat16)
    ours, half = (hf.load(folder, device="cuda", dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    for length in (21, 57):
        tokens = prompt(length, 2)
        expected = exact(tokens).logits
        assert expected.std() > 0.05
        assert (ours(tokens) - expected).norm() < 1e-3 * expected.norm()
        error, allowed = (other.float() - expected for other in (half(tokens), rounded(tokens).logits))
        assert error.norm() < 1.25 * allowed.norm() + 1e-3 * expected.norm()


@torch.no_grad()
def test_the_engine_serves_them(folder: Path) -> None:
    """Prefill in chunks and decoding from pages in bfloat16: the log-probability of each token as in a whole pass."""
    model = hf.load(folder, device="cuda", dtype=torch.bfloat16)
    longest = max(model.config.max_seq_len, 64)
    sizes = {"block_size": 16, "num_pages": 60, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    one = Engine(model, EngineSpec.read({**sizes, "max_model_len": longest}), device="cuda")
    starts = {"a": prompt(40, 1)[0].tolist(), "b": prompt(9, 1)[0].tolist()}
    for name, start in starts.items():
        one.add(request(name, start, greedy(16, prompt_logprobs=0, logprobs=0)))
    found = drain(one)
    exact = hf.load(folder, device="cuda", dtype=torch.float32)
    for name, start in starts.items():
        assert not any(output.error for output in found[name])
        tokens = torch.tensor([start + tokens_of(found[name])]).cuda()

        def chosen(other, tokens=tokens):
            context = Causal(tokens)
            context.rope_len = longest  # the engine rotates for the longest sequence it may hold
            return other(tokens, context)[0].float().log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]

        served = [entry.logprob for entry in found[name][0].prompt_logprobs[1:]]
        served += [entry.logprob for output in found[name] for entry in output.logprobs]
        expected = chosen(exact)
        error, allowed = (one - expected for one in (torch.tensor(served).cuda(), chosen(model)))
        assert error.abs().mean() < 1.5 * allowed.abs().mean() + 5e-3, (error.abs().mean(), allowed.abs().mean())
