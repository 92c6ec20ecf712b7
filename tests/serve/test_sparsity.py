"""Serving with 2:4 linears: what a plan expects of them, what is refused, and on a GPU the dense model's log-probabilities."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hone
from hone.base.errors import MachineError, SpecError
from hone.model.decoder import Decoder
from hone.model.facts import CheckpointFacts
from hone.model.sparse import sparsify as sparsifying
from hone.model.sparse.semi_structured import SemiStructured
from hone.serve import planning
from hone.serve.engine import Engine, EngineSpec
from hone.serve.request import SamplingParams
from tests.cost.h200 import h200
from tests.serve.small import VOCAB, decoder, greedy

SIZES = {"block_size": 16, "num_pages": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}


def pruned(**shape) -> Decoder:
    """A small model of 16 bits with two zeros in every four weights of its layers' linears."""
    model = decoder(**{"hidden_size": 64, "intermediate_size": 128, **shape}).to(torch.bfloat16)
    with torch.no_grad():
        for index, layer in enumerate(model.layers):
            for path in model.config.linears(index):
                fours = layer.get_submodule(path).weight.view(-1, 4)
                fours.scatter_(1, fours.abs().topk(2, 1, largest=False).indices, 0)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hone.save(pruned(), tmp_path)
    return tmp_path


def test_a_cpu_is_one_clear_error(folder: Path) -> None:
    with pytest.raises(MachineError, match="2:4 products need an NVIDIA GPU, and the device is cpu"):
        Engine(folder, EngineSpec.read({**SIZES, "sparsity": "2:4"}))


def test_a_given_model_is_not_changed() -> None:
    with pytest.raises(SpecError, match="the model is given, not its folder"):
        Engine(pruned(), EngineSpec.read({**SIZES, "sparsity": "2:4"}))


def test_the_engine_says_what_runs_compressed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparsifying, "_problem", lambda model, where: None)  # on a CPU by the unpacked weights
    engine = Engine(folder, EngineSpec.read({**SIZES, "sparsity": "2:4"}))
    assert "2:4 products in 8 of 8 linears" in engine.sizes
    plain = Engine(folder, EngineSpec.read(SIZES))
    assert "2:4" not in plain.sizes
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    found, expected = (one.generate(prompts, greedy(6)) for one in (engine, plain))
    assert [one.tokens for one in found] == [one.tokens for one in expected]


def test_a_plan_expects_fewer_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "triton_version", lambda: (3, 6))
    facts = CheckpointFacts.of(folder)
    dense, sparse, auto = (EngineSpec.read({**SIZES, "sparsity": mode}) for mode in ("none", "2:4", "auto"))
    matrices = 2 * 2 * (128 * 64 + 64 * 64 + 256 * 64 + 64 * 128)  # qkv, out, gate and up, down of two layers, 16 bits
    counted = planning.sparse_saving(sparse, facts, "bfloat16")
    assert planning.sparse_saving(dense, facts, "bfloat16") == planning.sparse_saving(auto, facts, "bfloat16") == 0
    assert counted == matrices
    whole = 2 * facts.config.dims().num_params
    embedding = 0 if facts.config.tie_embeddings else 2 * VOCAB * 64
    assert planning.serving_of(sparse, facts, h200()).read_bytes == whole - counted * 7 / 16 - embedding
    assert planning.serving_of(dense, facts, h200()).read_bytes is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_predicts_what_the_dense_model_predicts(tmp_path: Path) -> None:
    """Under the decode graphs, for batches that the own kernel and torch's product compute; and the same without graphs."""
    hone.save(pruned(hidden_size=512, intermediate_size=1280, head_dim=64, max_seq_len=256), tmp_path)
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, VOCAB, (length,), generator=draw).tolist() for length in (3, 60, 90, 17, 120)]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    made = {}
    for mode in ("none", "2:4", "auto", "without graphs"):
        spec = {**SIZES, "num_pages": 128, "max_num_batched_tokens": 160}
        engine = Engine(
            tmp_path, EngineSpec.read({**spec, "sparsity": mode if mode in ("none", "auto") else "2:4"}), device="cuda"
        )
        assert engine.runner.graphs is not None
        if mode == "without graphs":
            engine.runner.graphs = None
        made[mode] = engine.generate(prompts, params)
        assert mode != "2:4" or engine.runner.graphs.num_captured
        assert (mode == "none") == ("2:4 products" not in engine.sizes)
        if mode in ("2:4", "without graphs"):
            assert isinstance(engine.model.layers[0].mixer.qkv, SemiStructured)
    assert [one.tokens for one in made["2:4"]] == [one.tokens for one in made["without graphs"]]
    for mode in ("2:4", "auto"):
        for mine, dense in zip(made[mode], made["none"]):
            scores = [[place.logprob for place in one.prompt_logprobs if place is not None] for one in (mine, dense)]
            torch.testing.assert_close(torch.tensor(scores[0]), torch.tensor(scores[1]), rtol=0.05, atol=0.15)
