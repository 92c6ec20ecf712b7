"""One unfinished request as the scheduler sees it, and what the scheduler decides for a step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from hone.serve.adapters.registry import ServedAdapter
from hone.serve.detokenize import TextStream
from hone.serve.request import Output, Request, TokenLogprob
from hone.serve.sampler import SampledToken
from hone.serve.sampling import SeqSampling
from hone.serve.structured.constraint import Constraint

State = Literal["compiling", "waiting", "running", "done"]


@dataclass(eq=False)
class Seq:
    """One unfinished request: its tokens so far, the number of computed ones, and their pages."""

    request: Request
    arrival: int
    max_tokens: int  # total length at which it must end
    ends: frozenset[int] = frozenset()  # tokens after which it ends
    tokens: list[int] = field(default_factory=list)  # prompt and output, as far as the host knows them
    num_prompt: int = 0
    # The scheduler's:
    state: State = "waiting"
    num_computed: int = 0  # tokens whose keys and values are in the pages once all launched steps have run, or were
    num_in_flight: int = 0  # tokens that launched steps sample, unknown to the host so far
    step_index: int = -1  # its place in the step that samples the last of them
    waits_since: float = 0.0
    num_preemptions: int = 0
    # The page manager's:
    pages: list[int] = field(default_factory=list)
    page_end: int = 0  # tokens computed with which there are pages to publish or to free
    num_dropped: int = (
        0  # of the computed tokens, those that the KV policy has dropped: the others are in the pages without a gap
    )
    boundary: int = sys.maxsize  # tokens after which it is compacted, before more of it is computed
    compacted: bool = False  # its pages hold other tokens than their places say
    num_cached: int = 0  # of the prompt, found in the prefix cache at first admission
    published: int = 0  # full pages in the prefix cache
    key: bytes = b""  # key of the last published page
    keys: list[bytes] = field(default_factory=list)  # keys of the full pages of its tokens when it was last admitted
    salt: str = ""  # what its prefix cache is kept apart by: the request's, and the content of its adapter
    # The adapters':
    adapter: ServedAdapter | None = None
    adapter_slot: int = -1  # while it is running with an adapter
    num_passed: int = 0  # later sequences with adapters that began while it waited for a slot
    # The drafter's:
    speculates: bool = False
    guesses: list[int] = field(
        default_factory=list
    )  # of the tokens that follow its last one, by a drafter of hidden states
    drafted: int = 0  # tokens whose keys and values are in the draft model's cache
    # What becomes of its tokens:
    sampling: SeqSampling | None = None
    stream: TextStream | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    pooled: tuple[int, np.ndarray] | None = None  # tokens whose hidden states are in the sum, or have passed; the sum

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.num_prompt = len(self.tokens)
        self.salt = self.request.salt if self.adapter is None else f"{self.request.salt}\0lora {self.adapter.content}"

    @property
    def rank(self) -> tuple[int, int]:
        """The lowest is scheduled first."""
        return (self.request.priority, self.arrival)

    @property
    def length(self) -> int:
        """Tokens, those in flight included."""
        return len(self.tokens) + self.num_in_flight

    @property
    def constraint(self) -> Constraint | None:
        """What rules tokens out, None where every token may be chosen."""
        return None if self.sampling is None else self.sampling.constraint

    def pool(self, start: int, count: int, states: np.ndarray) -> None:
        """Takes what a step kept of the hidden states (float32 [D]) of `count` tokens from `start` on, chunk by chunk.

        A chunk that was launched before a preemption does not follow the ones since: it is left out.
        """
        end = start + count
        if self.request.pooling == "last":
            self.pooled = end, states
        elif start == 0:
            self.pooled = end, states.copy()
        elif self.pooled is not None and self.pooled[0] == start:
            self.pooled = end, self.pooled[1] + states

    @property
    def pooled_bytes(self) -> bytes | None:
        """float32 [D]: the mean of the prompt's hidden states, or the last one; None without pooling."""
        if self.pooled is None:
            return None
        return (
            (self.pooled[1] / (self.num_prompt if self.request.pooling == "mean" else 1)).astype(np.float32).tobytes()
        )

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> Output:
        """A new output without tokens."""
        return Output(
            self.request.id,
            num_prompt_tokens=self.num_prompt,
            num_output_tokens=self.num_output,
            num_cached_tokens=self.num_cached,
        )

    def goes_on(self, item: ScheduledSeq, token: int | None) -> bool:
        """Whether `token`, the only result of `item`, is one more token and nothing else: neither the first nor the last."""
        return (
            token is not None
            and token >= 0
            and token not in self.ends
            and item.start >= self.num_prompt
            and len(self.tokens) + 1 < self.max_tokens
            and self.constraint is None
        )

    def take(self, chosen: SampledToken, output: Output) -> tuple[str | None, str | int | None]:
        """Appends a token to the sequence and its output; returns (finish, stop reason), None while it goes on.

        Raises ArithmeticError for a token from logits that are not finite.
        """
        if not chosen.finite:
            raise ArithmeticError("the model's logits are not finite")
        params, token = self.request.params, chosen.token
        self.tokens.append(token)
        output.tokens.append(token)
        constraint = self.constraint
        if constraint is not None:
            constraint.accept(token)
        if chosen.logprob is not None:
            output.logprobs.append(chosen.logprob)
        ended = token in self.ends
        if self.stream is not None and (params.include_stop or not ended):
            output.text += self.stream.push(token)
            if self.stream.matched is not None:
                return "stop", self.stream.matched
        if ended:
            return "stop", token if token in params.stop_token_ids else None
        if constraint is not None and constraint.is_done:
            return "stop", None
        return ("length", None) if len(self.tokens) >= self.max_tokens else (None, None)

    @property
    def decoding(self) -> bool:
        """True when all but its last token are in the cache."""
        return self.num_computed == len(self.tokens) + self.num_in_flight - 1 and self.num_computed > 0


@dataclass(slots=True)
class ScheduledSeq:
    """One sequence's part of a step: `count` tokens from `start` on.

    `lookahead` is the most guesses that may follow. The drafter sets their number (`num_guesses`), the tokens (`guesses`;
    empty when a draft model computes them in the step), and the draft model's input (`draft_start`, `draft_count`).
    """

    seq: Seq
    start: int
    count: int
    samples: bool
    """Whether the step computes the sequence's next token."""
    lookahead: int = 0
    room: int = 0
    """Tokens for which it has pages after its last one, where rounds follow one another on the device (`speculation.rounds`)."""
    num_guesses: int = 0
    guesses: Sequence[int] = ()
    draft_start: int = 0
    draft_count: int = 0


@dataclass(slots=True)
class SchedulerOutput:
    """What the scheduler decides for one step. `StepBuilder` makes of it what the device gets (`StepInput`).

    It may be decided, built and launched while earlier steps are still under way: it needs their lengths, not their tokens.
    """

    seqs: list[ScheduledSeq]
    new_pages: list[int] = field(default_factory=list)
    """Pages that were allocated since the last step, to be wiped before this one."""
