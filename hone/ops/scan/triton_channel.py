"""Scan with one decay per key channel (gated linear attention, arXiv:2312.06635): its passes of `hone.ops.scan.triton_kernels`.

The weight exp(c_s - c_t) of a pair differs in every channel, so it must be multiplied into queries and keys before their
product, and exp(-c_t) alone may overflow. Every pair of a chunk is split at the middle of the smallest aligned power-of-two
block that contains both: exp(c_s - c_mid) exp(c_mid - c_t), both factors at most 1 for any decays. A chunk of 2^n tokens
takes n masked products, one per block size. (The paper's split, blocks of 16 with single pairs inside, needs as many
operations.)

Everything that needs no state is computed first, for all chunks at once: the pairs' weights within chunks, queries weighted
by the decay since their chunk's start, keys by the decay until its end. Three products per chunk remain that run through
the chunks in order.

The gradient of a log decay sums q * dq - k * dk over all later tokens: every pair of two later ones adds two terms that
cancel. They cancel only if both are computed from the same rounded factors; otherwise the rest of thousands of them exceeds
the few pairs across the token (0.3 of the gradient, where decays are strong).
"""

from hone.ops.scan.triton_channel_passes import backward, forward

__all__ = ["backward", "forward"]
