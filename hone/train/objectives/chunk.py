"""The tokens whose logits a loss computes at once, for estimates."""

from __future__ import annotations


def loss_chunk(num_tokens: int, vocab_size: int, device: str, *, divided: bool) -> int:
    """Of a pass of `num_tokens`; `divided`: ranks have parts of the vocabulary."""
    if device.startswith("cuda"):
        from hone.ops.loss.api import kernel_chunk_tokens

        return kernel_chunk_tokens(num_tokens)
    if divided:
        from hone.parallel.vocabulary import CHUNK_TOKENS

        return CHUNK_TOKENS
    from hone.ops.loss.reference import default_chunk_tokens

    return default_chunk_tokens("cpu", max(vocab_size, 1))
