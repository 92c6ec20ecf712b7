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

from hone.serve.http.chat import ChatForm, ParsedChatReply
from hone.serve.http.chat_forms import ChatForms
from hone.serve.http.endpoints.adapters import AdapterEndpoints
from hone.serve.http.endpoints.beam import BeamSearch, check_beams
from hone.serve.http.endpoints.best_of import BestOfReply
from hone.serve.http.endpoints.embeddings import Embeddings
from hone.serve.http.endpoints.openapi import description
from hone.serve.http.endpoints.page import page
from hone.serve.http.endpoints.response_body import ResponsesBody
from hone.serve.http.endpoints.responses import ResponsesReply
from hone.serve.http.forms import OutputForms
from hone.serve.http.front import EventStream, Front, json_reply, until_disconnect
from hone.serve.http.inputs import check_ids, split_prompts
from hone.serve.http.metrics import CONTENT_TYPE
from hone.serve.http.prompts import Prompts
from hone.serve.http.protocol import (
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)
from hone.serve.http.replies import ChatReply, CompletionReply, PromptTokens, Reply, TokenLabels
from hone.serve.request import Output, Request
from hone.serve.structured.spec import StructuredOutputs

Handler = Callable[[HttpRequest], Awaitable[Response]]


def build_app(front: Front) -> FastAPI:
    """The application; every reply, errors included, has the OpenAI form and the request's x-request-id."""
    app = FastAPI(title="hone", version=own_version(), docs_url=None, redoc_url=None, openapi_url=None)
    generation, tokens, state = Generation(front), TokenEndpoints(front), StateEndpoints(front)
    embeddings, adapters = Embeddings(front), AdapterEndpoints(front)
    for method, path, handler, guarded in (
        ("POST", "/v1/completions", generation.completions, True),
        ("POST", "/v1/chat/completions", generation.chat, True),
        ("POST", "/v1/responses", generation.responses, True),
        ("POST", "/v1/embeddings", embeddings.embeddings, True),
        ("POST", "/v1/score", embeddings.score, True),
        ("POST", "/v1/load_lora_adapter", adapters.load, True),
        ("POST", "/v1/unload_lora_adapter", adapters.unload, True),
        ("POST", "/tokenize", tokens.tokenize, True),
        ("POST", "/detokenize", tokens.detokenize, True),
        ("GET", "/tokenizer_info", tokens.info, True),
        ("GET", "/", page, False),
        ("GET", "/v1/models", state.models, True),
        ("GET", "/v1/models/{name:path}", state.model, True),
        ("GET", "/openapi.json", state.openapi, True),
        ("GET", "/health", state.health, False),
        ("GET", "/ping", state.health, False),
        ("POST", "/ping", state.health, False),
        ("GET", "/metrics", state.metrics, False),
        ("GET", "/version", state.version, False),
    ):
        methods = ["GET", "HEAD"] if method == "GET" else [method]
        app.add_api_route(path, _wrap(front, path, handler, guarded), methods=methods, response_model=None)

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
        self._forms = OutputForms(tokenizer)
        self._chats = ChatForms(front.settings.parsers, self._forms, tokenizer)
        self._labels = [TokenLabels(tokenizer, as_ids=as_ids) for as_ids in (False, True)]

    async def completions(self, request: HttpRequest) -> Response:
        """POST /v1/completions."""
        body, headers = await self._front.read(request, CompletionBody)
        given = split_prompts(body.prompt, self._front.prompts.vocab_size)
        self._front.admit(len(given) * body.copies)  # before any other work
        form = await self._forms.of(body)
        prompts = await self._front.prompts.of_completion(body, given)
        scores_prompt = body.echo and body.logprobs is not None
        requests = [
            self._request(
                body,
                prompt,
                copy,
                self._front.prompts.max_tokens(prompt, body, body.max_tokens_wanted, 16),
                scores_prompt,
                form,
            )
            for prompt in prompts
            for copy in range(body.copies)
        ]
        return await self._answer(request, body, headers, prompts, requests)

    async def chat(self, request: HttpRequest) -> Response:
        """POST /v1/chat/completions."""
        body, headers = await self._front.read(request, ChatBody)
        prompt, requests, form = await self._prepared(body)
        return await self._answer(request, body, headers, [prompt], requests, form)

    async def responses(self, request: HttpRequest) -> Response:
        """POST /v1/responses: the same as a chat, in and out in OpenAI's newer form."""
        asked, headers = await self._front.read(request, ResponsesBody)
        body = asked.chat()
        prompt, requests, form = await self._prepared(body)
        tokenizer = self._front.prompts.need_tokenizer("input")
        request_id = self._front.request_id(request, body)
        reply = ResponsesReply(
            body,
            asked,
            form,
            lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
            reply_id=f"resp_{request_id}",
            created=int(time.time()),
            model=body.model or self._front.settings.names[0],
            prompts=[prompt],
            n=1,
        )
        return await self._sent(request, body, headers, reply, request_id, requests)

    async def _prepared(self, body: ChatBody) -> tuple[PromptTokens, list[Request], ChatForm | None]:
        """A chat's prompt, the engine's requests, and how replies are read."""
        self._front.admit(body.n or 1)  # before any other work
        prompt = await self._front.prompts.of_chat(body, self._chats.shown(body))
        meaning = await self._chats.of(body, prompt.text)
        if meaning.keeps_special_tokens:
            body.skip_special_tokens = False
        max_tokens = self._front.prompts.max_tokens(prompt, body, body.max_tokens_wanted, None)
        copies = range(body.n or 1)
        requests = [self._request(body, prompt, copy, max_tokens, False, meaning.output) for copy in copies]
        return prompt, requests, meaning.form

    def _request(
        self,
        body: GenerationBody,
        prompt: PromptTokens,
        copy: int,
        max_tokens: int,
        scores_prompt: bool,
        form: StructuredOutputs | None,
    ) -> Request:
        """The engine's request of one choice. Choice i of `n` uses the seed + i."""
        for kind, ids in (
            ("stop_token_ids", body.stop_token_ids),
            ("logit_bias", list(body.logit_bias or {})),
            ("allowed_token_ids", body.allowed_token_ids),
        ):
            if ids:
                check_ids(ids, self._front.prompts.vocab_size, kind)
        if body.use_beam_search:
            check_beams(body)  # what the client sent: the model's defaults shape draws, and beams draw nothing
        else:
            self._front.settings.defaults.fill(body)
        scores = body.top_logprobs_wanted if scores_prompt else body.prompt_logprobs if copy == 0 else None
        params = body.sampling(max_tokens=max_tokens, prompt_logprobs=scores, form=form)
        if params.seed is not None and copy:
            params = params.model_copy(update={"seed": (params.seed + copy) % 2**63})
        retention = tuple(body.cache_retention)
        adapter = self._front.models.adapter_of(body.model)
        return Request(
            "", prompt.ids, params, body.priority, body.cache_salt or "", retention=retention, adapter=adapter
        )

    async def _answer(
        self,
        request: HttpRequest,
        body: GenerationBody,
        headers: dict[str, str],
        prompts: list[PromptTokens],
        requests: list[Request],
        form: ChatForm | None = None,
    ) -> Response:
        front = self._front
        front.admit(len(requests))
        request_id = front.request_id(request, body)
        reply = self._reply(body, request_id, prompts, form)
        if body.use_beam_search:
            return await self._beams(request, body, headers, reply, requests)
        return await self._sent(request, body, headers, reply, request_id, requests)

    async def _sent(
        self,
        request: HttpRequest,
        body: GenerationBody,
        headers: dict[str, str],
        reply: Reply,
        request_id: str,
        requests: list[Request],
    ) -> Response:
        """The reply of `requests`, whole or as a stream."""
        front, headers["x-request-id"] = self._front, request_id
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

    def _reply(
        self, body: GenerationBody, request_id: str, prompts: list[PromptTokens], form: ChatForm | None
    ) -> Reply:
        labels = self._labels[bool(body.return_tokens_as_token_ids)]
        if self._front.prompts.tokenizer is None:
            body.return_token_ids = True  # without a tokenizer there is no text
        more: dict[str, Any] = {
            "created": int(time.time()),
            "model": body.model or self._front.settings.names[0],
            "prompts": prompts,
            "n": body.copies,
        }
        if isinstance(body, ChatBody) and form is not None:
            return ParsedChatReply(body, labels, form, reply_id=f"chatcmpl-{request_id}", **more)
        if isinstance(body, ChatBody):
            return ChatReply(body, labels, reply_id=f"chatcmpl-{request_id}", **more)
        assert isinstance(body, CompletionBody)
        kind = CompletionReply if body.copies == (body.n or 1) else BestOfReply
        return kind(body, labels, self._special, reply_id=f"cmpl-{request_id}", **more)

    async def _beams(
        self, request: HttpRequest, body: GenerationBody, headers: dict[str, str], reply: Reply, requests: list[Request]
    ) -> Response:
        """The reply by beam search; `requests` has `n` equal ones of each prompt."""
        headers["x-request-id"] = self._front.request_id(request, body)
        front, tokenizer = self._front, self._front.prompts.tokenizer
        ends = front.engine.info.eos_ids
        search = BeamSearch(front.engine, ends, front.next_id)
        for first in range(0, len(requests), body.copies):
            one = requests[first]
            found = search.search(one, body)
            beams = await until_disconnect(found, request.receive)
            if beams is None:
                return Response(status_code=499)  # the client disconnected
            for choice, beam in zip(reply.choices[first:], beams):
                shown = beam.tokens[:-1] if beam.finish == "stop" else beam.tokens
                text = "" if tokenizer is None else tokenizer.decode(shown, body.skip_special_tokens)
                choice.take(Output("", beam.tokens, text, beam.logprobs, finish=beam.finish))
        return json_reply(reply.whole(), headers)


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
            text = await self._prompts.render(
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
        """What remote clients need to know of the tokenizer (lm-eval reads it)."""
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

    def _cards(self) -> list[dict[str, Any]]:
        front = self._front
        more = {"object": "model", "created": front.started_at, "owned_by": "hone"}
        return [{**one, **more, "max_model_len": front.prompts.max_model_len} for one in front.models.cards()]

    async def models(self, request: HttpRequest) -> Response:
        """The served names."""
        return json_reply({"object": "list", "data": self._cards()})

    async def model(self, request: HttpRequest) -> Response:
        """One served name."""
        name = request.path_params["name"]
        for card in self._cards():
            if card["id"] == name:
                return json_reply(card)
        raise ApiError(404, f"this server has no model '{name[:100]}'", param="model", code="model_not_found")

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

    async def openapi(self, request: HttpRequest) -> Response:
        """The endpoints and the fields of their bodies as OpenAPI 3.1."""
        return json_reply(description(own_version()))

    async def version(self, request: HttpRequest) -> Response:
        """The version of hone."""
        return json_reply({"version": own_version()})
