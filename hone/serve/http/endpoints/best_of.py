"""Completions of which the best are returned: `best_of` generates more than `n`, and ranks them by log-probability."""

from __future__ import annotations

from typing import Any

from hone.serve.http.replies import CompletionReply, ReplyChoice


def mean_logprob(choice: ReplyChoice) -> float:
    """Mean log-probability of its tokens; that of a text without tokens is the lowest."""
    return sum(one.logprob for one in choice.logprobs) / len(choice.logprobs) if choice.logprobs else float("-inf")


class BestOfReply(CompletionReply):
    """/v1/completions with best_of: of each prompt's copies the `n` of the highest mean log-probability, best first."""

    def whole(self) -> dict[str, Any]:
        value = super().whole()
        kept = self._body.n or 1
        chosen: list[dict[str, Any]] = []
        for first in range(0, len(self.choices), self._n):
            group = range(first, first + self._n)
            best = sorted(group, key=lambda index: -mean_logprob(self.choices[index]))[:kept]
            chosen += [{**value["choices"][index], "index": len(chosen) + rank} for rank, index in enumerate(best)]
        return {**value, "choices": chosen}
