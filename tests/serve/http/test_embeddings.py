"""Embeddings and scores against transformers' last hidden states, over chunks, prefixes and preemption, and through HTTP."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
import transformers

from hone.serve.engine import Engine
from hone.serve.http.endpoints.embeddings import pooling_of
from hone.serve.request import Request, SamplingParams
from hone.serve.spec import EngineSpec
from tests.serve.live import LiveServer
from tests.serve.small import assert_all_free, drain, poison_freed_pages

PROMPTS = [[5, 6, 7], list(range(40, 140)), [9] * 33, list(range(40, 120))]


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path) -> dict[tuple[str, int], np.ndarray]:
    model = transformers.AutoModel.from_pretrained(tiny_llama)
    found = {}
    for place, prompt in enumerate(PROMPTS):
        with torch.inference_mode():
            states = model(torch.tensor([prompt])).last_hidden_state[0].double().numpy()
        found["mean", place], found["last", place] = states.mean(0), states[-1]
    return found


@pytest.mark.parametrize("ahead", [False, True])
def test_the_engine_pools_what_transformers_computes(tiny_llama: Path, oracle: dict, ahead: bool) -> None:
    sizes = {"block_size": 8, "num_pages": 40, "max_num_seqs": 8, "max_num_batched_tokens": 24, "num_threads": 1}
    one = Engine(tiny_llama, EngineSpec.read({**sizes, "async_scheduling": ahead}))
    poison_freed_pages(one)
    for turn in range(2):  # the second finds prefixes in the cache
        for kind in ("mean", "last"):
            for place, prompt in enumerate(PROMPTS):
                one.add(Request(f"{kind}-{place}-{turn}", prompt, SamplingParams(max_tokens=0), pooling=kind))
        one.add(Request("text", PROMPTS[1], SamplingParams(max_tokens=50, temperature=0)))
        found = drain(one)
        assert found.pop("text")[-1].pooled is None
        assert len(found) == 8
        for name, outputs in found.items():
            kind, place, _ = name.split("-")
            vector = np.frombuffer(outputs[-1].pooled, dtype=np.float32)
            np.testing.assert_allclose(vector, oracle[kind, int(place)], atol=2e-5, rtol=1e-4)
    assert one.stats()["prefix_hit_tokens"] > 0
    assert_all_free(one)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_preempted_prompt_is_summed_once(tiny_llama: Path, oracle: dict, ahead: bool) -> None:
    sizes = {"block_size": 4, "num_pages": 36, "max_num_seqs": 8, "max_num_batched_tokens": 12, "num_threads": 1}
    one = Engine(tiny_llama, EngineSpec.read({**sizes, "async_scheduling": ahead, "enable_prefix_caching": False}))
    for place in range(3):
        one.add(Request(f"text{place}", [3, place], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)))
    for _ in range(6):
        one.step()
    one.add(Request("mean", PROMPTS[1], SamplingParams(max_tokens=0), priority=1, pooling="mean"))
    outputs = drain(one)["mean"]
    np.testing.assert_allclose(np.frombuffer(outputs[-1].pooled, np.float32), oracle["mean", 1], atol=2e-5, rtol=1e-4)
    assert one.stats()["preemptions"] > 0


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[LiveServer]:
    live = LiveServer(
        tiny_llama, served_model_name="tiny", pooling="mean", engine={"num_pages": 256, "max_num_seqs": 16}
    )
    yield live
    live.stop()


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def test_the_openai_client_gets_them(server: LiveServer, oracle: dict) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    reply = client.embeddings.create(model="tiny", input=PROMPTS)  # base64, which the client reads
    numbers = client.embeddings.create(model="tiny", input=PROMPTS, encoding_format="float")
    assert reply.usage.prompt_tokens == sum(map(len, PROMPTS))
    for place, (one, same) in enumerate(zip(reply.data, numbers.data, strict=True)):
        np.testing.assert_allclose(one.embedding, unit(oracle["mean", place]), atol=1e-5)
        assert one.embedding == same.embedding and one.index == place
    short = client.embeddings.create(model="tiny", input=PROMPTS[0], dimensions=16).data[0].embedding
    np.testing.assert_allclose(short, unit(oracle["mean", 0][:16]), atol=1e-5)
    raw = server.post(
        "/v1/embeddings", input=[PROMPTS[0]], normalize=False, pooling="last", encoding_format="base64"
    ).json()
    vector = np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), dtype="<f4")
    np.testing.assert_allclose(vector, oracle["last", 0], atol=1e-5, rtol=1e-4)
    cut = server.post("/v1/embeddings", input=PROMPTS[1], truncate_prompt_tokens=80, normalize=False)
    assert cut.json()["usage"]["prompt_tokens"] == 80


def test_scores_are_cosines(server: LiveServer) -> None:
    texts = ["the quick fox", "lazy dogs", "the quick brown fox"]
    vectors = [np.array(one["embedding"]) for one in server.post("/v1/embeddings", input=texts).json()["data"]]
    reply = server.post("/v1/score", text_1=texts[0], text_2=texts).json()
    assert [one["score"] for one in reply["data"]] == pytest.approx([vectors[0] @ one for one in vectors], abs=1e-6)
    pairs = server.post("/v1/score", text_1=texts[:2], text_2=texts[1:]).json()["data"]
    assert [one["score"] for one in pairs] == pytest.approx(
        [vectors[0] @ vectors[1], vectors[1] @ vectors[2]], abs=1e-6
    )


def test_mistakes_name_their_field(server: LiveServer) -> None:
    for path, body, param in (
        ("embeddings", {"input": []}, "input"),
        ("embeddings", {"input": ""}, "input"),
        ("embeddings", {"input": "a", "dimensions": 65}, "dimensions"),
        ("embeddings", {"input": "a", "pooling": "max"}, "pooling"),
        ("embeddings", {"input": [5] * 600}, "input"),
        ("embeddings", {"input": [[100000]]}, "input"),
        ("embeddings", {}, "input"),
        ("score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
        ("score", {"text_1": [1], "text_2": "c"}, "text_1"),
    ):
        reply = server.post(f"/v1/{path}", **body)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == param, (body, reply.text)


def test_the_folder_says_how_it_pools(tmp_path: Path) -> None:
    assert pooling_of(tmp_path, "auto") == "last" and pooling_of(tmp_path, "mean") == "mean"
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    assert pooling_of(tmp_path, "auto") == "mean" and pooling_of(tmp_path, "last") == "last"
