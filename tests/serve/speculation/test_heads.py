"""Draft heads in the engine: whatever they guess, greedy tokens are the model's and sampled ones have its distribution."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hone.base.errors import SpecError
from hone.model import hf
from hone.model.adapters import ADAPTERS, peft
from hone.model.adapters.trainable import Trainable
from hone.model.context import Causal
from hone.model.drafters.eagle3 import load
from hone.serve.engine import Engine, EngineSpec
from hone.serve.request import SamplingParams
from tests.serve.small import (
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
from tests.serve.speculation.heads import KINDS, OPTIONS, PROMPTS, taught
from tests.serve.speculation.test_speculation import _chi_square


@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_the_model_guess_for_an_adapters_folder(kind: str, heads: dict[str, Path], tmp_path: Path) -> None:
    """The adapter's greedy tokens, other than the model's: heads that read its hidden states only guess less well."""
    hf.save(decoder(), tmp_path / "base")
    adapter = ADAPTERS.read({"kind": "lora", "rank": 4})
    tuned = Trainable(hf.Checkpoint(tmp_path / "base"), adapter).build("cpu", torch.float32)
    keys, tensors = peft.keys(tuned.config), {}
    for index in range(len(tuned.layers)):
        for path, name in tuned.config.singles(index).items():
            if name in keys:
                parameter = tuned.get_parameter(f"layers.{index}.{path}").detach()
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
                tensors[keys[name]] = parameter
    peft.write(tmp_path / "tuned", tuned.config, tensors, str(tmp_path / "base"))
    one, model = engine(tmp_path / "tuned", heads[kind]), hf.load(tmp_path / "tuned")  # type: ignore[arg-type]
    done = one.generate(PROMPTS, greedy(24))
    wanted = [dense_greedy(model, prompt, 24) for prompt in PROMPTS]
    assert [completion.tokens for completion in done] == wanted
    assert wanted != [dense_greedy(decoder(), prompt, 24) for prompt in PROMPTS]
    assert one.stats()["draft_tokens"] > 0
    assert_all_free(one)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "spec", [{}, {"max_num_batched_tokens": 8, "max_num_seqs": 3}, {"num_pages": 14, "enable_prefix_caching": False}]
)
def test_greedy_tokens_are_identical(kind: str, spec: dict, heads: dict[str, Path]) -> None:
    model = decoder()
    one = engine(model, heads[kind], **spec)
    poison_freed_pages(one)
    done = one.generate(PROMPTS, greedy(24))
    for prompt, completion in zip(PROMPTS, done):
        assert completion.tokens == dense_greedy(model, prompt, 24)
    counts = one.stats()
    assert 0 < counts["accepted_tokens"] <= counts["draft_tokens"]
    assert counts["verified_sequences"] > 0
    assert_all_free(one)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_know_the_text_save_steps(kind: str, heads: dict[str, Path]) -> None:
    one = engine(decoder(), heads[kind])
    one.generate([PROMPTS[1]], greedy(25))
    counts = one.stats()
    assert counts["steps"] < 20, "25 without guesses"
    assert 1 + counts["accepted_tokens"] / counts["verified_sequences"] > 1.3


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_do_not_guess_share_steps_with_those_that_do(kind: str, heads: dict[str, Path]) -> None:
    model = decoder()
    one = engine(model, heads[kind])
    one.add(request("guesses", PROMPTS[1], greedy(20)))
    one.add(request("scored", PROMPTS[2], greedy(6, prompt_logprobs=1, logprobs=1)))
    one.add(request("penalized", PROMPTS[3], greedy(12, repetition_penalty=1.2)))
    one.add(request("sampled", PROMPTS[2], SamplingParams(max_tokens=12, seed=1, ignore_eos=True)))
    found = drain(one)
    assert tokens_of(found["guesses"]) == dense_greedy(model, PROMPTS[1], 20)
    assert tokens_of(found["scored"]) == dense_greedy(model, PROMPTS[2], 6)
    plain = engine(model).generate([PROMPTS[3]], greedy(12, repetition_penalty=1.2))[0]
    assert tokens_of(found["penalized"]) == plain.tokens
    assert len(tokens_of(found["sampled"])) == 12
    assert_all_free(one)


@torch.no_grad()
def test_an_eagle_head_guesses_in_the_engine_as_without_a_cache(heads: dict[str, Path]) -> None:
    """After every step, prompts in chunks and pages of 4 tokens: what whole passes of model and head say of the tokens so far."""
    model = decoder()
    head = load(heads["eagle3"], len(model.layers), "cpu", torch.float32)
    one = engine(model, heads["eagle3"], max_num_batched_tokens=8, drafter={"kind": "eagle3", "num_tokens": 5})
    one.add(request("a", PROMPTS[3], greedy(20)))
    seq, compared = one._seqs["a"], 0
    while one.has_work:
        one.step()
        if seq.state != "running" or not seq.guesses:
            continue
        tokens = torch.tensor([seq.tokens[:-1]])
        context = Causal(tokens)
        context.taps = dict.fromkeys(head.config.taps)
        model.hidden(tokens, context)
        h, read = head.fuse(context.taps), seq.tokens[1:]
        for guess in seq.guesses:
            following = torch.tensor([read])
            own, embedded = Causal(following), head.embed(following, model)
            head.prepare(embedded, own)
            g = head(embedded, h, own)[:, -1:]
            assert guess == int(head.draft_ids[head.logits(g)[0, 0].argmax()])
            h, read, compared = torch.cat((h, g), 1), [*read, guess], compared + 1
    assert compared > 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_pairs_follow_the_models_distribution(kind: str, tmp_path: Path) -> None:
    """Through the engine: 3,000 seeds, tokens two and three together against exact probabilities of a dense model."""
    model = decoder(2, vocab_size=7, num_layers=1)
    folder = taught(tmp_path / kind, kind, model, 7, **OPTIONS[kind])
    one = engine(model, folder, max_num_seqs=32, max_num_batched_tokens=128, num_pages=256)
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    params = [SamplingParams(seed=seed, max_tokens=3, temperature=0.9, ignore_eos=True) for seed in range(3_000)]
    counts = torch.zeros(7, 7, 7)
    for completion in one.generate([prompt] * len(params), params):
        counts[tuple(completion.tokens)] += 1

    def probabilities(tokens: list[int]) -> torch.Tensor:
        return (model(torch.tensor([tokens]))[0, -1].float() / 0.9).softmax(-1)

    expected = torch.zeros(7, 7, 7)
    with torch.inference_mode():
        for a, p_a in enumerate(probabilities(prompt).tolist()):
            for b, p_b in enumerate(probabilities([*prompt, a]).tolist()):
                expected[a, b] = p_a * p_b * probabilities([*prompt, a, b])
    assert one.stats()["accepted_tokens"] > 0
    assert _chi_square(counts.flatten(), expected.flatten()) > 1e-3


def test_heads_and_drafter_belong_together(heads: dict[str, Path], tmp_path: Path) -> None:
    model = decoder()
    with pytest.raises(SpecError, match="holds medusa heads"):
        Engine(model, EngineSpec(drafter="draft_model", num_pages=8), draft=heads["medusa"])
    with pytest.raises(SpecError, match="needs a draft model"):
        Engine(model, EngineSpec(drafter="medusa", num_pages=8))
    with pytest.raises(SpecError, match="holds a model"):
        Engine(model, EngineSpec(drafter="medusa", num_pages=8), draft=model)
    with pytest.raises(SpecError, match="hidden states of width 32, the model has 64"):
        engine(decoder(hidden_size=64), heads["medusa"])
    with pytest.raises(SpecError, match="there are 3 Medusa heads"):
        engine(model, heads["medusa"], drafter={"kind": "medusa", "num_tokens": 5})
    with pytest.raises(SpecError, match="async_scheduling"):
        engine(model, heads["medusa"], async_scheduling=True)


def test_heads_are_no_model(heads: dict[str, Path]) -> None:
    from hone.base.artifact import Artifact
    from hone.base.errors import ArtifactError
    from hone.base.plan import facts_of, need
    from hone.model.facts import CheckpointFacts

    with pytest.raises(ArtifactError, match="which is a folder of draft heads, not a model"):
        need({"model": facts_of(Artifact.read(heads["medusa"]))}, "model", CheckpointFacts)
    with pytest.raises(ArtifactError, match="has draft heads"):
        hf.load(heads["medusa"])
