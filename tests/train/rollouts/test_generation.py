"""Answers of a model in training: the engine serves the trained weights themselves, by seed, whatever is written beside them."""

from __future__ import annotations

import pytest
import torch

from hone.base.errors import HoneError
from hone.feed.load import PackedTokens
from hone.model.decoder import build
from hone.model.shape import Shape
from hone.model.tokenizer import load_tokenizer
from hone.serve.engine import Engine, EngineSpec
from hone.serve.request import SamplingParams
from hone.train.loop import Trainer
from hone.train.optimizers.adamw import AdamW
from hone.train.rollouts.generation import Generation, seed_of
from hone.train.schedules.cosine import Cosine
from tests.train.rollouts.sums import write_sums

COMPILED = Shape(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=96, max_seq_len=128)
"""Of sizes for which a CPU has a compiled step of decoding."""
PROMPTS = [[60, 61, 62], [70, 71], [60, 61, 62, 63, 64], [90]]
PARAMS = SamplingParams(max_tokens=6)


@pytest.fixture
def trainer(tmp_path):
    data = PackedTokens(write_sums(tmp_path / "sums"))
    model = build(COMPILED.config(data.vocab_size), seed=1)
    trainer = Trainer(model, steps=3, schedule=Cosine(warmup=0), optimizer=AdamW(lr=0.05))
    return trainer, data, load_tokenizer(data.folder)


def fresh(model, tokenizer, prompts, seeds):
    """What a new engine on a copy of the weights writes."""
    other = build(model.config, seed=5)
    other.load_state_dict(model.state_dict())
    engine = Engine(other, EngineSpec(num_pages=64), tokenizer=tokenizer)
    params = [PARAMS.model_copy(update={"seed": seed}) for seed in seeds]
    return [one.tokens for one in engine.generate(prompts, params)]


def test_the_engine_serves_the_weights_of_each_step_and_leaves_them_to_the_training(trainer):
    trainer, data, tokenizer = trainer
    model = trainer.model
    generation = Generation(model, tokenizer, max_model_len=32, max_num_seqs=4)
    assert all(one.requires_grad for one in model.parameters()) and model.training
    kept = {name: one.data_ptr() for name, one in model.named_parameters()}
    seeds = [seed_of(7, place) for place in range(4)]
    written = []
    for step in range(3):
        found = [one.tokens for one in generation.answers(PROMPTS, [PARAMS] * 4, seeds)]
        assert found == fresh(model, tokenizer, PROMPTS, seeds)
        written.append(found)
        trainer.step(data.batch(step, 2, 32, 0))
    assert written[0] != written[1] != written[2], "large steps change what is written"
    assert kept == {name: one.data_ptr() for name, one in model.named_parameters()}
    assert all(one.grad is None for one in model.parameters()) and model.training


def test_an_answer_depends_on_its_prompt_and_seed_not_on_its_company(trainer):
    model, tokenizer = trainer[0].model, trainer[2]
    generation = Generation(model, tokenizer, max_model_len=32, max_num_seqs=2)
    seeds = [seed_of(7, place) for place in range(4)]
    together = [one.tokens for one in generation.answers(PROMPTS, [PARAMS] * 4, seeds)]
    alone = [generation.answers([prompt], [PARAMS], [seed])[0].tokens for prompt, seed in zip(PROMPTS, seeds)]
    assert alone == together
    assert generation.answers(PROMPTS[:1], [PARAMS], [seed_of(8, 0)])[0].tokens != together[0]


def test_an_answer_says_whether_it_ended(trainer):
    model, tokenizer = trainer[0].model, trainer[2]
    generation = Generation(model, tokenizer, max_model_len=32, max_num_seqs=4)
    (eos,) = tokenizer.eos_ids
    only = PARAMS.model_copy(update={"allowed_token_ids": (eos,)})
    ended, cut = generation.answers(PROMPTS[:2], [only, PARAMS.model_copy(update={"ignore_eos": True})], [1, 2])
    assert ended.tokens == [eos] and ended.ended
    assert len(cut.tokens) == 6 and not cut.ended


def test_logits_that_are_not_finite_are_an_error(trainer):
    model, tokenizer = trainer[0].model, trainer[2]
    generation = Generation(model, tokenizer, max_model_len=32, max_num_seqs=4)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(HoneError, match="not finite"):
        generation.answers(PROMPTS[:1], [PARAMS], [1])


def test_seeds_differ_by_every_part():
    seeds = [seed_of(0, 1, [2, 3]), seed_of(0, 1, [2, 3], 0), seed_of(0, 1, [2], 3), seed_of(1, 0, [2, 3])]
    assert len(set(seeds)) == 4 and all(0 <= one < 2**62 for one in seeds)
    assert seed_of(0, 1, [2, 3]) == seeds[0]
