"""litellm and langchain against the server, as their users call them. They are not among hone's own needs: skipped without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.serve.http.test_openai import MESSAGES, TEMPLATE, TOOLS
from tests.serve.live import LiveServer

pytest.importorskip("llguidance")


class Trip(BaseModel):
    """Where to, and how long."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    live = LiveServer(
        tiny_llama,
        served_model_name="tiny",
        chat_template=str(template),
        tool_call_parser="hermes",
        enable_auto_tool_choice=True,
        engine={"num_pages": 256, "max_num_seqs": 8},
    )
    yield live
    live.stop()


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no network
    return pytest.importorskip("litellm", reason="pip install litellm")


def test_litellm(server: LiveServer, litellm: Any):
    where = {"api_base": f"{server.url}/v1", "api_key": "none", "max_tokens": 12, "temperature": 0, "num_retries": 0}
    reply = litellm.completion(model="openai/tiny", messages=MESSAGES, **where)
    text = reply.choices[0].message.content
    assert text and 1 <= reply.usage.completion_tokens <= 12
    parts = litellm.completion(model="openai/tiny", messages=MESSAGES, stream=True, **where)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    hosted = litellm.completion(model="hosted_vllm/tiny", messages=MESSAGES, **where)
    assert hosted.choices[0].message.content == text
    legacy = litellm.text_completion(model="text-completion-openai/tiny", prompt="the quick brown", **where)
    assert legacy.choices[0].text


def test_litellm_structured_and_tools(server: LiveServer, litellm: Any):
    where = {
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "max_tokens": 200,
        "temperature": 1.5,
        "seed": 1,
        "num_retries": 0,
    }
    reply = litellm.completion(model="openai/tiny", messages=MESSAGES, response_format=Trip, **where)
    assert Trip.model_validate_json(reply.choices[0].message.content).days in (1, 2, 3)
    pytest.importorskip("mcp", reason="litellm's tools need it: pip install mcp")
    choice = {"type": "function", "function": {"name": "weather"}}
    reply = litellm.completion(model="openai/tiny", messages=MESSAGES, tools=TOOLS, tool_choice=choice, **where)
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name == "weather" and '"city"' in call.function.arguments


def test_litellm_errors_and_embeddings(server: LiveServer, litellm: Any):
    where = {"api_base": f"{server.url}/v1", "api_key": "none"}
    with pytest.raises(litellm.BadRequestError, match="context length"):
        litellm.completion(
            model="openai/tiny", messages=[{"role": "user", "content": "a b c " * 600}], num_retries=0, **where
        )
    found = litellm.embedding(model="openai/tiny", input=["the quick", "brown"], encoding_format="float", **where)
    assert [len(row["embedding"]) for row in found.data] == [64, 64]


@pytest.fixture
def langchain() -> Any:
    return pytest.importorskip("langchain_openai", reason="pip install langchain-openai")


def test_langchain(server: LiveServer, langchain: Any):
    where = {"base_url": f"{server.url}/v1", "api_key": "none", "model": "tiny", "max_retries": 0}
    chat = langchain.ChatOpenAI(**where, temperature=0, max_tokens=12)
    whole = chat.invoke("the quick brown")
    assert whole.content and 1 <= whole.usage_metadata["output_tokens"] <= 12
    assert "".join(part.content for part in chat.stream("the quick brown")) == whole.content
    assert [one.content for one in chat.batch(["the quick brown"] * 3)] == [whole.content] * 3
    legacy = langchain.OpenAI(**where, temperature=0, max_tokens=5)
    assert legacy.invoke("the quick")
    responses = langchain.ChatOpenAI(**where, max_tokens=12, temperature=0, use_responses_api=True).invoke(
        "the quick brown"
    )
    assert responses.text


def test_langchain_structured_tools_and_embeddings(server: LiveServer, langchain: Any):
    where = {"base_url": f"{server.url}/v1", "api_key": "none", "model": "tiny", "max_retries": 0}
    chat = langchain.ChatOpenAI(**where, temperature=1.5, max_tokens=200, seed=2)
    for method in ("json_schema", "function_calling"):
        trip = chat.with_structured_output(Trip, method=method).invoke("a trip")
        assert isinstance(trip, Trip)
    (call,) = chat.bind_tools([Trip], tool_choice="Trip").invoke("a trip").tool_calls
    assert call["name"] == "Trip" and call["args"]["city"] in ("Oslo", "Rome")
    vectors = langchain.OpenAIEmbeddings(**where, check_embedding_ctx_length=False).embed_documents(
        ["the quick", "brown"]
    )
    assert [len(vector) for vector in vectors] == [64, 64]
