"""A simulation from its spec: opens the trace and the engine, runs them, and returns the figures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import fmean

from hone.base.errors import SpecError
from hone.base.figure import Figure
from hone.measure.machine import Machine
from hone.model.facts import CheckpointFacts
from hone.plan.simulate.disaggregated import break_even, disaggregation_of
from hone.plan.simulate.elastic import Elasticity, Scaling
from hone.plan.simulate.figures import Goal, Power, figures
from hone.plan.simulate.goodput import Goodput, goodput
from hone.plan.simulate.opening import Opened, open_simulation
from hone.plan.simulate.run import Conduct, SimulatedRun, fitting, simulate
from hone.plan.simulate.spec import ElasticSpec, SimulationSpec, TrafficSpec
from hone.plan.simulate.trace_files import read_trace
from hone.plan.simulate.traces import Trace, at_rate, synthetic
from hone.serve.replicas.autoscale.policy import Autoscaler


@dataclass
class Simulated:
    """A run and its figures; `left_out` requests were longer than the engine takes."""

    run: SimulatedRun
    figures: list[Figure]
    opened: Opened
    trace: Trace
    left_out: int
    goodput: Goodput | None = None
    scaling: Scaling | None = None


def trace_of(spec: TrafficSpec) -> Trace:
    """The requests of `spec`. Raises SpecError for a file that is none."""
    if not spec.trace:
        assert spec.rate is not None, "the spec asks for it"
        return synthetic(
            spec.arrivals,
            spec.rate,
            spec.num_requests,
            spec.prompt_tokens,
            spec.output_tokens,
            cv=spec.cv,
            seed=spec.seed,
        )
    found = read_trace(spec.trace, spec.format, spec.num_requests)
    return found if spec.rate is None else at_rate(found, spec.rate, spec.scale_by, spec.seed)


def scaling_of(spec: ElasticSpec) -> Scaling | None:
    """What follows the policy of `spec`; None without one."""
    if spec.autoscaler is None:
        return None
    assert isinstance(spec.autoscaler, Autoscaler), "the table holds nothing else"
    return Scaling(
        Elasticity(spec.autoscaler, spec.interval_s, spec.start_s, spec.warm, spec.warm_start_s, spec.migration)
    )


def power_of(spec: SimulationSpec, machine: Machine) -> Power | None:
    """Watts of a replica: the spec's, else those drawn while the machine was calibrated; None where neither is known."""
    if spec.busy_w is not None:
        return Power(spec.busy_w, spec.busy_w if spec.idle_w is None else spec.idle_w)
    watts = machine.calibration.watts if machine.calibration is not None else None
    return (
        None
        if watts is None
        else Power(watts, watts if spec.idle_w is None else spec.idle_w, "measured in calibration:")
    )


def run_simulation(spec: SimulationSpec, model: CheckpointFacts, machine: Machine) -> Simulated:
    """Simulates `spec` for a model on a machine. Raises SpecError and FitError for what cannot be served."""
    opened = open_simulation(spec.engine, model, machine, host_s=spec.host_s, step_factor=spec.step_factor)
    trace, left_out = _fitting(trace_of(spec.traffic), opened)
    scaling = scaling_of(spec.elastic)
    conduct = Conduct(replicas=spec.replicas)
    if spec.disaggregation is not None:
        parts = spec.disaggregation
        conduct.apart = disaggregation_of(
            parts.prefill_replicas, parts.decode_replicas, parts.link, opened.steps.serving
        )
    followed = conduct
    if scaling is not None:
        followed = Conduct(
            scaling.begin, came=scaling.came, replicas=spec.replicas, most=max(scaling.most, spec.replicas)
        )
    run = simulate(trace, opened.sizes, opened.steps, followed)
    goal = Goal(spec.goal.ttft_s, spec.goal.tpot_s)
    found = figures(run, goal, warmup=spec.goal.warmup, power=power_of(spec, machine), bound=opened.steps.bound)
    if scaling is not None:
        more = scaling.figures(run.fleet, run.end_s)
        found = [one for one in found if one.name not in {other.name for other in more}] + more
    if run.apart is not None:
        prompts, outputs = (
            [getattr(one, name) for one in trace.arrivals] for name in ("prompt_tokens", "output_tokens")
        )
        found += run.apart.figures(run.end_s, opened.steps.bound)
        found += break_even(run.apart.how, opened.steps, opened.sizes, round(fmean(prompts)), fmean(outputs))
    best = None
    if spec.goodput:
        best = goodput(
            partial(_at, spec, opened),
            opened.sizes,
            opened.steps,
            goal,
            start=_start(trace, spec),
            wanted=spec.goal.attainment,
            warmup=spec.goal.warmup,
            conduct=conduct,
        )
        met = f"{spec.goal.attainment:.0%} meet TTFT <= {goal.ttft_s:g} s and TPOT <= {goal.tpot_s:g} s"
        found.append(
            Figure(
                name="goodput_requests_per_s",
                value=best.rate,
                unit="requests/s",
                how="modelled",
                n=len(best.tried),
                note=met,
            )
        )
    return Simulated(run, found, opened, trace, left_out, best, scaling)


def _fitting(trace: Trace, opened: Opened) -> tuple[Trace, int]:
    """`trace` without requests that are too long, and their number. Raises SpecError where none is left."""
    longest = min(opened.sizes.max_model_len, opened.sizes.num_pages * opened.sizes.block_size)
    if all(one.prompt_tokens + one.output_tokens > longest for one in trace.arrivals):
        raise SpecError(
            f"every request of the trace is longer than the engine's {longest} tokens", fix="raise engine.max_model_len"
        )
    return fitting(trace, opened.sizes)


def _at(spec: SimulationSpec, opened: Opened, rate: float) -> Trace:
    return _fitting(trace_of(spec.traffic.model_copy(update={"rate": rate})), opened)[0]


def _start(trace: Trace, spec: SimulationSpec) -> float:
    rate = spec.traffic.rate or trace.rate
    return rate if rate != float("inf") else 1.0
