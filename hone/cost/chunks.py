"""The tokens whose logits a loss computes at once: the rule that the losses follow and their memory is estimated by."""

from __future__ import annotations

VOCABULARY_CHUNK = 1024
"""Of a pass on a CPU whose ranks have parts of the vocabulary each."""


def kernel_chunk_tokens(num_tokens: int) -> int:
    """Tokens whose logits exist at once on a GPU: an eighth of all, in whole tiles, 1024 to 4096."""
    return max(1024, min(4096, -(-num_tokens // (8 * 256)) * 256))


def default_chunk_tokens(device_type: str, vocab_size: int) -> int:
    """Tokens whose logits exist at once: as many as fit a CPU's cache (4 MiB) or occupy a GPU (256 MiB and more)."""
    if device_type == "cpu":
        return max(64, (1 << 20) // vocab_size)
    return max(1024, (1 << 27) // vocab_size // 256 * 256)  # whole tiles of the products


def loss_chunk(num_tokens: int, vocab_size: int, device: str, *, divided: bool) -> int:
    """Of a pass of `num_tokens`; `divided`: ranks have parts of the vocabulary."""
    if device.startswith("cuda"):
        return kernel_chunk_tokens(num_tokens)
    return VOCABULARY_CHUNK if divided else default_chunk_tokens("cpu", max(vocab_size, 1))
