"""Writes the text of a distillation's steps: a model continues prompts of the data, through the engine of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from hone.feed.load import IGNORE, Batch
from hone.serve.request import SamplingParams
from hone.train.rollouts.generation import Generation, seed_of

if TYPE_CHECKING:
    from torch import Tensor

    from hone.train.passes import Trained

_MOST_SEQS = 256
"""Most sequences that are written at once."""


class Settings(Protocol):
    """What is read of the text's spec."""

    share: float
    prompt_tokens: int
    seed: int

    @property
    def writer(self) -> str: ...

    def turns(self, room: int) -> list[tuple[int, float]]: ...


class Writing:
    """Prepares batches: sequences of the batch that is read, continued after their prompts.

    Every draw follows from the text's seed, the step, the data-parallel rank and the row, so that a resumed training reads the same
    text; there is no state to keep. Every rank writes its own rows.
    """

    def __init__(self, text: Settings) -> None:
        self.text = text
        self.parts: int | None = None
        self.row: dict[str, float] = {}
        self._generation: Generation | None = None

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        pass

    def prepare(self, trained: Trained, batch: Batch) -> Batch:
        """The batch of step `trained.done`, as many positions as `batch`: itself in the steps that read the data."""
        text, step = self.text, trained.done
        if text.share < 1 and seed_of(text.seed, step) >= text.share * 2.0**62:
            return batch
        model = trained.model if text.writer == "student" else trained.teacher
        assert model is not None, "text of a teacher without a teacher"
        size = batch.tokens.shape[1] + 1
        if self._generation is None:
            seqs = min(len(batch.tokens), _MOST_SEQS)
            self._generation = Generation(model, None, max_model_len=size, max_num_seqs=seqs)
        prompts = [
            tokens[:length].tolist() for tokens, length in zip(batch.tokens, prompt_lengths(batch, text.prompt_tokens))
        ]
        seeds = [seed_of(text.seed, step, trained.ranks.data[0], row) for row in range(len(prompts))]
        tokens, targets, ids = (array.copy() for array in batch)
        for row, line in enumerate(self._continued(self._generation, prompts, size, seeds)):
            tokens[row], targets[row], ids[row] = laid_out(line, len(prompts[row]), size, model.config.eos_token_ids)
        return Batch(tokens, targets, ids)

    def _continued(
        self, generation: Generation, prompts: list[list[int]], size: int, seeds: list[int]
    ) -> list[list[int]]:
        """Each prompt and what is written after it: `size` tokens, or fewer that end with an end-of-text token."""
        plans = [self.text.turns(size - len(prompt)) for prompt in prompts]
        lines = [list(prompt) for prompt in prompts]
        open_rows = [row for row, plan in enumerate(plans) if plan]
        while open_rows:
            params = []
            for row in open_rows:
                count, temperature = plans[row].pop(0)
                params.append(SamplingParams(max_tokens=count, temperature=temperature))
            answers = generation.answers([lines[row] for row in open_rows], params, [seeds[row] for row in open_rows])
            for row, answer in zip(open_rows, answers, strict=True):
                lines[row] += answer.tokens
            open_rows = [row for row, answer in zip(open_rows, answers) if plans[row] and not answer.ended]
        return lines


def prompt_lengths(batch: Batch, least: int) -> list[int]:
    """How many tokens of each sequence's first document are its prompt: `least`, or all before the first answer if that is more."""
    first = (batch.document_ids == batch.document_ids[:, :1]).sum(1)  # ids rise: these are the first ones
    answers = np.where((batch.targets != IGNORE).any(1), (batch.targets != IGNORE).argmax(1) + 1, 1)
    return np.minimum(np.maximum(answers, least), np.maximum(first, 1)).tolist()  # type: ignore[no-any-return]


def laid_out(
    line: list[int], prompt: int, size: int, ends: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, targets, document ids) [size - 1] of a line of up to `size` tokens of which the first `prompt` are given: those after
    them are targets, to the first end-of-text token; what comes after that is padding."""
    whole = np.pad(np.asarray(line, np.int64), (0, size - len(line)))
    tokens, targets = whole[:-1].copy(), whole[1:].copy()
    targets[: prompt - 1] = IGNORE
    over = np.flatnonzero(np.isin(line[prompt:], ends))
    end = len(tokens) if not len(over) else prompt + int(over[0])  # the place of the end-of-text token in the line
    targets[end:] = IGNORE
    return tokens, targets, np.where(np.arange(len(tokens)) <= end, 0, -1)
