"""Perplexity of a model on a text: exp of the mean loss in nats per token, with a stated window and stride."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hone.base.errors import SpecError
from hone.eval.score import score
from hone.eval.windows import Join
from hone.model.decoder import Decoder


def perplexity(
    decoder: Decoder,
    tokens: Sequence[int] | np.ndarray,
    starts: np.ndarray | None = None,
    *,
    window: int | None = None,
    stride: int | None = None,
    join: Join = "documents",
) -> float:
    """Perplexity of `decoder` on `tokens` (int [N]; documents begin at `starts`, default: a single document).

    Windows of `window` tokens (default: the model's context, at most the text) begin every `stride` (default: `window`) tokens;
    every token but the first of a document is scored once. Raises SpecError when no token can be scored.
    """
    tokens = np.asarray(tokens)
    if len(tokens) < 2:
        raise SpecError(f"a text of {len(tokens)} tokens has nothing to predict", fix="give at least two tokens")
    window = window or min(decoder.config.max_seq_len, len(tokens))
    return score(decoder, tokens, starts, window=window, stride=stride, join=join).perplexity
