"""Request bodies of the OpenAI API and its common extensions, checked, and errors in its form.

Fields follow the OpenAI reference and vLLM's extensions. A field that would change the result and that hone does not
support is an error; an unknown one is accepted and named in a header, as OpenAI's server accepts it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hone.serve.http.fields import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_TOOLS,
    Bias,
    Float,
    Id,
    Ids,
    Int,
    ResponseFormat,
    Stops,
    Structured,
    Text,
    Tool,
    ToolChoice,
    Words,
)
from hone.serve.request import Retention, SamplingParams
from hone.serve.structured.spec import StructuredOutputs

_MESSAGE_CHARS = 400


class ApiError(Exception):
    """An error reply: HTTP `status`, and the values of `{"error": {message, type, param, code}}`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = bounded(message)
        self.param = None if param is None else bounded(param, 100)
        self.code = code
        self.retry_s = retry_s

    @property
    def body(self) -> dict[str, Any]:
        """The JSON for the client; its size is bounded for any request."""
        kinds = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bounded(text: str, limit: int = _MESSAGE_CHARS) -> str:
    """`text`, shortened in the middle to about `limit` characters, and safe to encode."""
    if len(text) > limit:
        text = f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
    return text.encode("utf8", "replace").decode("utf8")


class Body(BaseModel):
    """A JSON body. Unknown fields are kept apart in `model_extra`."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    without_effect: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {}

    def refuse_what_hone_lacks(self) -> None:
        """Raises ApiError for the first field in `refused` whose value does not mean 'off'."""
        for name, harmless in self.refused.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and not any(value == off and type(value) is type(off) for off in harmless):
                today = _RENAMED.get(name)
                fix = f"it is now {today}" if today else "leave it out"
                raise ApiError(400, f"this server does not support '{name}'; {fix}", param=name, code="unsupported")

    @property
    def unknown(self) -> list[str]:
        """Names of unknown fields, which the server ignores."""
        known = self.without_effect | set(self.refused)
        return [name for name in self.model_extra or {} if name not in known]


class StreamOptions(BaseModel):
    """`stream_options` of the OpenAI API."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False
    continuous_usage_stats: bool = False


_RENAMED = {
    "guided_json": 'structured_outputs: {"json": ...}',
    "guided_regex": 'structured_outputs: {"regex": ...}',
    "guided_choice": 'structured_outputs: {"choice": [...]}',
    "guided_grammar": 'structured_outputs: {"grammar": ...}',
    "guided_whitespace_pattern": 'structured_outputs: {"whitespace_pattern": ...}',
    "regex": 'structured_outputs: {"regex": ...}',
    "choice": 'structured_outputs: {"choice": [...]}',
    "grammar": 'structured_outputs: {"grammar": ...}',
    "json_schema": 'structured_outputs: {"json": ...}',
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
}
"""Fields of earlier vLLM versions and of other servers, and what is sent here."""

_OF_OTHER_SERVERS = (
    # vLLM's and OpenAI's
    *("guided_decoding_backend", "structural_tag", "mm_processor_kwargs", "media_io_kwargs", "kv_transfer_params"),
    *("ec_transfer_params", "vllm_xargs", "thinking_token_budget", "truncation_side", "repetition_detection"),
    "web_search_options",
    # llama.cpp's, TGI's and SGLang's
    *("typical_p", "typical", "tfs_z", "top_a", "mirostat", "mirostat_tau", "mirostat_eta", "dynatemp_range"),
    *("dynatemp_exponent", "dry_multiplier", "dry_base", "xtc_probability", "xtc_threshold", "samplers", "ebnf"),
    *("min_new_tokens", "custom_logit_processor", "lora_path", "lora_name", "cfg_scale", "negative_prompt"),
)

_REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_RENAMED, ()),
    **dict.fromkeys(_OF_OTHER_SERVERS, ()),
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
    "prompt_embeds": (),
}


class GenerationBody(Body):
    """The fields of both endpoints."""

    model: Text | None = None
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    min_tokens: Int = 0
    temperature: Float | None = None
    top_p: Float | None = None
    top_k: Int | None = None
    min_p: Float | None = None
    seed: Int | None = None
    stop: Stops | None = None
    stop_token_ids: Ids | None = None
    allowed_token_ids: Annotated[list[Id], Field(fail_fast=True)] | None = None
    bad_words: Words | None = None
    skip_special_tokens: bool = True
    prompt_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    use_beam_search: bool = False
    length_penalty: Annotated[Float, Field(ge=-10, le=10)] = 1.0
    early_stopping: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    n: Annotated[Int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None
    repetition_penalty: Float | None = None
    logit_bias: Bias | None = None
    truncate_prompt_tokens: Annotated[Int, Field(ge=-1)] | None = None
    priority: Annotated[Int, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[Text, Field(max_length=256)] | None = None
    cache_retention: Annotated[list[Retention], Field(max_length=64)] = []
    request_id: Annotated[Text, Field(max_length=128)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"user", "metadata", "store", "service_tier", "safety_identifier"}
    )

    @property
    def top_logprobs_wanted(self) -> int | None:
        """Number of alternatives to report for each token; None without logprobs."""
        raise NotImplementedError

    @property
    def max_tokens_wanted(self) -> int | None:
        """Most tokens to generate; max_completion_tokens has precedence over max_tokens."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def copies(self) -> int:
        """Continuations to generate of each prompt."""
        return self.n or 1

    def check_together(self) -> None:
        """Raises ApiError 400 for fields that exclude each other."""
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs are not streamed: send stream: false", param="prompt_logprobs")

    def sampling(
        self, *, max_tokens: int, prompt_logprobs: int | None = None, form: StructuredOutputs | None = None
    ) -> SamplingParams:
        """The engine's parameters. Raises ApiError that names the API's field for a value out of range."""
        values = {
            "max_tokens": max_tokens,
            "min_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_k": None if self.top_k == -1 else self.top_k,  # -1 is vLLM's and llama.cpp's 'off'
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seed": self.seed,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "include_stop": self.include_stop_str_in_output,
            "ignore_eos": self.ignore_eos,
            "logprobs": self.top_logprobs_wanted,
            "prompt_logprobs": prompt_logprobs,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids,
            "bad_words": self.bad_words,
            "skip_special_tokens": self.skip_special_tokens,
            "structured_outputs": form,
        }
        try:
            return SamplingParams.model_validate({name: value for name, value in values.items() if value is not None})
        except ValidationError as error:
            raise from_validation(error) from None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Any = None
    echo: bool = False
    best_of: Annotated[Int, Field(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool = True

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {**_REFUSED, "suffix": ("",)}

    @property
    def top_logprobs_wanted(self) -> int | None:
        return 0 if self.logprobs is None and self.copies > (self.n or 1) else self.logprobs  # best_of ranks by them

    @property
    def copies(self) -> int:
        return max(self.best_of or 1, self.n or 1)

    def check_together(self) -> None:
        super().check_together()
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ApiError(400, f"best_of is {self.best_of}, less than n, {self.n}", param="best_of")
        if self.stream and self.copies > (self.n or 1):
            raise ApiError(
                400, "best_of ranks whole texts, which are not streamed: send stream: false", param="best_of"
            )
        if self.echo and self.logprobs is not None and self.prompt_logprobs is not None:
            raise ApiError(400, "echo with logprobs has the prompt's already", param="prompt_logprobs")


class Message(BaseModel):
    """One chat message; further fields are passed to the template."""

    model_config = ConfigDict(extra="allow")
    role: Annotated[Text, Field(min_length=1, max_length=64)]
    content: Any = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True), Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True), Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_REFUSED,
        "functions": ([],),
        "function_call": ("none",),
        "chat_template": (),
        "documents": ([],),
        "modalities": (["text"],),
        "audio": (),
        "echo": (False,),
    }
    without_effect: ClassVar[frozenset[str]] = GenerationBody.without_effect | {"prediction"}

    @property
    def top_logprobs_wanted(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs:
                raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
            return None
        return self.top_logprobs or 0


class TokenizeBody(Body):
    """POST /tokenize: a text, or chat messages through the template."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(fail_fast=True), Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize: token ids back to text."""

    model: Text | None = None
    tokens: Annotated[list[Id], Field(fail_fast=True)]


AnyBody = TypeVar("AnyBody", bound=Body)


def parse_body(raw: bytes, kind: type[AnyBody]) -> AnyBody:
    """`raw` as a checked body of `kind`. Raises ApiError 400 for anything that is not one."""
    try:
        values = json.loads(raw.decode("utf8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_json_name(values)}", code="invalid_json")
    try:
        body = kind.model_validate(values)
        body.refuse_what_hone_lacks()
        if isinstance(body, GenerationBody):
            body.check_together()
    except ValidationError as error:
        raise from_validation(error) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    return body


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _json_name(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


_API_NAMES = {"include_stop": "include_stop_str_in_output"}


def from_validation(error: ValidationError) -> ApiError:
    """The first error of pydantic as an ApiError, with the number of the others."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    first = details[0]
    names = [str(part) for part in first["loc"] if not str(part).startswith(("function-", "constrained-"))]
    param = ".".join([_API_NAMES.get(name, name) for name in names[:6]])
    message = f"{bounded(param, 100)}: {first['msg'].removeprefix('Value error, ')}"
    fields = {str(detail["loc"][0]) for detail in details if detail["loc"]} - {names[0] if names else ""}
    if fields:
        message += f" (and {len(fields)} more wrong fields)"
    return ApiError(400, message, param=param or None)
