"""Replicas on Ray Serve: the policy it asks is hone's autoscaler, and a deployment answers as `hone serve` does."""

from __future__ import annotations

import importlib
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from hone.base.errors import MissingExtra, SpecError
from hone.model import hf
from hone.serve import AUTOSCALERS
from hone.serve.replicas import on_ray
from hone.serve.replicas.autoscale.policy import Load, Seen
from tests.serve.small import decoder, dense_greedy


def ray_serve() -> bool:
    """Whether Ray Serve with all it needs is here: Ray alone is not enough."""
    try:
        importlib.import_module("ray.serve")
    except ImportError:
        return False
    return True


@pytest.mark.parametrize("kind", ["doubling", "target_tracking", "panic_window", "hysteresis"])
def test_ray_is_told_what_the_autoscaler_wants(kind: str) -> None:
    fields = {"kind": kind, "min_replicas": 1, "max_replicas": 8} | ({"min_replicas": 4} if kind == "doubling" else {})
    options = on_ray.scaling(on_ray.OnRay.read({"model": "m", "autoscaler": fields}))["autoscaling_config"]
    module, _, name = options["policy"]["policy_function"].partition(":")
    policy = getattr(importlib.import_module(module), name)(
        **json.loads(json.dumps(options["policy"]["policy_kwargs"]))
    )
    seen, replicas, told = Seen(AUTOSCALERS.read(fields)), fields["min_replicas"], []
    for second in range(0, 400, 5):
        ongoing = 40 if 50 <= second < 250 else 0
        context = SimpleNamespace(
            current_time=float(second), target_num_replicas=replicas, current_num_replicas=replicas, total_num_requests=ongoing
        )  # fmt: skip
        wanted, state = policy(context)
        assert wanted == seen.decide(Load(float(second), replicas, replicas, ongoing)) and state == {}
        replicas = wanted
        told.append(wanted)
    assert max(told) > told[0] and options["min_replicas"] <= min(told) and max(told) <= options["max_replicas"] == 8


def test_what_ray_cannot_do_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="forecasts arrivals"):
        on_ray.app({"model": "m", "autoscaler": {"kind": "predictive"}})
    with pytest.raises(SpecError, match="num_gpu"):
        on_ray.app({"model": "m", "num_gpu": "1"})
    with pytest.raises(SpecError, match=r"server=.* is no YAML"):
        on_ray.app({"model": "m", "server": "{bad: ["})
    wrong = {"port": 1, "ssl_keyfile": "key.pem", "processes": {"data_parallel_size": 2}, "limits": {"head_s": 5}}
    for name, value in wrong.items():
        field = "limits.head_s" if name == "limits" else name
        with pytest.raises(SpecError, match=f"server.{field} has no effect") as caught:
            on_ray.app({"model": "m", "server": {name: value}})
        assert caught.value.fix
    with pytest.raises(SpecError, match="drain"):
        on_ray.app({"model": "m", "server": {"drain": 5}})
    kept = on_ray.server_of(on_ray.OnRay(model="/models/m", server={"drain_s": 5, "limits": {"body_s": 3}}))
    assert kept.drain_s == 5 and kept.limits.body_s == 3 and kept.served_model_name == ("m",)
    assert on_ray.scaling(on_ray.OnRay(model="m", replicas=3)) == {"num_replicas": 3}
    if not ray_serve():
        with pytest.raises(MissingExtra, match=r"ray\[serve\]"):
            on_ray.app({"model": "m"})


@pytest.mark.slow
@pytest.mark.skipif(not ray_serve(), reason="Ray Serve is not installed: pip install 'hone-llm[ray,serve]'")
def test_a_deployment_answers(tmp_path: Path) -> None:
    """A real one on this machine: the model's name, and the greedy tokens of dense passes over the whole sequence."""
    import ray
    from ray import serve

    model = decoder()
    hf.save(model, tmp_path / "small")
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    shared = {"runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}}, "log_to_driver": False}
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="error", **shared)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    try:
        serve.start(http_options={"port": port})
        given = {"autoscaler": "{kind: hysteresis, max_replicas: 2}", "server": {"engine": {"max_num_seqs": 2}}}
        serve.run(on_ray.app({"model": str(tmp_path / "small"), **given}))
        (known,) = httpx.get(f"{url}/models", timeout=30).json()["data"]
        assert known["id"] == "small"
        body = {"model": "small", "prompt": [1, 2, 3], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/completions", json=body | {"return_token_ids": True}, timeout=60).json()
        assert answer["choices"][0]["token_ids"] == dense_greedy(model, [1, 2, 3], 6)
    finally:
        serve.shutdown()
        ray.shutdown()
