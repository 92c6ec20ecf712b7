"""Reward by a reward model, such as one that objective reward trained."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from hone.base.errors import SpecError
from hone.train.rollouts.rewards.base import Reward

_TOKENS = 16_384
"""Tokens of rows, padding included, that are scored at once."""


class RewardModel(Reward):
    """The score that a reward model gives the prompt and the completion, token by token as they were written."""

    reads_tokens: ClassVar[bool] = True
    model: str = Field("", description="Folder of a reward model with the tokenizer of the data.")

    def check(self) -> None:
        if not self.model or not (Path(self.model) / "config.json").is_file():
            raise SpecError(
                f"reward reward_model.model is {self.model!r}, which is no folder of a model",
                fix="train one on pairs with objective: reward, or give a folder of a sequence classifier with one label",
            )
        if not self._facts.config.num_labels:
            raise SpecError(
                f"{self.model} is a language model, which gives no scores",
                fix="train a reward model of it, on pairs with objective: reward, and give that folder",
            )

    def check_tokenizer(self, tokenizer: str | None, where: str) -> None:
        own = self._facts.tokenizer
        if None not in (own, tokenizer) and own != tokenizer:
            raise SpecError(
                f"the tokenizers of {self.model} and {where} tokenize differently",
                fix="give a reward model that was trained with the data's tokenizer",
            )

    def token_scores(self, rows: Sequence[Sequence[int]], device: Any) -> list[float]:
        import numpy as np
        import torch

        from hone.feed.load import IGNORE, Batch
        from hone.train.passes import to_device

        model = _loaded(self.model, str(device))
        order = sorted(range(len(rows)), key=lambda at: len(rows[at]))
        found = [0.0] * len(rows)
        while order:
            longest = len(rows[order[-1]])
            some = [order.pop() for _ in range(min(max(_TOKENS // longest, 1), len(order)))]
            tokens, ids = np.zeros((len(some), longest), np.int64), np.full((len(some), longest), -1, np.int32)
            for place, at in enumerate(some):
                tokens[place, : len(rows[at])], ids[place, : len(rows[at])] = rows[at], 0
            with torch.no_grad():
                given, _, context = to_device(Batch(tokens, np.full_like(tokens, IGNORE), ids), torch.device(device))
                context.tokens = given
                last = torch.tensor([len(rows[at]) - 1 for at in some], device=given.device)
                x = model.hidden(given, context)[torch.arange(len(some), device=given.device), last]
                scores = model.head(x)[:, 0].float().tolist()
            for at, score in zip(some, scores, strict=True):
                found[at] = score
        return found

    @property
    def _facts(self) -> Any:
        from hone.model.facts import CheckpointFacts

        return CheckpointFacts.of(Path(self.model))


@lru_cache(maxsize=2)
def _loaded(folder: str, device: str) -> Any:
    """The model of `folder`, on `device`, which is kept for the steps to come."""
    from hone.model.hf import load

    return load(folder, device, scores=True).eval().requires_grad_(False)
