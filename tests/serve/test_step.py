"""A step is data: it packs into one buffer, splits, and replays on a runner that knows no request."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.serve.engine import Engine
from hone.serve.ranks.packing import pack, unpack
from hone.serve.request import SamplingParams
from hone.serve.sampling import RequestSampling, SeqSampling, sampling_of
from hone.serve.sequence import SchedulerOutput
from hone.serve.step import ForwardBatch, StepInput
from hone.serve.step_builder import StepBuilder
from tests.serve.small import VOCAB, decoder, drain, engine, greedy, request

MODEL, DRAFT = decoder(), decoder(5, num_layers=1)
PARAMS = {
    "greedy": greedy(12),
    "scored": greedy(6, prompt_logprobs=2, logprobs=3),
    "drawn": SamplingParams(max_tokens=12, temperature=1.2, top_k=9, top_p=0.9, min_p=0.01, seed=-5, ignore_eos=True),
    "penalized": greedy(12, presence_penalty=0.5, frequency_penalty=0.1, repetition_penalty=1.3),
    "biased": SamplingParams(max_tokens=12, logit_bias={4: 3.0, 9: -2.0}, min_tokens=9, stop_token_ids=(4,), seed=2**64 - 1),
    "long": greedy(5),
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    """The engine chooses threads by the size of a step, a bare runner does not; other threads round sums otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def add_all(one: Engine) -> None:
    for number, (name, params) in enumerate(PARAMS.items()):
        prompt = [(7 * number + 3 * place) % VOCAB for place in range(1, 60 if name == "long" else 12)]
        one.add(request(name, prompt, params))


def recorded(one: Engine) -> tuple[list[bytes], list[list[tuple]]]:
    """Every step of a run as bytes, and what the run's sequences got of it."""
    steps, results, real = [], [], one.runner.launch

    def launch(step: StepInput):
        steps.append(pack(step).tobytes())
        launched = real(step)
        results.append(pickle.loads(pickle.dumps(launched.results())))
        return launched

    one.runner.launch = launch
    add_all(one)
    outputs = drain(one)
    assert not any(output.error for each in outputs.values() for output in each)
    return steps, results


@pytest.mark.parametrize("speculation", ["none", "none, ahead", "draft model", "prompt lookup"])
def test_recorded_steps_replay_on_a_fresh_runner(speculation):
    """Chunked and mixed steps, preemption, scored prompts, every sampling parameter: same choices from the bytes alone."""
    spec = {"num_pages": 40, "max_num_batched_tokens": 24, "max_num_seqs": 5}
    if speculation == "none, ahead":
        spec["async_scheduling"] = True
    if speculation == "prompt lookup":
        spec["drafter"] = {"kind": "prompt_lookup", "min_ngram": 1}
    draft = DRAFT if speculation == "draft model" else None
    steps, expected = recorded(engine(MODEL, draft, **spec))
    fresh = engine(MODEL, draft, **spec).runner
    assert [fresh.run(unpack(StepInput, step)) for step in steps] == expected
    if draft is not None:
        assert sum(result.num_guessed for results in expected for result in results) > 0


@pytest.mark.parametrize("names", [("greedy", "long"), ("drawn", "long"), tuple(PARAMS)])
def test_steps_built_from_the_last_one_equal_steps_built_anew(names):
    """Decoding goes on from the last step's arrays: across page borders, arrivals, ends and preemption they are the same."""
    one = engine(MODEL, num_pages=24, max_num_seqs=4, max_num_batched_tokens=24)
    build, reused = one._builder.build, []

    def checked(output):
        last = one._builder._last
        step = build(output)
        plain = StepBuilder(one.spec.block_size).build(output)
        for (name, found), (_, wanted) in zip(step.arrays(), plain.arrays(), strict=True):
            if name not in ("sampling.slot", "sampling.history", "sampling.spans") or "penalized" not in names:
                assert found.dtype == wanted.dtype and np.array_equal(found, wanted), name
        assert (step.sampling.touched == plain.sampling.touched).all() and step.sampling.plain == plain.sampling.plain
        reused.append(last is not None and step.samples is last[2].samples)
        return step

    one._builder.build = checked
    for number, name in enumerate(names * 2):
        prompt = [(5 * number + 3 * place) % VOCAB for place in range(1, 40 if name == "long" else 9)]
        one.add(request(f"{name}-{number}", prompt, PARAMS[name]))
    assert not any(output.error for each in drain(one).values() for output in each)
    assert not all(reused) and any(reused)


def test_one_step_replays_over_a_copy_of_the_cache():
    one = engine(MODEL)
    add_all(one)
    for _ in range(4):
        one.step()
    other = engine(MODEL).runner
    for theirs, ours in zip(other.cache.stores, one.runner.cache.stores):
        theirs.copy_(ours)
    other.sampler._counts = one.runner.sampler._counts.clone()
    seen = []
    real = one.runner.launch
    one.runner.launch = lambda step: seen.append(pickle.dumps(step)) or real(step)
    tokens = {output.request_id: output.tokens for output in one.step()}
    replayed = other.run(pickle.loads(seen[0]))
    assert [[one.token for one in result.chosen] for result in replayed] == [tokens[name] for name in tokens]
    assert len(tokens) == len(PARAMS)


@settings(max_examples=50)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=5),
    block_size=st.integers(1, 7),
)
def test_a_batch_says_where_each_token_goes(sizes, block_size):
    starts, lengths = [start for start, _ in sizes], [length for _, length in sizes]
    table = np.arange(1, 1 + 40 * len(sizes)).reshape(len(sizes), 40)
    batch = ForwardBatch.of(range(sum(lengths)), starts, lengths, table, block_size)
    place = 0
    for number, (start, length) in enumerate(sizes):
        for position in range(start, start + length):
            assert batch.positions[place] == position
            assert (batch.pages[place], batch.offsets[place]) == (
                table[number, position // block_size],
                position % block_size,
            )
            place += 1
    assert batch.ends.tolist() == [start + length for start, length in sizes]
    assert batch.last_indices().tolist() == (np.cumsum(lengths) - 1).tolist()
    again = unpack(ForwardBatch, pack(batch))
    assert all(np.array_equal(one, other) for (_, one), (_, other) in zip(batch.arrays(), again.arrays(), strict=True))


def test_a_part_of_a_step_is_the_step_of_those_sequences():
    one = engine(MODEL, DRAFT)
    add_all(one)
    one.step()
    output = one.scheduler.schedule()
    one.proposer.propose(output.seqs)
    whole = one._builder.build(output)
    for first, last in [(0, 2), (2, 5), (5, len(output.seqs))]:
        part, alone = whole.part(first, last), one._builder.build(SchedulerOutput(output.seqs[first:last]))
        for (name, ours), (_, theirs) in zip(part.arrays(), alone.arrays(), strict=True):
            if name == "batch.table":
                assert np.array_equal(ours[:, : theirs.shape[1]], theirs) and not ours[:, theirs.shape[1] :].any()
            elif not name.startswith("sampling."):
                assert np.array_equal(ours, theirs), name
    logits = torch.randn(len(output.seqs), VOCAB, generator=torch.Generator().manual_seed(0))
    sampler = one.runner.sampler
    counts = sampler._counts.clone()
    together = sampler.choose(logits, whole.sampling)
    sampler._counts = counts  # without what was just drawn
    assert one.runner.sampler.choose(logits[2:5], whole.part(2, 5).sampling) == together[2:5]


def test_a_steps_sampling_holds_no_reference_to_its_requests():
    tokens = [1, 2, 3]
    sampling = sampling_of([SeqSampling(RequestSampling(SamplingParams(repetition_penalty=1.5)), tokens, 2)])
    tokens.append(4)
    assert sampling.history.tolist() == [1, 2, 3] and sampling.position.tolist() == [3]


def test_steps_are_read_without_torch():
    """Another rank's receiver, or a recorder, needs numpy alone."""
    code = "import sys, hone.serve.step; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
