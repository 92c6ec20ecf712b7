"""Writing text without an engine: what it draws, what it refuses, and stacks of several mixers."""

from __future__ import annotations

import pytest
import torch

import hone
from hone.base.errors import SpecError
from hone.cli import main
from hone.model.decoder import build
from hone.model.incremental import generate
from hone.model.shape import Shape
from hone.model.tokenizer import load_tokenizer
from hone.serve.engine import Engine
from hone.serve.request import SamplingParams
from tests.model.mixers.small import check_apart, check_causal, check_incremental, check_saved, prompt, small

HYBRID = (
    {"kind": "sliding_window", "window": 5},
    "shared_kv",
    "attention",
    "retnet",
    {"kind": "transformer_xl", "segment": 6, "memory": 6},
)


def test_a_stack_of_several_mixers(tmp_path):
    model = small(*HYBRID, num_layers=6)
    check_incremental(model, 19, [[19], [1] * 19, [6, 1, 12]])
    check_causal(model, 13)
    check_apart(model, [5, 9, 6])
    check_saved(model, tmp_path)


@pytest.mark.parametrize(
    "how", [{"temperature": 0}, {"temperature": 0.8, "top_k": 7}, {"temperature": 1.1, "top_p": 0.8, "min_p": 0.02}]
)
def test_it_writes_what_the_engine_writes(how):
    model, tokens = small("attention").float(), prompt(2, 7)
    written = generate(model, tokens, 15, seed=5, **how)
    params = [SamplingParams(max_tokens=15, seed=5 + row, ignore_eos=True, **how) for row in range(2)]
    outputs = Engine(model).generate(tokens.tolist(), params)
    assert written[:, 7:].tolist() == [output.tokens for output in outputs]


def test_draws_depend_on_the_seed_alone():
    model, tokens = small("retnet").float(), prompt(3, 6)
    together = generate(model, tokens, 10, temperature=1.5, seed=3)
    assert torch.equal(generate(model, tokens[1:], 10, temperature=1.5, seed=4), together[1:])
    assert torch.equal(generate(model, tokens, 10, temperature=1.5, seed=3, chunk=4), together)
    assert not torch.equal(generate(model, tokens, 10, temperature=1.5, seed=9), together)
    assert torch.equal(generate(model, tokens, 0), tokens)


def test_the_engine_says_which_layer_it_cannot_serve():
    model = small("attention", "retnet").float()
    with pytest.raises(SpecError, match=r"layer 1: mixer 'retnet'") as error:
        Engine(model)
    assert "generate" in error.value.fix
    with pytest.raises(SpecError, match="shape"):
        generate(model, torch.zeros(0, 3, dtype=torch.long), 2)


def test_it_ends_when_every_row_has_a_stop_token():
    model, tokens = small("retnet").float(), prompt(2, 6)
    whole = generate(model, tokens, 20)[:, 6:]
    stops = {int(whole[0, 2]), int(whole[1, 7])}
    last = max(next(place for place, token in enumerate(row) if token in stops) for row in whole.tolist())
    assert torch.equal(generate(model, tokens, 20, stop_tokens=stops)[:, 6:], whole[:, : last + 1])


def test_folders_that_the_engine_cannot_serve_write_too(tmp_path, tiny_llama, capsys):
    """By the tokens that the engine would draw, were the layers its own."""
    model = build(Shape(num_layers=2, mixers=({"kind": "longformer", "window": 600},)).config(320), seed=4)
    with pytest.warns(RuntimeWarning, match="longformer"):
        hone.save(model, tmp_path / "made", tokenizer_from=tiny_llama)
    command = ["generate", str(tmp_path / "made"), "the quick", "--max_tokens=9"]
    assert main([*command, "--temperature=1.5", "--seed=3", "--ignore_eos=true"]) == 0
    known = torch.tensor([load_tokenizer(tiny_llama).encode("the quick")])
    tokens = generate(model, known, 9, temperature=1.5, seed=3)[0, known.shape[1] :].tolist()
    assert capsys.readouterr().out == f"the quick{load_tokenizer(tiny_llama).decode(tokens)}\n"
    rest = tokens[: tokens.index(tokens[5])]
    stopped = [f"--stop_token_ids=[{tokens[5]}]", "--temperature=1.5", "--seed=3", "--ignore_eos=true"]
    assert main([*command, *stopped]) == 0
    assert capsys.readouterr().out == f"the quick{load_tokenizer(tiny_llama).decode(rest)}\n"
    assert main([*command, "--stop=['x']"]) == 2
    assert "stop needs the engine, which serves no layers of mixer 'longformer'" in capsys.readouterr().err
