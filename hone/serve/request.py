"""Inputs and outputs of the engine: sampling parameters, requests, outputs, completions."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, field_validator

from hone.base.errors import HoneError, SpecError
from hone.base.spec import Spec

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

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stop:
            raise ValueError("a stop text must not be empty")
        return stop

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


@dataclass
class Request:
    """One prompt to continue. A lower `priority` value is served first; `salt` keeps its prefix cache apart."""

    id: str
    prompt: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    salt: str = ""


@dataclass
class TokenLogprob:
    """Log-probability (nats, of the raw model) of `token`, and the most likely (token, logprob) pairs, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass
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

    def extend(self, later: Output) -> None:
        """Appends a later output of the same request."""
        self.tokens += later.tokens
        self.text += later.text
        self.logprobs += later.logprobs
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs
        self.finish, self.stop_reason, self.error = later.finish, later.stop_reason, later.error
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
