"""Whole simulations: of a model on a machine, the goodput, the verb, and beside the engine that really runs."""

from __future__ import annotations

import json

import pytest

from hone.base.errors import SpecError
from hone.cli.dispatch import main
from hone.model.facts import CheckpointFacts
from hone.plan.simulate.figures import Goal
from hone.plan.simulate.goodput import goodput
from hone.plan.simulate.opening import machine_named, open_simulation
from hone.plan.simulate.replica import EngineSizes
from hone.plan.simulate.simulation import run_simulation
from hone.plan.simulate.spec import SimulationSpec
from hone.plan.simulate.steps import kind_of
from hone.plan.simulate.traces import Arrival, Trace, synthetic
from hone.serve.request import Request
from hone.serve.spec import EngineSpec
from tests.plan.simulate.fixed import FixedSteps
from tests.serve.small import decoder, drain, engine, greedy

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def llama(tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


class Steps:
    """What a real engine scheduled: the kinds of its steps."""

    def __init__(self):
        self.kinds = []

    def step_s(self, kind, *, again=False):
        self.kinds.append(kind)
        return 1.0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("pages", [64, 20])
def test_the_steps_are_those_of_the_engine(ahead, pages):
    """The same requests, all at once: the real engine of a tiny model and the simulated one schedule the same steps."""
    lengths = [(5, 9), (40, 3), (17, 20), (1, 1), (33, 12), (64, 2), (8, 30), (21, 7)]
    if pages == 20:
        lengths = [(6, 30), (9, 28), (3, 40), (12, 25), (5, 30), (7, 33)]
    arrivals = [Arrival(0.0, prompt, output) for prompt, output in lengths]
    real = engine(decoder(), num_pages=pages, async_scheduling=ahead, max_model_len=80)
    steps, schedule = [], real.scheduler.schedule

    def seen():
        output = schedule()
        if output.seqs:
            steps.append(kind_of(output.seqs))
        return output

    real.scheduler.schedule = seen
    for number, one in enumerate(arrivals):
        real.add(Request(str(number), [number] * one.prompt_tokens, greedy(one.output_tokens)))
    drain(real)
    asked = Steps()
    sizes = EngineSizes(pages, 4, 8, 32, 80, steps_ahead=int(ahead))
    # As a request that comes later finds a thread that has launched a step already, all come before the first.
    run = simulate_at_once(arrivals, sizes, asked)
    assert asked.kinds == steps
    assert sum(one.preemptions for one in run) == real.scheduler.num_preemptions
    assert pages == 64 or real.scheduler.num_preemptions > 0


def simulate_at_once(arrivals, sizes, steps):
    """Serves requests that are all there before the first step."""
    from hone.plan.simulate.events import EventLoop
    from hone.plan.simulate.replica import Served, SimulatedReplica

    loop = EventLoop()
    replica = SimulatedReplica(sizes, steps, loop.clock, lambda one, now: None)
    served = [Served(number, 0.0, one.prompt_tokens, one.output_tokens) for number, one in enumerate(arrivals)]
    for one, arrival in zip(served, arrivals, strict=True):
        replica.add(one, arrival.tokens(one.number))

    def go_on():
        until = replica.step()
        if until is not None:
            loop.at(until, go_on)

    go_on()
    loop.run()
    return served


def test_goodput_of_one_server_is_where_theory_has_it():
    """A server of 1 s a request, evenly spaced: no one waits up to 1 request/s, and beyond the queue grows without bound."""
    sizes = EngineSizes(64, 16, 1, 16, 64, enable_prefix_caching=False)
    tried = []

    def at(rate):
        tried.append(rate)
        return synthetic("uniform", rate, 500, (1, 1), (1, 1))

    for start in (0.3, 5.0):
        found = goodput(at, sizes, FixedSteps(lambda: 1.0), Goal(1.5, 1.0), start=start, wanted=0.9, tolerance=0.01)
        assert found.rate == pytest.approx(1.0, rel=0.015)
        assert found.attainment == pytest.approx(1.0, abs=0.1) and None in [part for _, part in found.tried]
    never = goodput(at, sizes, FixedSteps(lambda: 1.0), Goal(0.5, 1.0), start=1.0)
    assert never.rate == 0.0 and never.attainment is None


def test_goodput_counts_both_goals_together():
    """Half of the requests miss TTFT's goal, the other half TPOT's: each goal alone is met by half, both by none."""
    arrivals = tuple(Arrival(100.0 * place, 200 if place % 2 else 1, 1 if place % 2 else 30) for place in range(40))

    class Steps:
        def step_s(self, kind, *, again=False):
            return 5.0 if kind.chunks and kind.num_tokens > 100 else 1.0

    sizes = EngineSizes(64, 16, 1, 256, 512)
    found = goodput(
        lambda rate: Trace(arrivals).stretched(rate), sizes, Steps(), Goal(2.0, 0.5), start=0.01, wanted=0.5
    )
    assert found.rate == 0.0


def test_a_model_on_a_gpu_that_is_not_here(llama):
    spec = SimulationSpec.from_overrides(
        {"traffic.rate": "4", "traffic.num_requests": "60", "busy_w": "700", "idle_w": "120"}
    )
    done = run_simulation(spec, CheckpointFacts.of(llama), machine_named("H200"))
    found = {one.name: one for one in done.figures}
    assert done.opened.steps.bound and "limits of the hardware" in found["tpot_p50_s"].note
    least = 2 * 7.5e9 / 4.8e12  # a decode step reads the weights once
    assert found["tpot_p50_s"].value > least and found["tpot_p50_s"].value < 3 * least
    assert done.opened.sizes.num_pages == pytest.approx(0.9 * 141e9 / (131072 * 64), rel=0.25)
    assert 0.1 < found["joules_per_token"].value < 10


def test_a_factor_and_host_time_lengthen_every_step(llama):
    facts, machine = CheckpointFacts.of(llama), machine_named("H200")
    plain = open_simulation(EngineSpec(), facts, machine).steps
    slow = open_simulation(EngineSpec(), facts, machine, host_s=0.001, step_factor=1.5).steps
    from hone.cost.serve.schedule import StepKind

    for kind in (StepKind(8, 900.0, (), 8, 1), StepKind(3, 100.0, ((0, 700),), 4, 1)):
        assert slow.step_s(kind) == pytest.approx(1.5 * plain.step_s(kind) + 0.001)
        exact = plain.serving.step_seconds(kind).value
        assert plain.step_s(kind) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"engine.pipeline_parallel_size": "2"}, "pipeline_parallel_size"),
        ({"engine.drafter": "prompt_lookup"}, "drafter"),
    ],
)
def test_what_cannot_be_followed_is_refused(llama, changes, what):
    spec = SimulationSpec.from_overrides({"traffic.rate": "4", "traffic.num_requests": "5", **changes})
    with pytest.raises(SpecError, match=what):
        run_simulation(spec, CheckpointFacts.of(llama), machine_named("H200"))


def test_the_verb_prints_figures_and_writes_requests(llama, tmp_path, capsys):
    out = tmp_path / "requests.csv"
    words = ["simulate", str(llama), "--machine=H200", "--traffic.rate=5", "--traffic.num_requests=40", f"--out={out}"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "ttft" in printed and "page_waste" in printed and "limits of the hardware" in printed
    assert out.read_text().count("\n") == 41
    apart = ["--disaggregation.prefill_replicas=1", "--disaggregation.decode_replicas=2", "--traffic.num_requests=20"]
    assert main([*words[:4], *apart, "--disaggregation.link=ethernet-100"]) == 0
    printed = capsys.readouterr().out
    assert (
        "(1 prefill + 2 decode) x" in printed and "kv_transfer_p99_s" in printed and "best_prefill_replicas" in printed
    )
    assert main([*words[:4], *apart, "--disaggregation.link=string"]) == 2
    assert "string" in capsys.readouterr().err
    assert main(["simulate", str(llama), "--machine=H900", "--traffic.rate=5"]) == 2
    assert "H900" in capsys.readouterr().err
    assert main(["simulate", str(llama)]) == 2
    assert "needs requests" in capsys.readouterr().err
    assert main(["simulate", str(tmp_path), "--traffic.rate=5"]) == 2
    assert "config.json" in capsys.readouterr().err
