"""Beam search: the `n` most likely continuations, found by extending the best beams one token at a time.

Every beam of a step is a request of one token whose log-probabilities give its extensions; the prefix cache keeps the
beams' pages, so a step computes one token of each. As in vLLM and transformers, a finished beam's score is its
log-probability divided by its number of tokens to the power `length_penalty`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hone.serve.http.endpoints.asking import ask
from hone.serve.http.processes.link import EngineLink
from hone.serve.http.processes.replicas import Replicas
from hone.serve.http.protocol import ApiError, GenerationBody
from hone.serve.request import Request, SamplingParams, TokenLogprob

MOST_BEAMS = 32
_HARMLESS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(
        (
            "seed", "response_format", "structured_outputs", "best_of", "logprobs", "tools",
            "stop", "logit_bias", "bad_words", "allowed_token_ids", "top_k", "min_tokens", "min_p", "stream", "echo",
            "presence_penalty", "frequency_penalty",
        ),
        ([], {}, 0, False),
    ),
    "top_k": (0, -1),
    "top_p": (1,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "temperature": (0, 1),
}  # fmt: skip
"""Fields that shape a draw or a text, and their values that change nothing."""


def check_beams(body: GenerationBody) -> None:
    """Raises ApiError 400 for fields that beam search does not take."""
    for name, harmless in _HARMLESS.items():
        value = getattr(body, name, None)
        if value is not None and value not in harmless:
            raise ApiError(400, f"use_beam_search does not take {name}; leave it out", param=name, code="unsupported")
    if (body.n or 1) > MOST_BEAMS:
        raise ApiError(400, f"at most {MOST_BEAMS} beams are searched, n is {body.n}", param="n")
    if body.max_tokens_wanted == 0:
        raise ApiError(400, "use_beam_search searches texts of at least one token; max_tokens is 0", param="max_tokens")


@dataclass
class Beam:
    """One continuation: its tokens, the sum of their log-probabilities, and how it ended."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    total: float = 0.0
    finish: str | None = None

    def extended(self, token: int, logprob: float, finish: str | None) -> Beam:
        """The beam with one token more."""
        scored = TokenLogprob(token, logprob, [])
        return Beam([*self.tokens, token], [*self.logprobs, scored], self.total + logprob, finish)

    def score(self, length_penalty: float) -> float:
        """What beams are ranked by; higher is better."""
        return self.total / max(len(self.tokens), 1) ** length_penalty


class BeamSearch:
    """Searches through an engine's process. `eos_ids` end a beam."""

    def __init__(self, engine: EngineLink | Replicas, eos_ids: frozenset[int], name: Callable[[], str]) -> None:
        self._engine = engine
        self._eos_ids = eos_ids
        self._name = name

    async def search(self, request: Request, body: GenerationBody) -> list[Beam]:
        """The best `n` beams of a request, best first. Raises ApiError. Cancelled, it ends what it has asked for."""
        width = body.n or 1
        ends = frozenset(body.stop_token_ids or ()) | (frozenset() if body.ignore_eos else self._eos_ids)
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=2 * width, ignore_eos=True)
        max_tokens = request.params.max_tokens
        live, done = [Beam([], [])], []
        for step in range(max_tokens):
            requests = [
                replace(request, id=self._name(), prompt=request.prompt + beam.tokens, params=params) for beam in live
            ]
            found = []
            for beam, output in zip(live, await ask(self._engine, requests)):
                (scored,) = output.logprobs
                for token, logprob in scored.top[: 2 * width]:
                    finish = "stop" if token in ends else "length" if step + 1 == max_tokens else None
                    found.append(beam.extended(token, logprob, finish))
            found.sort(key=lambda beam: -beam.total)
            done += [beam for beam in found[: 2 * width] if beam.finish == "stop"]
            live = [beam for beam in found if beam.finish != "stop"][:width]
            if live and live[0].finish == "length":
                done += live
                break
            if body.early_stopping and len(done) >= width:
                break
            if len(done) >= width and not self._may_improve(live, done, width, body.length_penalty, max_tokens):
                break
        return sorted(done, key=lambda beam: -beam.score(body.length_penalty))[:width]

    @staticmethod
    def _may_improve(live: list[Beam], done: list[Beam], width: int, penalty: float, max_tokens: int) -> bool:
        """Whether a live beam, even with certain tokens from now on, could still be among the best."""
        worst = sorted((beam.score(penalty) for beam in done), reverse=True)[width - 1]
        longest = max_tokens if penalty > 0 else 1
        return any(max(beam.score(penalty), beam.total / longest**penalty) > worst for beam in live)
