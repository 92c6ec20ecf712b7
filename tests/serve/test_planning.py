"""What a serving run is predicted to take: its steps against the engine's own, their times against the ledger's H200."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.serve import SHAPES
from hone.base.errors import SpecError
from hone.cost.cache import keys_and_values
from hone.cost.ranks import LINK_BYTES_PER_S, MESSAGE_S, Split
from hone.cost.serve.figures import read_weights
from hone.cost.serve.schedule import Batching, StepKind, Traffic, schedule
from hone.cost.serve.serving import (
    MOST_CAPTURED,
    Serving,
    gather_seconds,
    mapping_seconds,
    serving_seconds,
    touched_pages,
)
from hone.cost.steps import FP8_GAIN
from hone.measure.calibration import Bandwidth, Calibration, MatmulRate
from hone.measure.machine import Machine
from hone.model.decoder import build
from hone.model.facts import CheckpointFacts
from hone.model.shape import Shape
from hone.serve import planning
from hone.serve.engine import Engine
from hone.serve.paging.cache import KVCache, cache_tensors
from hone.serve.paging.compiled_step import why_not
from hone.serve.planning import compiles_on, of_a_rank, serving_of
from hone.serve.request import Request
from hone.serve.spec import EngineSpec
from tests.cost.h200 import LLAMA_8B, h200, row
from tests.serve.small import VOCAB, decoder, engine, greedy

TENSORS = [keys_and_values(8, 128)] * 32
MODEL = decoder()


@pytest.fixture(autouse=True)
def with_triton(monkeypatch):
    monkeypatch.setattr(planning, "triton_version", lambda: (3, 6))


def serving(machine=None, **more) -> Serving:
    machine = machine or h200()
    in_place = planning.reads_in_place_on(machine, TENSORS, "bfloat16")
    return Serving(LLAMA_8B, machine, "bfloat16", in_place=in_place, **more)


def decode(num_seqs: int, context: float = 548) -> StepKind:
    return StepKind(num_seqs, context, (), num_seqs, 1)


def prefill(tokens: int) -> StepKind:
    return StepKind(0, 0, ((0, tokens),), 1, 1)


@pytest.mark.parametrize("num_seqs", [1, 16, 64])
def test_engine_steps_take_what_the_ledger_measured(num_seqs):
    measured = row("serve", f"llama3-8b: decode, batch {num_seqs}")
    step = serving().step_seconds(decode(num_seqs))
    assert not step.bound and step.value == pytest.approx(1e-3 * measured["ms"], rel=0.25)
    assert num_seqs / step.value == pytest.approx(measured["value"], rel=0.25)


def test_guesses_prompts_and_too_many_sequences_are_launched_kernel_by_kernel():
    replayed = serving().step_seconds(decode(1)).value
    assert serving(captured=False).step_seconds(decode(1)).value > 3 * replayed
    assert serving().step_seconds(decode(1)._replace(chunks=((0, 1),))).value > 3 * replayed
    few, many = (serving().step_seconds(decode(count, 1)).value for count in (MOST_CAPTURED, MOST_CAPTURED + 1))
    assert many > 1.5 * few


def test_a_short_prompt_takes_its_launches_a_long_one_its_products():
    one = serving()
    short, shorter = (one.step_seconds(prefill(tokens)).value for tokens in (100, 10))
    assert short == shorter == pytest.approx(one.launched_s, rel=0.02)
    assert one.step_seconds(prefill(8192)).value > 4 * short


def test_prompts_that_come_again_are_a_replay_unless_they_are_long():
    one = serving()
    first, later = (one.step_seconds(prefill(100), again=again).value for again in (False, True))
    assert first == pytest.approx(one.launched_s, rel=0.02) and later < 0.3 * first
    assert one.step_seconds(prefill(8192), again=True) == one.step_seconds(prefill(8192))  # its launches are hidden
    mixed = decode(16)._replace(chunks=((0, 100),))
    assert one.step_seconds(mixed, again=True).value < 0.3 * one.step_seconds(mixed).value
    assert serving(captured=False).step_seconds(mixed, again=True) == serving(captured=False).step_seconds(mixed)


def test_weights_of_fp8_codes_are_multiplied_at_their_own_rate():
    plain, coded = (serving(codes=codes, read_bytes=8e9) for codes in ("", "rowwise"))
    assert plain.coded_gain == 1.0 and coded.coded_gain == FP8_GAIN  # this calibration has no fp8 linears
    times = plain.step_seconds(prefill(8192)).value / coded.step_seconds(prefill(8192)).value
    assert 1.3 < times < FP8_GAIN
    ledger = (
        row("serve", "llama3-8b-fp8, serve_load: prefill")["value"]
        / row("serve", "llama3-8b-kv-fp8, serve_load: prefill")["value"]
    )
    assert times == pytest.approx(ledger, rel=0.25)
    assert plain.step_seconds(decode(1)) == coded.step_seconds(decode(1))  # one row reads its weights
    assert coded.step_seconds(decode(256)).value < plain.step_seconds(decode(256)).value


def test_pages_are_read_in_place_where_the_dispatch_says_so(monkeypatch):
    machine = h200()
    assert planning.reads_in_place_on(machine, TENSORS, "bfloat16")
    assert not planning.reads_in_place_on(machine, TENSORS, "float32")
    assert not planning.reads_in_place_on(machine, TENSORS, "bfloat16", softcap=True)
    assert not planning.reads_in_place_on(machine, [*TENSORS, keys_and_values(8, 512)], "bfloat16")
    assert not planning.reads_in_place_on(machine.model_copy(update={"device": "cpu"}), TENSORS, "bfloat16")
    monkeypatch.setattr(planning, "triton_version", lambda: (0, 0))
    assert not planning.reads_in_place_on(machine, TENSORS, "bfloat16")


def test_quantized_weights_are_what_is_stored_of_them():
    dense = 2 * LLAMA_8B.num_params
    assert read_weights(LLAMA_8B, "bfloat16", dense) is None
    embedding = 2 * 128256 * 4096
    assert read_weights(LLAMA_8B, "bfloat16", 5e9) == 5e9 - embedding
    assert read_weights(LLAMA_8B, "bfloat16", 5e9, 0.5) == 5e9 - embedding / 4
    plain, quantized = (serving(read_bytes=read).step_seconds(decode(1)).value for read in (None, 4e9))
    assert quantized < 0.7 * plain


def measured_steps(one: Engine, traffic: Traffic) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    """(decoding sequences, chunks) of every step of a closed loop, as the engine took them."""
    steps, real = [], one.scheduler.schedule

    def watched():
        output = real()
        chunks = tuple((item.start, item.count) for item in output.seqs if not item.seq.decoding)
        steps.append((len(output.seqs) - len(chunks), chunks))
        return output

    one.scheduler.schedule = watched
    shared = [(3 * place) % VOCAB for place in range(traffic.shared_prefix)]
    coming = [
        Request(
            str(number),
            shared + [(5 * number + place) % VOCAB for place in range(prompt - len(shared))],
            greedy(output),
        )
        for number, (prompt, output) in enumerate(zip(traffic.prompts, traffic.outputs))
    ]
    in_flight = 0
    while coming or in_flight:
        while coming and in_flight < traffic.concurrency:
            one.add(coming.pop(0))
            in_flight += 1
        in_flight -= sum(output.finish is not None for output in one.step())
    return steps


@settings(max_examples=15)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 25), st.integers(1, 9)), min_size=1, max_size=8),
    shared=st.sampled_from([0, 9]),
    concurrency=st.integers(1, 6),
    budget=st.sampled_from([8, 13, 200]),
    caching=st.booleans(),
    static=st.booleans(),
)
def test_steps_are_planned_as_the_engine_takes_them(sizes, shared, concurrency, budget, caching, static):
    traffic = Traffic(tuple(shared + own for own, _ in sizes), tuple(out for _, out in sizes), shared, concurrency)
    batching = Batching(4, budget, 4, caching, static)
    one = engine(
        MODEL,
        num_pages=400,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        batching="static" if static else "continuous",
    )
    planned = []
    for step in schedule(traffic, batching):
        planned += [(step.decoding, step.chunks)] * step.repeats
    assert planned == measured_steps(one, traffic)
    used = one.pool.num_pages - len(one.pool._blank)  # those that were ever given out and are found again
    assert not caching or used <= touched_pages(traffic, batching)


def flat(op_s: float = 0.0) -> Machine:
    """A CPU on which every byte takes 1 ns, arithmetic nothing, and large buffers ten times as long as small ones."""
    calibration = Calibration(
        device="test", threads=1, torch="2", read_bytes_per_s=1e8, op_s=op_s or 1e-12, exp_per_s=1e9, attentions=(),
        copies=(Bandwidth(num_bytes=1 << 16, bytes_per_s=1e9), Bandwidth(num_bytes=1 << 28, bytes_per_s=1e8)),
        matmuls=(MatmulRate(dtype="bfloat16", m=1, n=1, k=1, flops_per_s=1e18),),
    )  # fmt: skip
    return Machine(
        cpu="c", num_cores=1, num_threads=1, ram_bytes=1, os="", python="", torch="2", calibration=calibration
    )


def test_new_memory_costs_its_mapping_once_per_step():
    known = flat()
    assert mapping_seconds(known, 1 << 27) == 0, "not calibrated"
    gathers = (Bandwidth(num_bytes=1 << 27, bytes_per_s=1e7),)
    new = known.model_copy(update={"calibration": known.calibration.model_copy(update={"gathers": gathers})})
    assert mapping_seconds(new, 1 << 20) == 0, "small tensors reuse memory"
    assert mapping_seconds(new, 1 << 27) == pytest.approx((1 << 28) / 1e7 - (1 << 28) / 1e8)
    with_mapping, without = (
        Serving(LLAMA_8B, one, "bfloat16").step_seconds(decode(16, 4097)).value for one in (new, known)
    )
    layer = 2 * 16 * LLAMA_8B.state_values(4097) / LLAMA_8B.num_layers
    assert with_mapping - without == pytest.approx(mapping_seconds(new, layer))


def test_a_cpu_gathers_pages_at_the_rate_of_all_layers_together():
    """Each layer's pages are out of the cache when their turn comes again."""
    machine = flat()
    assert gather_seconds(machine, (1 << 28) / 3) == pytest.approx((1 << 28) / 1e8)
    one = Serving(LLAMA_8B, machine, "bfloat16")
    few, many = (one.step_seconds(decode(16, context)).value for context in (1, 4097))
    assert many - few == pytest.approx(gather_seconds(machine, 2 * 16 * LLAMA_8B.state_values(4097)), rel=0.01)


def test_python_takes_its_part_of_every_step_layer_and_sequence():
    machine = flat(op_s=1e3)
    one = Serving(LLAMA_8B, machine, "bfloat16")
    alone, two, mixed = (
        one.step_seconds(kind).value / 1e3 for kind in (decode(1), decode(2), decode(1)._replace(chunks=((0, 1),)))
    )
    assert two - alone == pytest.approx(20, abs=0.5)
    assert mixed - two == pytest.approx(45 * 32, rel=0.01)
    assert alone == pytest.approx(32 * (4 + 60 + 40) + 146, rel=0.01)


def test_threads_that_are_not_used_make_the_work_longer():
    machine = flat()
    two = machine.model_copy(update={"calibration": machine.calibration.model_copy(update={"threads": 2})})
    work = Serving(LLAMA_8B, two, "bfloat16", threads=2).step_seconds(decode(4)).value
    assert Serving(LLAMA_8B, two, "bfloat16", threads=1).step_seconds(decode(4)).value == pytest.approx(
        2 * work, rel=1e-3
    )


def test_a_run_is_the_sum_of_its_steps():
    traffic, batching = Traffic((9, 9), (4, 2), 0, 2), Batching(4, 100, 4, True)
    one = Serving(LLAMA_8B, flat(), "bfloat16")
    steps = [*schedule(traffic, batching)]
    assert [(step.decoding, step.chunks, step.samples, step.repeats) for step in steps] == [
        (0, ((0, 9), (0, 9)), 2, 1),
        (2, (), 2, 1),
        (1, (), 1, 2),
    ]
    run = serving_seconds(one, traffic, batching)
    assert run.value == pytest.approx(sum(step.repeats * one.step_seconds(step).value for step in steps), rel=0.01)
    assert "1 mixed steps" in run.formula and "3 decode steps" in run.formula


def test_a_run_whose_like_was_served_before_has_its_graphs():
    """A first step with prompts of a small model waits for launches out of Python, one that is replayed does not."""
    one = serving()
    traffic, batching = Traffic((64,) * 8, (4,) * 8, 0, 4), Batching(4, 256, 16, True)
    cold, warm = (serving_seconds(one, replace(traffic, repeated=warm), batching).value for warm in (False, True))
    assert 0.5 * one.launched_s < cold - warm < 2 * one.launched_s


def test_ranks_share_the_work_and_pay_for_their_exchanges():
    """One rank's layers, and two sums a layer: less than a whole step, more than its part of one."""
    config = SHAPES["llama3-8b"][0].config(128256, None, 0)
    model = CheckpointFacts(
        where="", config=config, dtype="bfloat16", weights_bytes=2 * config.num_params, tokenizer=None
    )
    times = {}
    for size, stages in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2)):
        spec = EngineSpec(tensor_parallel_size=size, pipeline_parallel_size=stages, max_num_seqs=64)
        part = of_a_rank(spec, model)
        held = part.weights_bytes / model.weights_bytes
        assert 1 / (size * stages) <= held < 1.15 / (size * stages)
        one = serving_of(spec, part, h200())
        times[size, stages] = one.step_seconds(decode(64)).value
        assert (size * stages == 1) != ("link rates are not calibrated" in one.step_seconds(decode(64)).formula)
    assert times[1, 1] / 2 < times[2, 1] < times[1, 1] and times[2, 1] / 2 < times[4, 1] < times[2, 1]
    assert times[1, 2] > 0.9 * times[1, 1], "each stage reads its weights for every part of the sequences"
    with pytest.raises(SpecError, match="num_heads 32 cannot be divided among 3"):
        of_a_rank(EngineSpec(tensor_parallel_size=3), model)


def test_small_sums_take_one_exchange_large_ones_a_ring():
    gpus = Split(4, 1, "cuda")
    assert gpus.all_reduce_s(8192) == pytest.approx(MESSAGE_S["cuda"] + 3 * 8192 / LINK_BYTES_PER_S["cuda"])
    large = 1 << 26
    assert gpus.all_reduce_s(large) == pytest.approx(6 * MESSAGE_S["cuda"] + 1.5 * large / LINK_BYTES_PER_S["cuda"])
    assert Split(1, 2, "cuda").all_reduce_s(8192) == Split().gather_s(8192) == 0


def test_a_compiled_step_on_a_cpu_reads_weights_and_pages_once():
    machine = flat()
    dense = Serving(LLAMA_8B, machine, "bfloat16", compiled=True)
    weights = 2 * (LLAMA_8B.num_params - LLAMA_8B.vocab_size * LLAMA_8B.hidden_size)
    assert dense.step_seconds(decode(1)).value == pytest.approx(weights / 1e8, rel=0.01)
    packed = replace(dense, read_bytes=weights / 4)
    assert packed.step_seconds(decode(1)).value == pytest.approx(weights / 4 / 0.8 / 1e8, rel=0.03)
    gathered = replace(dense, compiled=False)
    assert dense.step_seconds(decode(33)) == gathered.step_seconds(decode(33)), "too many sequences"
    assert dense.step_seconds(decode(8)).value < 1.4 * dense.step_seconds(decode(1)).value


def test_which_models_a_cpu_compiles_is_what_the_engine_compiles():
    machine = flat()
    sizes = {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 96}
    for more in ({}, {"head_dim": 16}, {"intermediate_size": 72}, {"family": "qwen3"}):
        config = Shape(**{**sizes, **more}).config(97)
        for dtype in ("float32", "bfloat16"):
            model = build(config, dtype=getattr(torch, dtype))
            cache = KVCache(cache_tensors(config), 4, 8, dtype=getattr(torch, dtype), rope_len=64)
            assert compiles_on(machine, config, dtype) == (why_not(model, cache) is None), (more, dtype)


def test_requests_wait_for_pages_as_in_the_engine():
    """With few pages there are about as many steps as the engine takes, which preempts and computes again."""
    planned, real, endless = 0, 0, 0
    for number in range(6):
        prompts, outputs = tuple(5 + (7 * number + 5 * one) % 16 for one in range(5)), (9, 4, 11, 7, 3)
        traffic = Traffic(prompts, outputs, 0, 4)
        pages = max(-(-(prompt + output) // 4) for prompt, output in zip(prompts, outputs)) + number % 3
        batching = Batching(4, 13, 4, False, num_pages=pages)
        sizes = {"num_pages": pages, "max_num_seqs": 4, "max_num_batched_tokens": 13}
        one = engine(MODEL, enable_prefix_caching=False, **sizes)
        real += len(measured_steps(one, traffic))
        planned += sum(step.repeats for step in schedule(traffic, batching))
        endless += sum(step.repeats for step in schedule(traffic, replace(batching, num_pages=None)))
    assert endless < 0.8 * real, "pages were short"
    assert planned == pytest.approx(real, rel=0.15)


def test_pages_that_sequences_share_are_read_once():
    one, context, shared = serving(), 4160, 4096
    apart = decode(128, context)
    whole, alike = (one.step_seconds(step).value for step in (apart, apart._replace(shared=shared)))
    read = 0.95 * h200().calibration.read_bytes_per_s
    assert whole - alike == pytest.approx(127 * 2 * LLAMA_8B.state_values(shared) / read, rel=1e-6)
    few = decode(4, context)
    assert one.step_seconds(few._replace(shared=shared)).value == one.step_seconds(few).value, (
        "the engine reads them apart"
    )
    short = decode(128, 100 * shared)
    assert one.step_seconds(short._replace(shared=shared)).value == one.step_seconds(short).value
    steps = [*schedule(Traffic((41, 41), (3, 3), 33, 2), Batching(4, 100, 16, True))]
    assert {step.shared for step in steps} == {32}, "whole pages"


def test_prompts_of_8_bit_codes_are_multiplied_as_codes_where_the_gpu_can():
    from benchmarks.predicted.estimates import quantized

    spec = EngineSpec(max_num_seqs=8, max_num_batched_tokens=8192)
    made = {name: quantized("llama3-8b", 2, name, "cpu") for name in ("16 bit", "fp8", "int4 g128")}
    opened = {name: serving_of(spec, model, h200()) for name, model in made.items()}
    assert [one.codes for one in opened.values()] == ["", "rowwise", ""]
    plain, coded, packed = (one.step_seconds(prefill(8192)).value for one in opened.values())
    assert packed == plain and 1.2 < plain / coded < 1.78
    older = h200().model_copy(update={"gpus": (h200().gpus[0].model_copy(update={"capability": "8.0"}),)})
    assert serving_of(spec, made["fp8"], older).codes == ""
    assert serving_of(spec, made["fp8"], flat()).codes == ""
