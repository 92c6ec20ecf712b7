"""What a number of context-parallel ranks can share: sequences in chunks, and heads. Never imports torch."""

from __future__ import annotations

from hone.base.errors import SpecError


def chunk_size(seq_len: int, num_ranks: int, zigzag: bool) -> int:
    """Tokens of a chunk: each rank holds two chunks (zigzag) or one. Raises SpecError for a length that does not divide."""
    chunks = 2 * num_ranks if zigzag else num_ranks
    if seq_len % chunks:
        raise SpecError(
            f"a sequence of {seq_len} tokens is not divisible into {chunks} chunks for {num_ranks} context-parallel ranks",
            fix=f"set seq_len to a multiple of {chunks}",
        )
    return seq_len // chunks


def check_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    """Raises SpecError when `num_ranks` ranks cannot share the heads (Ulysses)."""
    if num_heads % num_ranks:
        raise SpecError(
            f"ulysses cannot divide {num_heads} query heads among {num_ranks} context-parallel ranks",
            fix=f"set context_parallel_degree to a divisor of {num_heads}, or take ring or all_gather",
        )
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        raise SpecError(
            f"ulysses cannot divide {num_kv_heads} key heads among {num_ranks} context-parallel ranks, nor copy each to "
            "equally many",
            fix=f"set context_parallel_degree to a divisor or a multiple of {num_kv_heads}, or take ring or all_gather",
        )
