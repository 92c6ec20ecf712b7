"""The requests of a measured serving run: a pure function of lengths, seed and text."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hone.base.errors import SpecError
from hone.cost.serve.schedule import Traffic
from hone.feed.load import PackedTokens
from hone.model.tokenizer import load_tokenizer, tokenizers_differ
from hone.serve.request import SamplingParams

NUM_SAMPLES, SAMPLE_TOKENS = 4, 64
"""Number of sample texts generated after the measurement, and tokens of each."""

_SAMPLE_PROMPT_TOKENS = 24


@dataclass
class Workload:
    """The requests of a run: a pure function of the stage's spec and the data."""

    prompts: list[list[int]]
    output_tokens: list[int]
    shared_prefix: int
    sample_prompts: list[list[int]]

    def params(self, index: int) -> SamplingParams:
        """Greedy parameters of request `index`, with exactly the planned length."""
        return SamplingParams(max_tokens=self.output_tokens[index], temperature=0, ignore_eos=True)


def make_workload(
    data: Path,
    model: Path,
    *,
    num_requests: int,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    shared_prefix: int,
    seed: int,
) -> Workload:
    """Draws lengths and text positions from `seed`; prompts are pieces of the validation split in the model's tokens.

    Raises SpecError when the split is shorter than a prompt.
    """
    tokens = PackedTokens(data, "val")
    text, starts = np.asarray(tokens.tokens), tokens.starts
    text, starts = _in_model_tokens(text, starts, data, model)
    most = shared_prefix + prompt_tokens[1]
    if len(text) < most:
        raise _too_short(len(text), most)
    drawn = draw_requests(num_requests, prompt_tokens, output_tokens, len(text), seed)
    shared = text[:shared_prefix].tolist()
    prompts = [shared + text[index : index + own].tolist() for own, _, index in drawn]
    lengths = [length for _, length, _ in drawn]
    samples = [text[start : start + _SAMPLE_PROMPT_TOKENS].tolist() for start in starts[:-1][:NUM_SAMPLES]]
    return Workload(prompts, lengths, shared_prefix, samples)


def traffic_of(
    text_tokens: int,
    *,
    num_requests: int,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    shared_prefix: int,
    seed: int,
    concurrency: int,
) -> Traffic:
    """The same requests in numbers, `concurrency` at a time; exact when data and model share a tokenizer, because lengths are
    drawn with the places in a text of `text_tokens`.

    Raises SpecError when the text is shorter than a prompt.
    """
    most = shared_prefix + prompt_tokens[1]
    if text_tokens < most:
        raise _too_short(text_tokens, most)
    drawn = draw_requests(num_requests, prompt_tokens, output_tokens, text_tokens, seed)
    return Traffic(
        prompts=tuple(shared_prefix + own for own, _, _ in drawn),
        outputs=tuple(length for _, length, _ in drawn),
        shared_prefix=shared_prefix,
        concurrency=concurrency,
    )


def _too_short(text_tokens: int, most: int) -> SpecError:
    """The error of a validation split that is shorter than a prompt of `most` tokens."""
    return SpecError(
        f"the validation split has {text_tokens} tokens, prompts take {most}",
        fix="use more data, or lower prompt_tokens or shared_prefix",
    )


def draw_requests(
    num_requests: int, prompt_tokens: tuple[int, int], output_tokens: tuple[int, int], text_tokens: int, seed: int
) -> list[tuple[int, int, int]]:
    """(own prompt tokens, output tokens, position in a text of `text_tokens`) of every request, from `seed`."""
    random = np.random.Generator(np.random.Philox(seed))
    drawn = []
    for _ in range(num_requests):
        own = int(random.integers(prompt_tokens[0], prompt_tokens[1] + 1))
        length = int(random.integers(output_tokens[0], output_tokens[1] + 1))
        drawn.append((own, length, int(random.integers(0, text_tokens - own + 1))))
    return drawn


def _in_model_tokens(text: Any, starts: Any, data: Path, model: Path) -> tuple[Any, Any]:
    """The tokens unchanged if data and model share a tokenizer, else decoded and encoded again."""
    if not tokenizers_differ(data, model):
        return text, starts
    old, new = load_tokenizer(data), load_tokenizer(model)
    pieces: list[list[int]] = []
    for begin, end in pairwise(starts):
        pieces.append(new.encode(old.decode(text[begin:end].tolist()), add_special_tokens=False))
    bounds = np.cumsum([0, *(len(piece) for piece in pieces)])
    return np.array([token for piece in pieces for token in piece], dtype=np.int64), bounds
