"""Scan with a decay a key channel (gated linear attention, arXiv:2312.06635): the passes of `hone.ops.scan.triton_kernels` for it.

The weight exp(c_s - c_t) of a pair differs in every channel, so it must be multiplied into queries and keys before their
product, and exp(-c_t) alone may overflow. Every pair of a chunk is split where the larger power-of-two block between them
has its middle: exp(c_s - c_mid) exp(c_mid - c_t), both factors at most 1 whatever the decays. A chunk of 2^n tokens takes n
masked products, one a block size. (The paper's cut, blocks of 16 and pairs one by one within, needs no fewer operations.)

All that no state enters is done first, every chunk on its own and all at once: the pairs' weights within chunks, queries
weighted by what their chunk's incoming state has lost, keys by what they lose until its end. What goes through the chunks
in order is then three products a chunk.

The gradient of a log decay sums q * dq - k * dk over all later tokens: every pair of two later ones adds two terms that
cancel. They do so only if both are made of the same rounded factors; else what remains of thousands of them outweighs the
few pairs across the token (0.3 of the gradient, where decays are strong).
"""

from hone.ops.scan.triton_channel_passes import backward, forward

__all__ = ["backward", "forward"]
