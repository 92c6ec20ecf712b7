"""A bigram model of a data artifact's train split: what a language model must at least beat on held-out text."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hone.feed.load import PackedTokens

DISCOUNT = 0.75
"""Taken off every count, as is usual."""
MOST = 1 << 22
"""Tokens of the train split that are counted at most: 32 MiB of pairs."""


class Bigram:
    """Interpolated Kneser-Ney, Kneser and Ney 1995, "Improved backing-off for m-gram language modeling".

    P(b | a) = (max(c(a b) - D, 0) + D N(a .) P(b)) / c(a), where c counts occurrences and N distinct pairs. P(b) is the share
    of distinct pairs that end with b, discounted likewise in favor of the uniform distribution over `vocab_size` tokens, so
    that no token has probability 0.
    """

    def __init__(self, tokens: np.ndarray, vocab_size: int) -> None:
        """Counts the pairs in `tokens` (int [N])."""
        tokens = np.asarray(tokens, np.int64)
        self.vocab_size = vocab_size
        self._pairs, self._counts = np.unique(tokens[:-1] * vocab_size + tokens[1:], return_counts=True)
        self._before = np.bincount(tokens[:-1], minlength=vocab_size)
        self._distinct = np.bincount(self._pairs // vocab_size, minlength=vocab_size)
        ends = np.bincount(self._pairs % vocab_size, minlength=vocab_size)
        left = DISCOUNT * np.count_nonzero(ends) / vocab_size
        self._alone = (np.maximum(ends - DISCOUNT, 0) + left) / max(len(self._pairs), 1)

    def loss(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Nats of each token of `after` (int [N]) behind that of `before` (int [N])."""
        before, after = np.asarray(before, np.int64), np.asarray(after, np.int64)
        pairs, alone = before * self.vocab_size + after, self._alone[after]
        places = np.searchsorted(self._pairs, pairs).clip(0, len(self._pairs) - 1)
        counts = np.where(self._pairs[places] == pairs, self._counts[places], 0)
        of, distinct = self._before[before], self._distinct[before]
        seen = (np.maximum(counts - DISCOUNT, 0) + DISCOUNT * distinct * alone) / np.maximum(of, 1)
        return -np.log(np.where(of > 0, seen, alone))


def bigram_perplexity(data: Path, split: str, tokens: np.ndarray, scored: np.ndarray) -> tuple[float | None, str]:
    """(perplexity, note) of a bigram model of the train split on the `scored` (bool [N]) ones of `tokens`, which are from `split`.

    None, with the reason as note, where the train split is missing or is the text itself.
    """
    if split == "train":
        return None, "the text is the train split itself"
    packed = PackedTokens(data, split)
    if "train" not in packed.meta["splits"] or packed.meta["splits"]["train"]["tokens"] < 2:
        return None, "the data has no train split"
    train = PackedTokens(data, "train").tokens
    model = Bigram(train[:MOST], packed.vocab_size)
    after = np.flatnonzero(scored)
    counted = min(len(train), MOST)
    note = f"interpolated Kneser-Ney, discount {DISCOUNT}, of {counted:,} tokens of train; on the same tokens as perplexity"
    return float(np.exp(model.loss(tokens[after - 1], tokens[after]).mean())), note
