"""Replicas of hone's server as a Ray Serve application: the same HTTP endpoints, the same autoscalers, on the machines of a Ray cluster.

serve run hone.serve.replicas.on_ray:app model=/models/int4 num_gpus=1        # from Ray's own command line
ray.serve.run(app({"model": "/models/int4", "autoscaler": {"kind": "hysteresis", "max_replicas": 4}}))
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from hone.base.errors import MissingExtra, SpecError
from hone.base.run import Run
from hone.base.spec import Spec
from hone.base.table import Choice
from hone.serve import AUTOSCALERS
from hone.serve.http.spec import ServerSpec
from hone.serve.replicas.autoscale.policy import Autoscaler, Load, Seen

_UNSEEN = ("predictive",)
"""Autoscalers that count arrivals, which Ray Serve does not tell a policy."""

_RAYS = {
    "host": "give it to Ray: serve.start(http_options={'host': ...})",
    "port": "give it to Ray: serve.start(http_options={'port': ...})",
    "ssl_keyfile": "let what stands before Ray's proxies end HTTPS",
    "ssl_certfile": "let what stands before Ray's proxies end HTTPS",
    "ssl_ca_certs": "let what stands before Ray's proxies end HTTPS",
    "processes": "give replicas or autoscaler",
    "limits.max_connections": "connections end at Ray's proxies; give max_ongoing_requests",
    "limits.head_s": "connections end at Ray's proxies",
}
"""Fields of a server that are Ray's here, and what to do instead."""

_FRESH = {"metrics_interval_s": 1.0, "look_back_period_s": 2.0}
"""Ray averages over no longer than it must: an autoscaler has its own look-back."""


class OnRay(Spec):
    """A deployment of replicas of one model."""

    model: str = Field(description="Folder of the model, which every machine of the cluster reads.")
    server: dict[str, Any] = Field(
        {}, description="Fields of `hone serve`: {engine: {max_num_seqs: 64}, api_key: ...}."
    )
    autoscaler: Annotated[Autoscaler, Choice(AUTOSCALERS)] | None = Field(
        None, description="How many replicas there are; empty: `replicas`."
    )
    replicas: int = Field(1, ge=1, description="Replicas without an autoscaler.")
    num_gpus: float = Field(0, ge=0, description="GPUs of a replica; 0 serves on the CPU.")
    num_cpus: float = Field(1, ge=0, description="Processors that Ray sets aside for a replica.")
    max_ongoing_requests: int = Field(256, ge=1, description="Requests that Ray sends to a replica at once.")


def server_of(spec: OnRay) -> ServerSpec:
    """The server of a replica. Raises SpecError for wrong fields, and for those that Ray Serve does not leave to it."""
    server = ServerSpec.read({"served_model_name": [Path(spec.model).resolve().name], **spec.server})
    for field, way in _RAYS.items():
        group, _, name = field.rpartition(".")
        if name in (getattr(server, group) if group else server).model_fields_set:
            raise SpecError(f"server.{field} has no effect in a replica on Ray Serve", fix=f"leave it out: {way}")
    return server


def scaling(spec: OnRay) -> dict[str, Any]:
    """The options of a deployment that say how many replicas there are. Raises SpecError for an autoscaler that Ray cannot feed."""
    if spec.autoscaler is None:
        return {"num_replicas": spec.replicas}
    found = spec.autoscaler
    if found.kind in _UNSEEN:
        raise SpecError(
            f"autoscaler {found.kind} forecasts arrivals, which Ray Serve does not tell a policy",
            fix="use hysteresis, doubling, target_tracking or panic_window",
        )
    policy = {"policy_function": f"{__name__}:Policy", "policy_kwargs": {"autoscaler": found.model_dump(mode="json")}}
    # Delays are the policy's own: Ray applies what it says at once.
    config = {"min_replicas": found.min_replicas, "max_replicas": found.max_replicas, "policy": policy}
    return {"autoscaling_config": {**config, "upscale_delay_s": 0, "downscale_delay_s": 0, **_FRESH}}


class Policy:
    """A custom policy of Ray Serve (`AutoscalingPolicy`): asked in each of its control loops, it says what an autoscaler of hone wants."""

    def __init__(self, autoscaler: Mapping[str, Any]) -> None:
        self._seen = Seen(AUTOSCALERS.read(dict(autoscaler)))

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """(replicas that there should be, state that Ray keeps: none) for an `AutoscalingContext`."""
        load = Load(
            time_s=time.time() if context.current_time is None else context.current_time,
            replicas=context.target_num_replicas,
            ready=context.current_num_replicas,
            ongoing=round(context.total_num_requests),
        )
        return self._seen.decide(load), {}


class Endpoints:
    """hone's HTTP endpoints as one ASGI application, which starts its engine with the server that runs it (ASGI's lifespan)."""

    live: Endpoints | None = None
    """The one of this process."""

    def __init__(self, model: str, server: ServerSpec, device: str) -> None:
        self._given = model, server, device
        self._app: Any = None
        self._engine: Any = None
        self._front: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        while True:
            asked = (await receive())["type"]
            try:
                await (self._start() if asked == "lifespan.startup" else self._stop())
            except Exception as error:
                await send({"type": f"{asked}.failed", "message": str(error)})
                return
            await send({"type": f"{asked}.complete"})
            if asked == "lifespan.shutdown":
                return

    async def _start(self) -> None:
        from hone.serve.http.processes.one_front import OneFront
        from hone.serve.http.server import build_engine
        from hone.serve.http.worker import EngineProcess

        model, spec, device = self._given
        folder = Path(model)
        self._front = await asyncio.to_thread(OneFront, folder, spec, Run(quiet=True, device=device))
        options = {"folder": str(folder), "spec": spec.engine, "device": device, "max_queue": spec.max_queue}
        self._engine = await EngineProcess.start(build_engine, options)
        self._app = await self._front.app(self._engine)
        Endpoints.live = self

    async def _stop(self) -> None:
        if self._engine is not None:
            await self._front.close(self._engine)

    def check(self) -> None:
        """Raises RuntimeError once the engine has ended."""
        if self._engine is not None and self._engine.death is not None:
            raise RuntimeError(self._engine.death)


def _value(name: str, given: Any) -> Any:
    """The value of a field, of which a text is read as YAML."""
    try:
        return yaml.safe_load(given) if isinstance(given, str) else given
    except yaml.YAMLError as error:
        raise SpecError(
            f"{name}={given} is no YAML: {' '.join(str(error).split())}", fix="quote it as one value"
        ) from None


def app(args: Mapping[str, Any]) -> Any:
    """The Ray Serve application of `OnRay`'s fields; values that are texts, as of a command line, are read as YAML.

    Raises MissingExtra without Ray Serve, SpecError for wrong fields.
    """
    spec = OnRay.read({name: _value(name, one) for name, one in args.items()})
    options, server = scaling(spec), server_of(spec)
    try:
        from ray import serve
    except ImportError:
        raise MissingExtra.of("replicas on Ray Serve", "ray[serve]", "ray") from None
    if not Path(spec.model, "config.json").exists():
        raise SpecError(f"model={spec.model} has no config.json", fix="give a folder that every machine reads")

    @serve.ingress(Endpoints(spec.model, server, "cuda" if spec.num_gpus else "cpu"))
    class Replica:
        """One engine behind hone's endpoints."""

        def check_health(self) -> None:
            """Ray replaces a replica whose engine has ended."""
            if Endpoints.live is not None:
                Endpoints.live.check()

    return serve.deployment(
        Replica,
        name="hone",
        max_ongoing_requests=spec.max_ongoing_requests,
        graceful_shutdown_timeout_s=server.drain_s,
        ray_actor_options={"num_gpus": spec.num_gpus, "num_cpus": spec.num_cpus},
        **options,
    ).bind()
