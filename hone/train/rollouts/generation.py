"""Answers written by a model in training: the engine of this process serves the trained weights themselves, no copy of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from hone.base.errors import HoneError
from hone.model.decoder import Decoder
from hone.model.tokenizer import Tokenizer
from hone.serve.engine import Engine, EngineSpec
from hone.serve.request import Request, SamplingParams


class Answer(NamedTuple):
    """The tokens that follow a prompt, with the token that ended it; `ended`: it has one, it was not cut off."""

    tokens: list[int]
    ended: bool


class Generation:
    """An engine over the weights of `model`, which stay where they are and are trained on.

    Updates in place are served at once: keys and values that the weights before them made are never read again, because every call
    of `answers` has a prefix cache of its own. `max_model_len` is the longest prompt and answer together, `max_num_seqs` the
    answers written at once. Answers end with one of the model's end-of-text tokens, or of the tokenizer's, if one is given.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer | None, *, max_model_len: int, max_num_seqs: int) -> None:
        self.model, self.tokenizer = model, tokenizer
        device = next(model.parameters()).device
        block = 64 if device.type == "cuda" else 16
        pages = max_num_seqs * -(-max_model_len // block)
        spec = EngineSpec(max_model_len=max_model_len, max_num_seqs=max_num_seqs, block_size=block, num_pages=pages)
        with _as_it_was(model):
            self.engine = Engine(model, spec, tokenizer=tokenizer, device=device)
        self._calls = 0

    def answers(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> list[Answer]:
        """One answer to each of `prompts` (token ids) with its own `params` and seed.

        An answer depends on its prompt, its seed and the weights, not on what is written beside it (but for the rounding of sums).
        Raises HoneError where the model's logits are not finite.
        """
        self._calls += 1
        self.engine.runner.cache.steps.clear()  # a compiled step may have copies of the weights as they were
        pending = [
            Request(
                f"{self._calls}-{place}", list(prompt), one.model_copy(update={"seed": seed}), salt=str(self._calls)
            )
            for place, (prompt, one, seed) in enumerate(zip(prompts, params, seeds, strict=True))
        ]
        places = {request.id: place for place, request in enumerate(pending)}
        found: list[list[int]] = [[] for _ in pending]
        ended = [False] * len(pending)
        coming, room = iter(pending), self.engine.scheduler.max_num_seqs
        unfinished, running = len(pending), 0
        with _as_it_was(self.model):
            self.model.eval()
            while unfinished:
                while running < room and (request := next(coming, None)) is not None:
                    self.engine.add(request)
                    running += 1
                for output in self.engine.step():
                    place = places[output.request_id]
                    found[place] += output.tokens
                    if output.finish is None:
                        continue
                    if output.finish in ("error", "abort"):
                        raise HoneError(
                            f"an answer could not be written: {output.error}", fix="lower the learning rate"
                        )
                    ended[place] = output.finish == "stop"
                    unfinished, running = unfinished - 1, running - 1
        return [Answer(*one) for one in zip(found, ended)]


@contextmanager
def _as_it_was(model: Decoder) -> Iterator[None]:
    """Afterwards the model trains the parameters that it trained before, and is in the mode in which it was."""
    trained, training = [one for one in model.parameters() if one.requires_grad], model.training
    try:
        yield
    finally:
        model.train(training)
        for one in trained:
            one.requires_grad_(True)


def seed_of(*parts: int | Sequence[int]) -> int:
    """A seed from 0 to 2^62 - 1 for numbers and lists of numbers: alike for alike ones, on every machine."""
    digest = hashlib.blake2b(digest_size=8)
    for one in parts:
        array = np.asarray(one, "<i8").reshape(-1)
        digest.update(np.asarray([len(array)], "<i8").tobytes() + array.tobytes())
    return int.from_bytes(digest.digest(), "little") >> 2
