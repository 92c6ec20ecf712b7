"""Which steps of a GPU are replays of a CUDA graph: the sizes that one graph serves, and up to which size launches cost time."""

from __future__ import annotations

MIXED_TOKENS = 8192
"""Most tokens of a captured step with prompts."""

_LAUNCH_S, _FLOPS = 1.2e-3, 5e14
"""Seconds to launch a layer out of Python, and products a second of a GPU: from them, how long steps and their launches take."""

_MOST_TIMES = 4
"""A step that takes this many times longer than its launch needs none either way: the step before it may be shorter."""


_ROUNDS_S, _BYTES_S, _LAYER_S = 6e-3, 3e12, 2e-5
"""Seconds of rounds of speculation before the host reads; bytes a second that a GPU reads, and seconds of a layer of few tokens."""


def rounds_ahead(num_layers: int, active_params: float) -> int:
    """Rounds of speculation of a model of bfloat16 that a GPU runs before the host reads: so many that the host's part is small, 1 at least."""
    return max(1, min(32, int(_ROUNDS_S / (2 * active_params / _BYTES_S + _LAYER_S * num_layers))))


def padded_tokens(num_tokens: int) -> int:
    """The tokens of the graph that serves a mixed step of `num_tokens`: a multiple of 64, or of a sixteenth of a power of 2."""
    above = 1 << (num_tokens - 1).bit_length()
    step = max(64, above // 16)
    return -(-num_tokens // step) * step


def most_mixed(num_layers: int, active_params: float, most: int = MIXED_TOKENS) -> int:
    """Tokens up to which launching a mixed step out of Python may make the device wait, so that it is captured when it comes again."""
    return min(most, int(_MOST_TIMES * _LAUNCH_S * num_layers * _FLOPS / (2 * active_params)))
