"""Text that the student or the teacher writes during the training, after prompts from the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from hone.base.lazy import lazy
from hone.feed.load import IGNORE, Batch
from hone.train.texts.base import Text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hone.model.decoder import Decoder

torch = lazy("torch")
incremental = lazy("hone.model.incremental")


class Sampled(Text):
    """Base of the texts that a model continues."""

    share: float = Field(
        1.0, gt=0, le=1, description="Probability that a step reads such text; the other steps read the data."
    )
    prompt_tokens: int = Field(
        16,
        ge=1,
        description="Tokens of the data that begin each sequence; of conversations all before the first answer, if that is more.",
    )
    sampling_temperature: float = Field(
        1.0, ge=0, description="Temperature at which tokens are drawn; 0: the most likely. The loss has one of its own."
    )
    seed: int = Field(
        0, ge=0, description="Seed of the draws; each depends on it, the step, the sequence and its place."
    )

    def batch_of(self, batch: Batch, step: int, rank: int, *, student: Decoder, teacher: Decoder | None) -> Batch:
        if self.share < 1 and int(self._bits(step)[0]) >= self.share * 2.0**64:
            return batch
        model = student if self.writer == "student" else teacher
        assert model is not None, "text of a teacher without a teacher"
        tokens, targets, ids = (array.copy() for array in batch)
        for length, rows in self._prompts(batch):
            seed = int(self._bits(step, rank, int(rows[0]))[0]) >> 24
            prompts = torch.from_numpy(batch.tokens[rows, :length]).to(model.device)
            written = self.continued(model, prompts, tokens.shape[1] + 1, seed).cpu().numpy()
            for row, line in zip(rows, written, strict=True):
                tokens[row], targets[row], ids[row] = laid_out(line, length, model.config.eos_token_ids)
        return Batch(tokens, targets, ids)

    def continued(self, model: Decoder, prompts: object, size: int, seed: int) -> object:
        """Prompts int64 [R, n] and what `model` writes after them, int64 [R, size]."""
        raise NotImplementedError

    def _bits(self, *numbers: int) -> np.ndarray:
        return np.random.PCG64([self.seed, *numbers]).random_raw(1)  # type: ignore[no-any-return]

    def _prompts(self, batch: Batch) -> Iterator[tuple[int, np.ndarray]]:
        """(length, rows) of prompts of equal length: of each sequence's first document."""
        first = (batch.document_ids == batch.document_ids[:, :1]).sum(1)  # ids rise: these are the first ones
        answers = np.where((batch.targets != IGNORE).any(1), (batch.targets != IGNORE).argmax(1) + 1, 1)
        lengths = np.minimum(np.maximum(answers, self.prompt_tokens), np.maximum(first, 1))
        for length in np.unique(lengths):
            yield int(length), np.flatnonzero(lengths == length)


class StudentText(Sampled):
    """On-policy: the student's own answers, whose mistakes the teacher then corrects. Agarwal et al. 2023 (GKD), arXiv:2306.13649."""

    paper: ClassVar[str] = "arXiv:2306.13649"
    share: float = Field(
        0.5, gt=0, le=1, description="Probability (GKD's lambda) that a step reads such text; the others read the data."
    )

    @property
    def writer(self) -> str:
        return "student"

    def continued(self, model: Decoder, prompts: object, size: int, seed: int) -> object:
        how = {"temperature": self.sampling_temperature, "seed": seed}
        return incremental.generate(model, prompts, size - prompts.shape[1], **how)  # type: ignore[attr-defined]


class TeacherText(Sampled):
    """Data-free: text of the teacher, some tokens the most likely ones, the rest drawn. Liu et al. 2023 (LLM-QAT), arXiv:2305.17888."""

    paper: ClassVar[str] = "arXiv:2305.17888"
    prompt_tokens: int = Field(1, ge=1, description="Tokens of the data that begin each sequence.")
    greedy_tokens: int = Field(
        4, ge=0, description="Tokens after those that are the most likely ones; the paper has 3 to 5."
    )

    @property
    def writer(self) -> str:
        return "teacher"

    def continued(self, model: Decoder, prompts: object, size: int, seed: int) -> object:
        sure = min(self.greedy_tokens, size - prompts.shape[1])  # type: ignore[attr-defined]
        text = incremental.generate(model, prompts, sure) if sure > 0 else prompts
        how = {"temperature": self.sampling_temperature, "seed": seed}
        return incremental.generate(model, text, size - text.shape[1], **how)


def laid_out(line: np.ndarray, prompt: int, ends: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, targets, document ids) [S] of a line of S + 1 tokens of which the first `prompt` are given: those after them are
    targets, to the first end-of-text token; what comes after that is padding."""
    tokens, targets = line[:-1].copy(), line[1:].copy()
    targets[: prompt - 1] = IGNORE
    over = np.flatnonzero(np.isin(line[prompt:], ends))
    end = len(tokens) if not len(over) else prompt + int(over[0])  # the place of the end-of-text token in the line
    targets[end:] = IGNORE
    ids = np.where(np.arange(len(tokens)) <= end, 0, -1)
    return tokens, targets, ids
