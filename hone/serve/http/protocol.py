"""Request bodies of the OpenAI API and its common extensions, checked, and errors in its form.

Fields follow the OpenAI reference and vLLM's extensions. A field that would change the result and that hone does not
support is an error; an unknown one is accepted and named in a header, as OpenAI's server accepts it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, ValidationError

from hone.serve.request import SamplingParams

MAX_CHOICES = 128
MAX_LOGPROBS = 20
_MAX_STOPS = 16
_MAX_LISTED = 1024
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


def _number(value: Any) -> Any:
    if isinstance(value, bool | str):
        raise ValueError("must be a number")
    return value


def _text(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value.encode("utf8")
        except UnicodeEncodeError:
            raise ValueError("contains half of a surrogate pair, which is no character") from None
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Int = Annotated[int, BeforeValidator(_number)]
Float = Annotated[FiniteFloat, BeforeValidator(_number)]
Text = Annotated[str, BeforeValidator(_text)]
Id = Annotated[int, BeforeValidator(_number), Field(ge=0, lt=2**31)]
Bias = Annotated[
    dict[Annotated[int, Field(ge=0, lt=2**31)], Annotated[Float, Field(ge=-100, le=100)]], Field(max_length=_MAX_LISTED)
]
Stops = Annotated[list[Text], Field(fail_fast=True), Field(max_length=_MAX_STOPS), BeforeValidator(_as_list)]


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
                raise ApiError(
                    400, f"this server does not support '{name}'; leave it out", param=name, code="unsupported"
                )

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


_REFUSED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logits_processors": ([],),
    "skip_special_tokens": (True,),
    "length_penalty": (1.0, 1),
    "prompt_embeds": (),
    "best_of": (),
    "response_format": ({"type": "text"},),
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
    stop_token_ids: Annotated[list[Id], Field(fail_fast=True), Field(max_length=_MAX_LISTED)] | None = None
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

    def sampling(self, *, max_tokens: int, prompt_logprobs: int | None) -> SamplingParams:
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
        }
        try:
            return SamplingParams.model_validate({name: value for name, value in values.items() if value is not None})
        except ValidationError as error:
            raise from_validation(error) from None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Any = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool = True

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {**_REFUSED, "suffix": ("",)}

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs


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

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_REFUSED,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none",),
        "chat_template": (),
        "documents": ([],),
        "modalities": (["text"],),
        "audio": (),
        "echo": (False,),
    }
    without_effect: ClassVar[frozenset[str]] = GenerationBody.without_effect | {"parallel_tool_calls", "prediction"}

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


Prompt = str | list[int]


def split_prompts(prompt: Any, vocab_size: int) -> list[Prompt]:
    """The prompts in `prompt`: str, list[str], list[int] or list[list[int]]. Raises ApiError 400 for anything else."""
    if isinstance(prompt, str):
        return [_prompt_text(prompt, "prompt")]
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], str):
            return [_prompt_text(item, f"prompt.{index}") for index, item in enumerate(prompt)]
        if isinstance(prompt[0], list):
            return [check_ids(item, vocab_size, f"prompt.{index}") for index, item in enumerate(prompt)]
        return [check_ids(prompt, vocab_size, "prompt")]
    raise ApiError(
        400, "prompt must be a text, a list of texts, a list of token ids, or a list of such lists", param="prompt"
    )


def _prompt_text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise ApiError(400, f"{param} must be a text like the others in the list", param=param)
    try:
        return str(_text(value))
    except ValueError as error:
        raise ApiError(400, f"{param} {error}", param=param) from None


def check_ids(ids: Any, vocab_size: int, param: str) -> list[int]:
    """`ids` when it is a non-empty list of token ids of this model. Raises ApiError 400 otherwise."""
    if not isinstance(ids, list) or not ids:
        raise ApiError(400, f"{param} must be a non-empty list of token ids", param=param)
    for position, token in enumerate(ids):
        if type(token) is not int:
            raise ApiError(400, f"{param}.{position} must be a token id (an integer)", param=param)
        if not 0 <= token < vocab_size:
            shown = bounded(str(token), 40) if abs(token) < 10**40 else "a number of more than 40 digits"
            raise ApiError(
                400, f"{param}.{position} is token {shown}, the vocabulary has ids 0 to {vocab_size - 1}", param=param
            )
    return ids


def message_dicts(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as the chat template takes them: content parts joined to one text. Raises ApiError for other media."""
    plain = []
    for index, message in enumerate(messages):
        param = f"messages.{index}.content"
        content = message.content
        if isinstance(content, list):
            content = "".join(_part_text(part, param) for part in content)
        elif content is None:
            content = ""
        elif not isinstance(content, str):
            raise ApiError(400, f"{param} must be a text or a list of text parts", param=param)
        plain.append({**(message.model_extra or {}), "role": message.role, "content": _prompt_text(content, param)})
    return plain


def _part_text(part: Any, param: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else None
    shown = f"'{kind[:40]}'" if isinstance(kind, str) else "something else"
    raise ApiError(400, f"{param} holds {shown}; this model reads text only", param=param, code="unsupported")
