"""Log-probabilities of chosen tokens and of the most likely ones, without a copy of the logits.

Legend: E entries, V vocabulary, C blocks of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.dispatch import backend_of

MOST_TOP = 32
"""The most alternatives of an entry that the kernel finds."""


def token_logprobs(
    logits: Tensor, tokens: Tensor, top: int = 0, *, backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability of tokens[e] float32 [E], those of the `top` most likely tokens float32 [E, top], their ids int64).

    logits [E, V] in float32, bfloat16 or float16, tokens int64 [E]; `top` up to 32. Alternatives are in falling order, of
    equal ones the kernel takes the first token first. A token has the same value in both places: the most likely token's
    is exactly the first alternative's. Beside its outputs the kernel needs 12 * top + 8 bytes an entry and 4096 tokens of
    vocabulary. Reads nothing on the host. Raises SpecError for what does not fit.
    """
    if logits.dim() != 2 or tokens.shape != logits.shape[:1] or tokens.dtype != torch.int64:
        raise SpecError(
            f"logits {tuple(logits.shape)} and tokens {tokens.dtype} {tuple(tokens.shape)} do not fit together",
            fix="give logits [E, V] and tokens int64 [E]",
        )
    if not 0 <= top <= min(MOST_TOP, logits.shape[1]):
        most = min(MOST_TOP, logits.shape[1])
        raise SpecError(f"top is {top}", fix=f"give the number of alternatives, 0 to {most}")
    if backend_of("token_logprobs", logits.device, backend, dtype=logits.dtype) == "triton":
        from hone.ops.sample.triton_tables import launch_logprobs

        return launch_logprobs(logits, tokens, top)
    values = logits.float()
    normalizer = values.logsumexp(-1, keepdim=True)
    best = values.topk(top)
    return (values.gather(-1, tokens[:, None]) - normalizer).squeeze(-1), best.values - normalizer, best.indices
