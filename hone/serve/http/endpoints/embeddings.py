"""/v1/embeddings and /v1/score: a prompt's hidden states after the final norm, pooled over its tokens."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from fastapi.requests import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field

from hone.serve.http.endpoints.asking import ask
from hone.serve.http.fields import Int, Text
from hone.serve.http.front import Front, json_reply, until_disconnect
from hone.serve.http.inputs import split_prompts
from hone.serve.http.protocol import ApiError, Body
from hone.serve.http.replies import PromptTokens
from hone.serve.request import Pooling, Request, SamplingParams


class PoolingBody(Body):
    """The fields of both endpoints."""

    model: Text | None = None
    pooling: Pooling | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[Int, Field(ge=-1)] | None = None
    priority: Annotated[Int, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[Text, Field(max_length=256)] | None = None


class EmbeddingsBody(PoolingBody):
    """POST /v1/embeddings."""

    input: Any
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[Int, Field(ge=1)] | None = None
    normalize: bool = True

    without_effect = frozenset({"user"})
    refused = {"messages": ()}  # noqa: RUF012


class ScoreBody(PoolingBody):
    """POST /v1/score."""

    text_1: Any
    text_2: Any


def pooling_of(folder: Path, wanted: str) -> Pooling:
    """The pooling that a server uses: the wanted one, with "auto" that of sentence-transformers' file, else "last"."""
    if wanted in ("mean", "last"):
        return wanted  # type: ignore[return-value]
    try:
        values = json.loads((folder / "1_Pooling" / "config.json").read_text(encoding="utf8"))
    except (OSError, ValueError):
        return "last"
    return "mean" if isinstance(values, dict) and values.get("pooling_mode_mean_tokens") else "last"


class Embeddings:
    """The two endpoints."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def embeddings(self, request: HttpRequest) -> Response:
        """POST /v1/embeddings: a vector for each input, of length 1 unless `normalize` is false."""
        body, headers = await self._front.read(request, EmbeddingsBody)
        found = await self._vectors(request, body, body.input, "input")
        if found is None:
            return Response(status_code=499)  # the client disconnected
        vectors, prompts = found
        if body.dimensions is not None and body.dimensions > vectors.shape[1]:
            raise ApiError(
                400,
                f"dimensions is {body.dimensions}, this model's vectors have {vectors.shape[1]}",
                param="dimensions",
            )
        vectors = vectors[:, : body.dimensions]
        if body.normalize:
            vectors = _normalized(vectors)
        data = [
            {"object": "embedding", "index": index, "embedding": _written(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        value = {"object": "list", "data": data, "model": self._model(body), "usage": _usage(prompts)}
        return json_reply(value, headers)

    async def score(self, request: HttpRequest) -> Response:
        """POST /v1/score: the cosine of the embeddings of text_1 and of each of text_2, one with all or pair by pair."""
        body, headers = await self._front.read(request, ScoreBody)
        ones, others = _texts(body.text_1, "text_1"), _texts(body.text_2, "text_2")
        if len(ones) not in (1, len(others)):
            raise ApiError(
                400, f"text_1 has {len(ones)} texts and text_2 {len(others)}: send one, or as many", param="text_1"
            )
        found = await self._vectors(request, body, [*ones, *others], "text_2")
        if found is None:
            return Response(status_code=499)
        vectors, prompts = found
        vectors = _normalized(vectors)
        scores = (vectors[: len(ones)] * vectors[len(ones) :]).sum(-1).tolist()
        value = {
            "id": f"score-{self._front.request_id(request)}",
            "object": "list",
            "created": int(time.time()),
            "model": self._model(body),
            "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
            "usage": _usage(prompts),
        }
        return json_reply(value, headers)

    def _model(self, body: PoolingBody) -> str:
        return body.model or self._front.settings.names[0]

    async def _vectors(
        self, request: HttpRequest, body: PoolingBody, given: Any, param: str
    ) -> tuple[np.ndarray, list[PromptTokens]] | None:
        """float64 [N, D] of the inputs, and their tokens; None when the client disconnects. Raises ApiError."""
        front = self._front
        try:
            inputs = split_prompts(given, front.prompts.vocab_size)
        except ApiError as error:
            raise ApiError(error.status, error.message.replace("prompt", param, 1), param=param) from None
        front.admit(len(inputs))
        prompts = await front.prompts.of_inputs(inputs, body.add_special_tokens, body.truncate_prompt_tokens, param)
        kind = body.pooling or front.settings.pooling
        params = SamplingParams(max_tokens=0, temperature=0)
        more = {"pooling": kind, "adapter": front.models.adapter_of(body.model)}
        requests = [
            Request(front.next_id("embed"), prompt.ids, params, body.priority, body.cache_salt or "", **more)
            for prompt in prompts
        ]
        outputs = await until_disconnect(ask(front.engine, requests), request.receive)
        if outputs is None:
            return None
        return np.stack([np.frombuffer(one.pooled, dtype=np.float32).astype(np.float64) for one in outputs]), prompts


def _texts(value: Any, param: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ApiError(400, f"{param} must be a text or a list of texts", param=param)
    return texts


def _normalized(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def _written(vector: np.ndarray, form: str) -> str | list[float]:
    """A vector as numbers, or as base64 of its little-endian float32."""
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(one) for one in vector.astype(np.float32)]


def _usage(prompts: list[PromptTokens]) -> dict[str, int]:
    count = sum(len(prompt.ids) for prompt in prompts)
    return {"prompt_tokens": count, "total_tokens": count}
