"""Inputs and outputs of the engine: sampling parameters, requests, outputs, completions."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from hone.base.errors import FitError, HoneError, SpecError
from hone.base.spec import Spec
from hone.serve.structured.spec import StructuredOutputs

Pooling = Literal["mean", "last"]
Finish = Literal["stop", "length", "abort", "error"]


class BusyError(HoneError):
    """Too many requests wait already; try again later."""


class SamplingParams(Spec):
    """How one request's tokens are chosen and when it ends. Field meanings follow the OpenAI API and its extensions."""

    max_tokens: int = Field(16, ge=0, description="Most tokens to generate; 0 only scores the prompt.")
    min_tokens: int = Field(0, ge=0, description="Least tokens before end-of-text or a stop may end it.")
    temperature: float = Field(1.0, ge=0, le=100, description="Divides the logits; 0 takes the most likely token.")
    top_k: int = Field(0, ge=0, description="Sample among the k most likely tokens; 0 is all.")
    top_p: float = Field(1.0, gt=0, le=1, description="Sample among the fewest tokens whose probability reaches this.")
    min_p: float = Field(0.0, ge=0, le=1, description="Drop tokens below this fraction of the most likely one.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="Same seed and prompt, same text.")
    stop: tuple[str, ...] = Field((), description="Texts that end the generation.")
    stop_token_ids: tuple[int, ...] = Field((), description="Tokens that end the generation.")
    include_stop: bool = Field(False, description="Keep the stop text in the output.")
    ignore_eos: bool = Field(False, description="Continue after end-of-text.")
    logprobs: int | None = Field(None, ge=0, le=1000, description="Alternatives reported for each token's logprob.")
    prompt_logprobs: int | None = Field(None, ge=0, le=1000, description="The same for each token of the prompt.")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="Subtracted from logits of tokens already generated.")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="The same, times the count of the token.")
    repetition_penalty: float = Field(1.0, gt=0, description="Divides logits of tokens in prompt or output (1 is off).")
    logit_bias: dict[int, float] = Field({}, description="Added to the logits of single tokens.")
    structured_outputs: StructuredOutputs | None = Field(None, description="Form that the whole output must have.")
    allowed_token_ids: tuple[int, ...] | None = Field(None, description="The only tokens that may be generated.")
    bad_words: tuple[str, ...] = Field((), description="Texts that must not be generated.")
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of the text.")

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stop:
            raise ValueError("a stop text must not be empty")
        return stop

    @property
    def constrained(self) -> bool:
        """True when some tokens are ruled out, by a mask that depends on the tokens before."""
        return self.structured_outputs is not None or self.allowed_token_ids is not None or bool(self.bad_words)

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature == 0

    def without_engine(self, kind: str) -> dict[str, Any]:
        """These as options of `hone.model.incremental.write`, for models whose mixer `kind` the engine cannot serve.

        Raises SpecError for one that only the engine supports.
        """
        shared = ("temperature", "top_k", "top_p", "min_p", "ignore_eos")
        known = {*shared, "max_tokens", "seed", "stop_token_ids"}
        for name, value in SamplingParams():
            if name not in known and getattr(self, name) != value:
                raise SpecError(
                    f"{name} needs the engine, which serves no layers of mixer '{kind}'",
                    fix=f"leave {name} out, or use a model of attention layers",
                )
        return {
            "num_tokens": self.max_tokens,
            "seed": secrets.randbits(62) if self.seed is None else self.seed,
            "stop_tokens": self.stop_token_ids,
            **{name: getattr(self, name) for name in shared},
        }


class Retention(Spec):
    """How long pages of a range of a request's tokens stay in the prefix cache (eviction `priority_duration`)."""

    start: int = Field(0, ge=0, description="First token of the range.")
    end: int | None = Field(None, ge=1, description="Token after its last; empty: to the end, output included.")
    priority: int = Field(35, ge=0, le=100, description="The lowest is evicted first; 35 is that of all other pages.")
    duration_s: float | None = Field(
        None, gt=0, description="Seconds after the request's end for which the priority holds; empty: for ever."
    )

    @model_validator(mode="after")
    def _not_empty(self) -> Retention:
        if self.end is not None and self.end <= self.start:
            raise ValueError(f"tokens {self.start} to {self.end} are an empty range")
        return self


@dataclass
class Request:
    """One prompt to continue. A lower `priority` value is served first; `salt` keeps its prefix cache apart; `adapter` is one's name.

    With `pooling` the output also has the prompt's hidden states after the final norm: their mean, or the last one.
    `retention`: what of it stays longer, or less long, in the prefix cache than other pages.
    """

    id: str
    prompt: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    salt: str = ""
    pooling: Pooling | None = None
    retention: tuple[Retention, ...] = ()
    adapter: str = ""

    @property
    def kept_apart_by(self) -> str:
        """Differs where two requests share no page of the prefix cache though their prompts are equal: the salt, and the adapter."""
        return f"{self.salt}\0lora {self.adapter}" if self.adapter else self.salt


@dataclass
class TokenLogprob:
    """Log-probability (nats, of the raw model) of `token`, and the most likely (token, logprob) pairs, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class Output:
    """One request's result of one engine step: new tokens, new text, and whether it is finished.

    The first output has all `prompt_logprobs`, the first of them None. `text` never ends inside a UTF-8 character or with
    the possible start of a stop text.
    """

    request_id: str
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish: Finish | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    pooled: bytes | None = None
    """float32 [hidden_size] of a request with `pooling`, in its first output with a token, or its only one."""

    def extend(self, later: Output) -> None:
        """Appends a later output of the same request."""
        self.tokens += later.tokens
        self.text += later.text
        self.logprobs += later.logprobs
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs
        self.finish, self.stop_reason, self.error = later.finish, later.stop_reason, later.error
        if later.pooled is not None:
            self.pooled = later.pooled
        self.num_output_tokens, self.num_cached_tokens = later.num_output_tokens, later.num_cached_tokens


@dataclass
class Completion:
    """A finished request as `Engine.generate` returns it: all tokens and all text."""

    prompt: list[int]
    tokens: list[int]
    text: str
    finish: Finish
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0

    def take(self, output: Output) -> None:
        """Appends an output of the request."""
        self.tokens += output.tokens
        self.text += output.text
        self.logprobs += output.logprobs
        self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish is not None:
            self.finish, self.stop_reason, self.error = output.finish, output.stop_reason, output.error


def joined(outputs: Iterable[Output]) -> list[Output]:
    """One output per request: several outputs of a request are joined, up to its end."""
    joined: list[Output] = []
    growing: dict[str, Output] = {}
    for output in outputs:
        first = growing.get(output.request_id)
        if first is None:
            joined.append(output)
        else:
            first.extend(output)
        if output.finish is None:
            growing[output.request_id] = first or output
        else:  # a later request may have the same id
            growing.pop(output.request_id, None)
    return joined


def check_request(request: Request, vocab_size: int, max_model_len: int, *, has_tokenizer: bool) -> None:
    """Raises SpecError for what the model or tokenizer does not have, FitError for a prompt longer than the context."""
    params = request.params
    if not request.prompt:
        raise SpecError("the prompt has no tokens", fix="send at least one token")
    for name, tokens in (
        ("prompt", request.prompt),
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
    ):
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise SpecError(
                    f"{name} holds token {token}, the vocabulary has {vocab_size}",
                    fix=f"use token ids from 0 to {vocab_size - 1}",
                )
    longest = max_model_len - (params.max_tokens > 0)
    if len(request.prompt) > longest:
        raise FitError(
            f"the prompt has {len(request.prompt)} tokens, the maximum context length is {max_model_len} "
            "tokens, output included",
            fix=f"shorten the prompt to {longest} tokens or less",
        )
    if params.stop and not has_tokenizer:
        raise SpecError("stop texts need a tokenizer", fix="use stop_token_ids, or give the engine a tokenizer")
