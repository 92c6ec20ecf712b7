"""The spec of a simulation: which requests come, what serves them, and what is promised."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hone.base.spec import Spec
from hone.base.table import Choice, Technique
from hone.serve import AUTOSCALERS
from hone.serve.spec import EngineSpec


class TrafficSpec(Spec):
    """The requests: a published trace, or arrivals drawn from a process."""

    trace: str = Field(
        "", description="File of a trace: Azure's or BurstGPT's CSV, Mooncake's JSON lines. Empty: arrivals are drawn."
    )
    format: Literal["auto", "azure", "burstgpt", "mooncake"] = Field(
        "auto", description="Format of the file; auto: what its first line shows."
    )
    arrivals: Literal["poisson", "gamma", "uniform"] = Field("poisson", description="Process of drawn arrivals.")
    cv: float = Field(1.0, gt=0, description="Coefficient of variation of gamma gaps: 1 is Poisson, more is burstier.")
    prompt_tokens: tuple[int, int] = Field((512, 1536), description="Least and most tokens of a drawn prompt.")
    output_tokens: tuple[int, int] = Field((64, 256), description="Least and most tokens of a drawn answer.")
    num_requests: int = Field(1000, ge=0, description="Requests, the first of a trace; 0: all of it.")
    rate: float | None = Field(None, gt=0, description="Requests a second; empty: the trace's own.")
    scale_by: Literal["stretch", "thin"] = Field(
        "stretch", description="How a trace gets another rate: longer gaps, or fewer requests."
    )
    seed: int = Field(0, ge=0, description="Seed of what is drawn.")

    @model_validator(mode="after")
    def _whole(self) -> TrafficSpec:
        for name in ("prompt_tokens", "output_tokens"):
            least, most = getattr(self, name)
            if not 1 <= least <= most:
                raise ValueError(f"{name} {least}..{most} is not a range of positive numbers")
        if not self.trace and self.rate is None:
            raise ValueError("without a trace arrivals need a rate: set traffic.rate, or give traffic.trace")
        if not self.trace and not self.num_requests:
            raise ValueError("drawn arrivals need a number: set traffic.num_requests")
        return self


class GoalSpec(Spec):
    """What is promised to users."""

    ttft_s: float = Field(2.0, gt=0, description="Seconds within which the first token is due.")
    tpot_s: float = Field(0.2, gt=0, description="Seconds a token after the first, on average over a request.")
    attainment: float = Field(0.9, gt=0, le=1, description="Part of the requests that must meet both.")
    warmup: float = Field(0.1, ge=0, lt=1, description="First part of the requests, which latencies do not count.")


class ElasticSpec(Spec):
    """How the number of replicas follows the load."""

    autoscaler: Annotated[Technique, Choice(AUTOSCALERS)] | None = Field(
        None, description="Policy; empty: the number of replicas is fixed."
    )
    interval_s: float = Field(5.0, gt=0, description="Seconds between two decisions.")
    start_s: float = Field(120.0, ge=0, description="Seconds of a cold start: machine, image, weights, first step.")
    warm: int = Field(0, ge=0, description="Loaded replicas that wait, paid for all the time.")
    warm_start_s: float = Field(5.0, ge=0, description="Seconds until one of them takes requests.")
    migration: Literal["none", "waiting", "all"] = Field(
        "none",
        description="What a draining replica hands over: nothing, requests that wait, or all, whose tokens are computed again.",
    )


class DisaggregationSpec(Spec):
    """Replicas that only compute prompts, and replicas that only decode."""

    prefill_replicas: int = Field(1, ge=1, le=1024, description="Replicas that compute prompts and the first token.")
    decode_replicas: int = Field(1, ge=1, le=1024, description="Replicas that compute the other tokens.")
    link: str = Field(
        "infiniband-ndr",
        description="What carries keys and values from each prefill replica: a link of `hone hardware`, or bytes/s, as 50e9.",
    )


class SimulationSpec(Spec):
    """A simulated serving run: the engine's own scheduler under predicted step times."""

    traffic: TrafficSpec = Field(description="The requests.")
    goal: GoalSpec = Field(GoalSpec(), description="What is promised.")
    engine: EngineSpec = Field(EngineSpec(), description="The engine, as `hone serve` takes it.")
    replicas: int = Field(1, ge=1, le=1024, description="Engines behind one router.")
    elastic: ElasticSpec = Field(
        ElasticSpec(), description="Replicas that come and go; `replicas` are then those at the start."
    )
    disaggregation: DisaggregationSpec | None = Field(
        None, description="Prefill and decode on replicas of their own; empty: each replica does both."
    )
    goodput: bool = Field(False, description="Also find the highest rate at which the goal is met.")
    host_s: float = Field(0.0, ge=0, description="Seconds of a step beside what is predicted, as measured on the host.")
    step_factor: float = Field(
        1.0, gt=0, description="Factor on predicted step times: measured over predicted ones of a real run."
    )
    busy_w: float | None = Field(
        None, gt=0, description="Watts of a replica that computes; empty: the calibration's, else unknown."
    )
    idle_w: float | None = Field(None, ge=0, description="Watts of a replica that waits.")

    @model_validator(mode="after")
    def _together(self) -> SimulationSpec:
        if self.disaggregation is None:
            return self
        if self.elastic.autoscaler is not None:
            raise ValueError("disaggregation and elastic.autoscaler do not go together: leave one of them out")
        if self.replicas != 1:
            raise ValueError(
                "with disaggregation the replicas are its prefill_replicas and decode_replicas: leave replicas out"
            )
        return self
