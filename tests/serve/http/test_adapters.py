"""Adapters over HTTP: named at the start, loaded and unloaded while the server runs, asked for by `model`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hone.base.errors import SpecError
from hone.model import hf
from hone.serve.http.server import serve
from hone.serve.http.spec import ServerSpec
from hone.serve.request import Request
from tests.serve.adapters.folders import adapter_folder
from tests.serve.live import LiveServer


@pytest.fixture(scope="module")
def folders(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    model, root = hf.load(tiny_llama), tmp_path_factory.mktemp("adapters")
    return {name: adapter_folder(root / name, model, seed, rank=4) for seed, name in enumerate(("first", "second"))}


@pytest.fixture(scope="module")
def server(tiny_llama: Path, folders: dict[str, Path]) -> Iterator[LiveServer]:
    live = LiveServer(
        tiny_llama,
        served_model_name="base",
        lora_modules=(f"first={folders['first']}",),
        allow_runtime_lora_updating=True,
        engine={"lora": {"max_loras": 2}, "num_pages": 64},
    )
    yield live
    live.stop()


def text_of(server: LiveServer, model: str, **more: Any) -> str:
    reply = server.post("/v1/completions", model=model, prompt="the quick", temperature=0, max_tokens=8, **more)
    assert reply.status_code == 200 and reply.json()["model"] == model, reply.text
    return str(reply.json()["choices"][0]["text"])


def test_adapters_come_go_and_are_asked_for_by_name(server: LiveServer, folders: dict[str, Path]) -> None:
    base, first = text_of(server, "base"), text_of(server, "first")
    assert base != first
    path = str(folders["second"])
    loaded = server.post("/v1/load_lora_adapter", lora_name="second", lora_path=path)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'second' added successfully.")
    second = text_of(server, "second")
    assert len({base, first, second}) == 3
    cards = {card["id"]: card for card in server.http.get("/v1/models").json()["data"]}
    assert cards["second"]["root"] == path and cards["second"]["parent"] == "base" and cards["base"]["parent"] is None
    assert server.http.get("/v1/models/first").json()["root"] == str(folders["first"])
    again = server.post("/v1/load_lora_adapter", lora_name="second", lora_path=path)
    assert again.status_code == 400 and again.json()["error"]["code"] == "InvalidUserInput"
    swapped = server.post(
        "/v1/load_lora_adapter", lora_name="second", lora_path=str(folders["first"]), load_inplace=True
    )
    assert swapped.status_code == 200 and text_of(server, "second") == first
    assert server.metric("hone:adapter_requests_total") == 3 <= server.metric("hone:adapter_fills_total") + 1
    gone = server.post("/v1/unload_lora_adapter", lora_name="second")
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'second' removed successfully.")
    assert server.post("/v1/completions", model="second", prompt="the", max_tokens=1).status_code == 404
    assert [card["id"] for card in server.http.get("/v1/models").json()["data"]] == ["base", "first"]
    chat = server.post(
        "/v1/chat/completions", model="first", messages=[{"role": "user", "content": "the"}], max_tokens=2
    )
    assert chat.status_code == 200
    with_beams = text_of(server, "first", use_beam_search=True, n=1)
    assert with_beams != text_of(server, "base", use_beam_search=True, n=1)


@pytest.mark.parametrize(("route", "body", "status", "said"), [
    ("load", {"lora_name": "x"}, 400, "must be provided"),
    ("load", {"lora_name": "x", "lora_path": "/nowhere/at/all"}, 404, "no adapter in /nowhere/at/all"),
    ("load", {"lora_name": "base", "lora_path": "/nowhere"}, 400, "own name"),
    ("load", {"lora_name": "x", "lora_path": "MODEL"}, 404, "adapter_config.json"),
    ("unload", {}, 400, "needs to be provided"),
    ("unload", {"lora_name": "x"}, 404, "The lora adapter 'x' cannot be found."),
])  # fmt: skip
def test_mistakes_have_vllms_status(
    server: LiveServer, tiny_llama: Path, route: str, body: dict[str, str], status: int, said: str
) -> None:
    body = {name: str(tiny_llama) if value == "MODEL" else value for name, value in body.items()}
    reply = server.post(f"/v1/{route}_lora_adapter", **body)
    assert reply.status_code == status and said in reply.json()["error"]["message"], reply.text


def test_an_adapter_that_hone_does_not_serve_is_refused(
    server: LiveServer, folders: dict[str, Path], tmp_path: Path
) -> None:
    values = json.loads((folders["first"] / "adapter_config.json").read_text()) | {"modules_to_save": ["lm_head"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    (tmp_path / "adapter_model.safetensors").write_bytes((folders["first"] / "adapter_model.safetensors").read_bytes())
    reply = server.post("/v1/load_lora_adapter", lora_name="x", lora_path=str(tmp_path))
    assert reply.status_code == 400 and "changes lm_head.weight itself" in reply.json()["error"]["message"]


def test_fields_that_would_do_nothing_are_refused() -> None:
    with pytest.raises(SpecError, match=r"without lora.max_loras"):
        ServerSpec.read({"lora_modules": ["a=b"]})
    with pytest.raises(SpecError, match="give NAME=FOLDER"):
        ServerSpec.read({"lora_modules": ["a"], "engine": {"lora": {"max_loras": 1}}})
    with pytest.raises(SpecError, match="both have 'a'"):
        ServerSpec.read({"lora_modules": ["a=b"], "served_model_name": ["a"], "engine": {"lora": {"max_loras": 1}}})


def test_an_adapter_may_not_have_the_name_of_the_folder_that_is_served(tmp_path: Path) -> None:
    engine = {"lora": {"max_loras": 1, "lora_modules": ("base=/nowhere",)}}
    with pytest.raises(SpecError, match="adapter 'base', which is the model's own name"):
        serve(str(tmp_path / "base"), ServerSpec.read({"engine": engine}))


def test_equal_prompts_of_two_adapters_are_routed_apart() -> None:
    one, other, plain = (Request("", [1, 2], adapter=name) for name in ("a", "b", ""))
    assert len({one.kept_apart_by, other.kept_apart_by, plain.kept_apart_by}) == 3 and plain.kept_apart_by == ""
