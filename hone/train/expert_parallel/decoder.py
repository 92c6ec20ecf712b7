"""The decoder of one expert-parallel rank in training: its experts of every layer, cut from whole weights, and all other weights whole.

The modules are those of the whole model, but that linears of experts have this rank's alone; a layer with experts gets the exchange
that brings rows to the ranks of their experts and back (`hone.parallel.experts`). Lepikhin et al. 2020, arXiv:2006.16668 (GShard).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from hone.base.errors import SpecError
from hone.model.config import ModelConfig
from hone.model.decoder import Decoder
from hone.model.linear import make_dense
from hone.model.linear_spec import LinearSpec
from hone.parallel.axis import Axis
from hone.parallel.experts import ExpertExchange
from hone.train.tensor_parallel.parts import PartDecoder
from hone.train.tensor_parallel.stacks import expert_cuts, stacks


class ExpertParallelDecoder(PartDecoder):
    """Rank `axis.index` of a decoder whose weights `whole` has (float32); they are copied. Its experts' rows travel by `exchange`.

    `cuts` are the stacks of experts, of which a rank has E / n neighbours. Routers know all experts, so all ranks decide as one
    process does; a step of an optimizer on a stack is of each expert alone, so that none needs the whole of it.
    """

    def __init__(self, whole: Decoder, axis: Axis, exchange: ExpertExchange) -> None:
        check_expert_parallel(whole.config, axis.size)
        super().__init__(whole, whole.config, axis, _maker(axis.size))
        self.take(whole, expert_cuts(whole.config, axis.index, axis.size))
        exchange_rows(self, exchange)


def exchange_rows(model: Decoder, exchange: ExpertExchange) -> None:
    """Has the layers of `model`, which have some of the experts, exchange their rows by `exchange`."""
    for layer in model.layers:
        if getattr(layer.feed_forward, "routed", False):
            layer.feed_forward.exchange = exchange


def check_expert_parallel(config: ModelConfig, degree: int) -> None:
    """Raises SpecError where the experts of `config` cannot be divided among `degree` ranks."""
    if degree == 1:
        return
    divided = stacks(config)
    if not divided:
        raise SpecError(
            f"expert_parallel_degree {degree} divides experts, and no layer has any",
            fix="set parallelism.expert_parallel_degree to 1, or take a feed_forward with experts: moe",
        )
    for name, linear in divided.items():
        if linear.experts % degree:  # type: ignore[operator]
            raise SpecError(
                f"{name} has {linear.experts} experts, which {degree} expert-parallel ranks do not divide evenly",
                fix=f"set parallelism.expert_parallel_degree to a divisor of {linear.experts}",
            )


def _maker(num_ranks: int) -> Callable[[str, LinearSpec], Any]:
    def made(name: str, spec: LinearSpec) -> nn.Module:
        return make_dense(name, spec if spec.experts is None else replace(spec, experts=spec.experts // num_ranks))

    return made
