"""Clients as they are: the openai package, lm-eval, 200 impatient users, and a story from a real model."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from hone.serve.engine import Engine
from hone.serve.request import SamplingParams
from tests.model.llama2c import convert
from tests.serve.live import LiveServer

MESSAGES = [{"role": "user", "content": "the quick brown"}]
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[LiveServer]:
    live = LiveServer(tiny_llama, served_model_name="tiny", engine={"num_pages": 256, "max_num_seqs": 16})
    yield live
    live.stop()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Engine:
    return Engine(tiny_llama)


# ---- openai --------------------------------------------------------------------------------------------------------


def test_openai_completion_is_what_the_engine_says(client: openai.OpenAI, engine: Engine):
    reply = client.completions.create(prompt="the quick brown", **GREEDY)
    (expected,) = engine.generate(["the quick brown"], SamplingParams(temperature=0, max_tokens=24))
    assert reply.choices[0].text == expected.text
    assert reply.choices[0].finish_reason == expected.finish
    assert reply.usage.prompt_tokens == len(expected.prompt)
    assert reply.usage.completion_tokens == len(expected.tokens)


def test_openai_stream_joins_to_the_whole(client: openai.OpenAI):
    whole = client.completions.create(prompt=["the quick", "lazy dog"], n=2, **GREEDY)
    stream = client.completions.create(
        prompt=["the quick", "lazy dog"], n=2, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    texts, finishes, usage = ["", "", "", ""], {}, None
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                assert choice.index not in finishes
                finishes[choice.index] = choice.finish_reason
        usage = chunk.usage or usage
    assert texts == [choice.text for choice in whole.choices]
    assert finishes == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_openai_chat_and_its_stream(client: openai.OpenAI):
    reply = client.chat.completions.create(messages=MESSAGES, n=2, **GREEDY)
    assert [choice.index for choice in reply.choices] == [0, 1]
    message = reply.choices[0].message
    assert message.role == "assistant" and message.content
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == reply.choices[0].finish_reason
    assert all(chunk.id == chunks[0].id and chunk.id.startswith("chatcmpl-") for chunk in chunks)


def test_openai_logprobs(client: openai.OpenAI):
    reply = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY)
    rows = reply.choices[0].logprobs.content
    assert len(rows) == reply.usage.completion_tokens
    for row in rows:
        assert len(row.top_logprobs) == 3
        assert row.logprob == row.top_logprobs[0].logprob == max(top.logprob for top in row.top_logprobs)
        assert bytes(row.bytes) == bytes(row.top_logprobs[0].bytes)
    text = b"".join(bytes(row.bytes) for row in rows).decode("utf8", "replace")
    assert text == reply.choices[0].message.content
    legacy = client.completions.create(prompt="the quick brown", logprobs=2, **GREEDY).choices[0].logprobs
    assert len(legacy.tokens) == len(legacy.text_offset) == 24
    assert [max(top.values()) for top in legacy.top_logprobs] == legacy.token_logprobs


def test_openai_stop_and_seed(client: openai.OpenAI):
    full = client.completions.create(prompt="the quick brown", **GREEDY).choices[0].text
    stop = next(full[place : place + 2] for place in range(4, 20) if "\ufffd" not in full[place : place + 2])
    cut = client.completions.create(prompt="the quick brown", stop=[stop, "never"], **GREEDY).choices[0]
    assert cut.text == full[: full.index(stop)] and cut.finish_reason == "stop"
    hot = {"model": "tiny", "prompt": "the", "temperature": 1.2, "max_tokens": 12}
    first, again = (client.completions.create(seed=3, **hot).choices[0].text for _ in range(2))
    assert first == again != client.completions.create(seed=4, **hot).choices[0].text


def test_openai_errors(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens"):
        client.completions.create(model="tiny", prompt=[5] * 600)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        )
    assert caught.value.param == "tools"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert [model.id for model in client.models.list()] == ["tiny"]


# ---- lm-eval -------------------------------------------------------------------------------------------------------


def loglikelihoods(engine: Engine, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    """Log-likelihood and greediness of each continuation, by one plain forward pass of the model."""
    import torch

    results = []
    for context, continuation in pairs:
        ids = torch.tensor([context + continuation])
        with torch.no_grad():
            logprobs = engine.model(ids)[0].float().log_softmax(-1)
        at = range(len(context) - 1, len(context) + len(continuation) - 1)
        total = sum(logprobs[place, token].item() for place, token in zip(at, continuation, strict=True))
        greedy = all(logprobs[place].argmax().item() == token for place, token in zip(at, continuation, strict=True))
        results.append((total, greedy))
    return results


def test_lm_eval_loglikelihood(server: LiveServer, engine: Engine, tiny_llama: Path, shared_data: Path):
    """The requests lm-eval makes for LAMBADA and a greedy one, against the model itself."""
    pytest.importorskip("tenacity", reason="lm-eval's API clients need it: pip install lm_eval[api]")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    rows = [json.loads(line) for line, _ in zip((shared_data / "benchmarks/lambada_openai.jsonl").open(), range(12))]
    texts = [(row["context"][-200:], " " + row["continuation"]) for row in rows]
    (greedy,) = engine.generate(["the quick brown"], SamplingParams(temperature=0, max_tokens=3))
    lm = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model="tiny",
        tokenizer=str(tiny_llama),
        tokenizer_backend="huggingface",
        max_length=512,
        batch_size=4,
    )
    instances = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(texts)]
    got = lm.loglikelihood(instances, disable_tqdm=True)
    encode = engine.tokenizer.encode
    pairs = [(encode(a), encode(a + b)[len(encode(a)) :]) for a, b in texts]
    # one continuation that the model itself would write, as token ids: lm-eval must call it greedy
    got += lm._loglikelihood_tokens([(None, greedy.prompt, greedy.tokens)], disable_tqdm=True)
    pairs.append((greedy.prompt, greedy.tokens))
    for (logprob, is_greedy), (expected, expected_greedy) in zip(got, loglikelihoods(engine, pairs), strict=True):
        assert math.isclose(logprob, expected, abs_tol=1e-3)
        assert is_greedy == expected_greedy
    assert got[-1][1] is True


TASK = """
task: slice_of_arc
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{query}}}}\\nAnswer:"
doc_to_target: gold
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""


@pytest.mark.slow
def test_lm_eval_task(
    server: LiveServer, engine: Engine, tiny_llama: Path, shared_data: Path, tmp_path: Path, monkeypatch
):
    """`lm_eval --model local-completions` on a slice of ARC-easy: same accuracy as counted here."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    pytest.importorskip("tenacity", reason="lm-eval's API clients need it: pip install lm_eval[api]")
    import lm_eval
    from lm_eval.tasks import TaskManager

    rows = [json.loads(line) for line, _ in zip((shared_data / "benchmarks/arc_easy.jsonl").open(), range(20))]
    data = tmp_path / "arc.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "slice_of_arc.yaml").write_text(TASK.format(data=data))
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "base_url": f"{server.url}/v1/completions",
            "model": "tiny",
            "tokenizer": str(tiny_llama),
            "tokenizer_backend": "huggingface",
            "max_length": 512,
            "num_concurrent": 4,
        },
        tasks=["slice_of_arc"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        batch_size=8,
        log_samples=False,
        bootstrap_iters=0,
    )
    encode = engine.tokenizer.encode
    right = right_norm = 0
    for row in rows:
        context = row["query"] + "\nAnswer:"
        whole = [encode(f"{context} {choice}") for choice in row["choices"]]
        start = len(encode(context))
        scores = [score for score, _ in loglikelihoods(engine, [(ids[:start], ids[start:]) for ids in whole])]
        norms = [score / len(choice) for score, choice in zip(scores, row["choices"], strict=True)]
        right += scores.index(max(scores)) == row["gold"]
        right_norm += norms.index(max(norms)) == row["gold"]
    got = results["results"]["slice_of_arc"]
    assert got["acc,none"] == pytest.approx(right / len(rows))
    assert got["acc_norm,none"] == pytest.approx(right_norm / len(rows))


# ---- many users ----------------------------------------------------------------------------------------------------


async def impatient(client: httpx.AsyncClient, number: int, generator: random.Random) -> str:
    """One user: reads all, leaves after some events, or gives up waiting. Says which."""
    body: dict[str, Any] = {
        "prompt": [generator.randrange(1, 256) for _ in range(generator.randrange(1, 150))],
        "max_tokens": generator.randrange(1, 120),
        "n": generator.choice([1, 1, 1, 3]),
        "ignore_eos": True,
        "stream": generator.random() < 0.6,
        "priority": generator.randrange(3),
    }
    if generator.random() < 0.3:
        body["prompt"] = [7] * 100 + body["prompt"]  # shared pages
    fate = generator.choice(["reads all", "leaves", "gives up"])
    limit = generator.uniform(0.02, 1.0) if fate == "gives up" else 600  # what is read to its end has time for it
    try:
        if not body["stream"]:
            response = await client.post("/v1/completions", json=body, timeout=limit)
            assert response.status_code == 200, response.text
            assert response.json()["usage"]["completion_tokens"] == body["max_tokens"] * body["n"]
            return "read all"
        async with client.stream("POST", "/v1/completions", json=body, timeout=limit) as response:
            assert response.status_code == 200
            leave_after = generator.randrange(1, 30) if fate == "leaves" else 10**9
            count, last = 0, ""
            async for line in response.aiter_lines():
                count, last = count + 1, line or last
                assert '"error"' not in line
                if count > leave_after:
                    return "left"
            assert last == "data: [DONE]"
        return "read all"
    except httpx.TimeoutException:
        return "gave up"


@pytest.mark.slow
def test_two_hundred_users_leave_no_page_behind(server: LiveServer):
    async def main() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, limits=limits) as client:
            users = [impatient(client, number, random.Random(number)) for number in range(200)]
            return await asyncio.gather(*users)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        fates = pool.submit(asyncio.run, main()).result()
    assert fates.count("read all") > 40 and len(set(fates)) == 3
    for name in (
        "hone:requests_outstanding",
        "hone:num_requests_running",
        "hone:num_requests_waiting",
        "hone:pages_used",
    ):
        server.wait_for(name, 0)
    assert server.metric("hone:pages_free") == server.metric("hone:pages") == 256
    assert server.http.get("/health").json()["status"] == "ok"
    assert server.post("/v1/completions", prompt="the", max_tokens=3).status_code == 200
    assert "Traceback" not in server.errors()


# ---- a real model --------------------------------------------------------------------------------------------------


def test_a_real_model_tells_a_story(shared_data: Path, tmp_path: Path):
    source = shared_data / "models" / "stories260K"
    folder = convert(source / "stories260K.bin", source / "tok512.bin", tmp_path / "stories260K")
    server = LiveServer(folder)
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        reply = client.completions.create(
            model="stories260K", prompt="Once upon a time", max_tokens=120, temperature=0, echo=True, logprobs=1
        )
        choice = reply.choices[0]
        assert choice.text.startswith("Once upon a time, there was a little girl named Lily.")
        inside = [offset for offset in choice.logprobs.text_offset if offset < len(choice.text)]
        for place, offset in enumerate(inside[:-1]):
            token = choice.logprobs.tokens[place]
            if not token.startswith(("<", "bytes:")):
                assert choice.text[offset : inside[place + 1]] == token.removeprefix(" " if place == 1 else "")
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model="stories260K", messages=MESSAGES)
    finally:
        server.stop()
