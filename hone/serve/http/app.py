"""The endpoints of the OpenAI API and vLLM's additional ones as a FastAPI application."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI
from fastapi.requests import Request as HttpRequest
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from hone.serve.http.front import EventStream, Front, json_reply, until_disconnect
from hone.serve.http.metrics import CONTENT_TYPE
from hone.serve.http.prompts import Prompts
from hone.serve.http.protocol import (
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    check_ids,
    split_prompts,
)
from hone.serve.http.replies import ChatReply, CompletionReply, Labels, PromptTokens, Reply
from hone.serve.request import Request

Handler = Callable[[HttpRequest], Awaitable[Response]]


def build_app(front: Front) -> FastAPI:
    """The application; every reply, errors included, has the OpenAI form and the request's x-request-id."""
    app = FastAPI(title="hone", version=own_version(), docs_url=None, redoc_url=None, openapi_url=None)
    generation, tokens, state = Generation(front), TokenEndpoints(front), StateEndpoints(front)
    for method, path, handler, guarded in (
        ("POST", "/v1/completions", generation.completions, True),
        ("POST", "/v1/chat/completions", generation.chat, True),
        ("POST", "/tokenize", tokens.tokenize, True),
        ("POST", "/detokenize", tokens.detokenize, True),
        ("GET", "/tokenizer_info", tokens.info, True),
        ("GET", "/v1/models", state.models, True),
        ("GET", "/v1/models/{name:path}", state.model, True),
        ("GET", "/health", state.health, False),
        ("GET", "/metrics", state.metrics, False),
        ("GET", "/version", state.version, False),
    ):
        app.add_api_route(path, _wrap(front, path, handler, guarded), methods=[method], response_model=None)

    async def wrong_route(request: HttpRequest, error: HTTPException) -> Response:
        what = "no such endpoint" if error.status_code == 404 else str(error.detail)
        answer = ApiError(error.status_code, f"{request.method} {request.url.path[:100]}: {what}", code="wrong_route")
        return _error_reply(answer, {**(error.headers or {})})

    async def own_bug(request: HttpRequest, error: Exception) -> Response:
        return _error_reply(ApiError(500, f"internal error: {type(error).__name__}"), {})

    app.add_exception_handler(HTTPException, wrong_route)  # type: ignore[arg-type]
    app.add_exception_handler(Exception, own_bug)
    return app


def _wrap(front: Front, path: str, handler: Handler, guarded: bool) -> Handler:
    """Wraps `handler`: checks the API key, turns ApiErrors into replies, and counts replies."""

    async def endpoint(request: HttpRequest) -> Response:
        try:
            if guarded:
                front.authorize(request)
            reply = await handler(request)
        except ApiError as error:
            reply = _error_reply(error, {"x-request-id": front.request_id(request)})
        except ClientDisconnect:
            reply = Response(status_code=400)  # the client disconnected while sending
        front.metrics.replied(path, reply.status_code)
        return reply

    return endpoint


def _error_reply(error: ApiError, headers: dict[str, str]) -> Response:
    if error.retry_s is not None:
        headers["retry-after"] = str(error.retry_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status == 413:
        headers["connection"] = "close"
    return json_reply(error.body, headers, error.status)


def own_version() -> str:
    """The installed version of hone."""
    try:
        return version("hone-llm")
    except PackageNotFoundError:
        return "unknown"


class Generation:
    """/v1/completions and /v1/chat/completions."""

    def __init__(self, front: Front) -> None:
        self._front = front
        tokenizer = front.prompts.tokenizer
        self._special = frozenset() if tokenizer is None else tokenizer.special_ids
        self._labels = [Labels(tokenizer, as_ids=as_ids) for as_ids in (False, True)]

    async def completions(self, request: HttpRequest) -> Response:
        """POST /v1/completions."""
        body, headers = await self._front.read(request, CompletionBody)
        given = split_prompts(body.prompt, self._front.prompts.vocab_size)
        self._front.admit(len(given) * (body.n or 1))  # before any other work
        prompts = await self._front.prompts.of_completion(body, given)
        scores_prompt = body.echo and body.logprobs is not None
        requests = [
            self._request(
                body,
                prompt,
                copy,
                self._front.prompts.max_tokens(prompt, body, body.max_tokens_wanted, 16),
                scores_prompt,
            )
            for prompt in prompts
            for copy in range(body.n or 1)
        ]
        return await self._answer(request, body, headers, prompts, requests)

    async def chat(self, request: HttpRequest) -> Response:
        """POST /v1/chat/completions."""
        body, headers = await self._front.read(request, ChatBody)
        prompt = await self._front.prompts.of_chat(body)
        max_tokens = self._front.prompts.max_tokens(prompt, body, body.max_tokens_wanted, None)
        requests = [self._request(body, prompt, copy, max_tokens, False) for copy in range(body.n or 1)]
        return await self._answer(request, body, headers, [prompt], requests)

    def _request(
        self, body: GenerationBody, prompt: PromptTokens, copy: int, max_tokens: int, scores_prompt: bool
    ) -> Request:
        """The engine's request of one choice. Choice i of `n` uses the seed + i."""
        for kind, ids in (("stop_token_ids", body.stop_token_ids), ("logit_bias", list(body.logit_bias or {}))):
            if ids:
                check_ids(ids, self._front.prompts.vocab_size, kind)
        params = body.sampling(
            max_tokens=max_tokens, prompt_logprobs=body.top_logprobs_wanted if scores_prompt else None
        )
        if params.seed is not None and copy:
            params = params.model_copy(update={"seed": (params.seed + copy) % 2**63})
        return Request("", prompt.ids, params, body.priority, body.cache_salt or "")

    async def _answer(
        self,
        request: HttpRequest,
        body: GenerationBody,
        headers: dict[str, str],
        prompts: list[PromptTokens],
        requests: list[Request],
    ) -> Response:
        front = self._front
        front.admit(len(requests))
        request_id = front.request_id(request, body)
        headers["x-request-id"] = request_id
        reply = self._reply(body, request_id, prompts)
        job = front.job(body, reply, request_id, requests)
        if body.stream:
            return EventStream(job, headers)
        try:
            whole = await until_disconnect(job.whole(), request.receive)
        finally:
            job.close()
        if whole is None:
            return Response(status_code=499)  # the client disconnected
        return Response(whole, headers=headers, media_type="application/json")

    def _reply(self, body: GenerationBody, request_id: str, prompts: list[PromptTokens]) -> Reply:
        labels = self._labels[bool(body.return_tokens_as_token_ids)]
        if self._front.prompts.tokenizer is None:
            body.return_token_ids = True  # without a tokenizer there is no text
        more: dict[str, Any] = {
            "created": int(time.time()),
            "model": body.model or self._front.settings.names[0],
            "prompts": prompts,
            "n": body.n or 1,
        }
        if isinstance(body, ChatBody):
            return ChatReply(body, labels, reply_id=f"chatcmpl-{request_id}", **more)
        assert isinstance(body, CompletionBody)
        return CompletionReply(body, labels, self._special, reply_id=f"cmpl-{request_id}", **more)


class TokenEndpoints:
    """/tokenize, /detokenize, /tokenizer_info."""

    def __init__(self, front: Front) -> None:
        self._front = front

    @property
    def _prompts(self) -> Prompts:
        return self._front.prompts

    async def tokenize(self, request: HttpRequest) -> Response:
        """Token ids of a text or of chat messages."""
        body, headers = await self._front.read(request, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "send either prompt (a text) or messages", param="prompt")
        if body.messages is not None:
            text = self._prompts.render(
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                variables=body.chat_template_kwargs,
            )
        else:
            text = body.prompt or ""
        special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
        ids = await self._prompts.encode_text(text, special=special)
        value: dict[str, Any] = {"count": len(ids), "max_model_len": self._prompts.max_model_len, "tokens": ids}
        if body.return_token_strs:
            tokenizer = self._prompts.need_tokenizer("prompt")
            value["token_strs"] = [tokenizer.token_text(token) for token in ids]
        return json_reply(value, headers)

    async def detokenize(self, request: HttpRequest) -> Response:
        """The text of token ids, special tokens spelled out."""
        body, headers = await self._front.read(request, DetokenizeBody)
        tokenizer = self._prompts.need_tokenizer("tokens")
        ids = check_ids(body.tokens, self._prompts.vocab_size, "tokens") if body.tokens else []
        return json_reply({"prompt": tokenizer.decode(ids, skip_special_tokens=False)}, headers)

    async def info(self, request: HttpRequest) -> Response:
        """Facts about the tokenizer for remote clients (lm-eval reads them)."""
        tokenizer = self._front.prompts.need_tokenizer("model")
        eos = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
        return json_reply(
            {
                "tokenizer_class": "Tokenizer",
                "vocab_size": tokenizer.vocab_size,
                "bos_token": None if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id),
                "eos_token": None if eos is None else tokenizer.token_text(eos),
                "chat_template": tokenizer.chat_template,
                "model_max_length": self._prompts.max_model_len,
            }
        )


class StateEndpoints:
    """/v1/models, /health, /metrics, /version."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._front.started_at,
            "owned_by": "hone",
            "root": self._front.settings.names[0],
            "max_model_len": self._front.prompts.max_model_len,
        }

    async def models(self, request: HttpRequest) -> Response:
        """The served names."""
        return json_reply({"object": "list", "data": [self._card(name) for name in self._front.settings.names]})

    async def model(self, request: HttpRequest) -> Response:
        """One served name."""
        name = request.path_params["name"]
        if name not in self._front.settings.names:
            raise ApiError(404, f"this server has no model '{name[:100]}'", param="model", code="model_not_found")
        return json_reply(self._card(name))

    async def health(self, request: HttpRequest) -> Response:
        """200 while the engine makes progress or is idle; 503 with the reason otherwise."""
        engine = self._front.engine
        trouble = engine.trouble(self._front.settings.stall_s)
        value = {
            "status": "ok" if trouble is None else "stuck" if engine.death is None else "dead",
            "reason": trouble,
            "steps": engine.steps,
            "last_step_age_s": round(engine.last_progress_s, 3),
            "outstanding": engine.outstanding,
        }
        return json_reply(value, status=200 if trouble is None else 503)

    async def metrics(self, request: HttpRequest) -> Response:
        """Prometheus metrics."""
        return Response(self._front.metrics.text(), media_type=CONTENT_TYPE)

    async def version(self, request: HttpRequest) -> Response:
        """The version of hone."""
        return json_reply({"version": own_version()})
