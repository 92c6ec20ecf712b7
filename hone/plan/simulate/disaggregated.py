"""Serving taken apart: prefill and decode on machines of their own, or weights on memory nodes; the links at which that pays."""

from __future__ import annotations

from dataclasses import dataclass

from hone.base.errors import SpecError
from hone.cost.dims import ModelDims


def tokens_per_fetch(width: float, flops_per_s: float, link_bytes_per_s: float) -> float:
    """Tokens that a layer must compute for each fetch of its weights, so that the fetch of the next layer is hidden behind them.

    A weight of `width` bytes travels in width / link seconds and takes 2 FLOP a token: width x peak / (2 x link).
    """
    _positive(width=width, flops_per_s=flops_per_s, link_bytes_per_s=link_bytes_per_s)
    return width * flops_per_s / (2.0 * link_bytes_per_s)


def fetch_link(width: float, flops_per_s: float, tokens: float) -> float:
    """Bytes/s of the link at which weights fetched for `tokens` tokens are just hidden: the break-even of `tokens_per_fetch`."""
    _positive(width=width, flops_per_s=flops_per_s, tokens=tokens)
    return width * flops_per_s / (2.0 * tokens)


def remote_weights_slowdown(width: float, flops_per_s: float, link_bytes_per_s: float, tokens: float) -> float:
    """How many times longer a pass of `tokens` tokens takes where every layer comes from a memory node while the one before computes."""
    _positive(tokens=tokens)
    return max(1.0, tokens_per_fetch(width, flops_per_s, link_bytes_per_s) / tokens)


@dataclass(frozen=True)
class Disaggregated:
    """`prefill` and `decode` machines. Rates are requests/s of one machine that does nothing else."""

    prefill: int
    decode: int
    prefill_rate: float
    decode_rate: float

    def rate(self, link_rate: float = float("inf")) -> float:
        """Requests/s of all: the slower side, or the transfers of `link_rate` requests/s that a prefill machine's link carries."""
        return min(self.prefill * min(self.prefill_rate, link_rate), self.decode * self.decode_rate)


def best_split(
    machines: int, prefill_rate: float, decode_rate: float, link_rate: float = float("inf")
) -> Disaggregated:
    """The split of `machines` with the highest rate; of equal ones that with the most decode machines. Raises SpecError below two."""
    _positive(prefill_rate=prefill_rate, decode_rate=decode_rate, link_rate=link_rate)
    if machines < 2:
        raise SpecError(f"{machines} machines cannot be divided into prefill and decode", fix="give at least two")
    splits = [Disaggregated(count, machines - count, prefill_rate, decode_rate) for count in range(1, machines)]
    return max(splits, key=lambda one: one.rate(link_rate))


def cache_bytes(dims: ModelDims, prompt_tokens: int, width: float) -> float:
    """Bytes of keys and values that travel from a prefill machine to a decode machine for one prompt."""
    return width * dims.state_values(prompt_tokens)


def prefill_link(dims: ModelDims, prompt_tokens: int, prefill_s: float, width: float) -> float:
    """Bytes/s at which a prompt's keys and values, sent layer by layer, arrive no later than its prefill of `prefill_s` ends.

    The last layer's always arrive after it: that is left out, 1 of num_layers parts.
    """
    _positive(prefill_s=prefill_s, width=width)
    return cache_bytes(dims, prompt_tokens, width) / prefill_s


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise SpecError(f"{name} is {value}", fix="give a number above 0")
