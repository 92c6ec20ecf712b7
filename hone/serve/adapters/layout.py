"""Where the factors of every linear lie in a slot: one row of numbers a slot, so that an adapter comes by one copy. Never imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from hone.model.config import ModelConfig

_ROUND = 16
"""Ranks of a slot are a multiple: a tensor core's product has at least so many columns."""
_MIXERS, _FEED_FORWARDS = {"attention"}, {"swiglu", "geglu"}
"""Blocks that use their linears in plain products, which adapters may be added to."""


@dataclass(frozen=True)
class SlotLinear:
    """The place of one linear's factors: A [P R, K] from `down` on, s B [N, R] from `up` on."""

    layer: int
    path: str
    """Below its layer: 'mixer.qkv'."""
    index: int
    """Its row in the table of ranks."""
    in_features: int
    modules: dict[str, int]
    """The checkpoint modules that hold its rows, each with their number: its pieces."""
    down: int
    up: int
    row: int
    """Its first row in the table of output features, where these are scaled (DoRA, (IA)3)."""
    column: int
    """Its first column in the table of input features."""

    @property
    def out_features(self) -> int:
        return sum(self.modules.values())

    def begin(self, module: str) -> tuple[int, int]:
        """The place of a module among the pieces, and its first row."""
        place = list(self.modules).index(module)
        return place, [0, *accumulate(self.modules.values())][place]


@dataclass(frozen=True)
class SlotLayout:
    """All linears that adapters may change. `rank`: the numbers of ranks that a slot has room for, per module."""

    rank: int
    linears: tuple[SlotLinear, ...]
    size: int
    """Numbers of a slot."""
    num_rows: int
    num_columns: int

    @classmethod
    def of(cls, config: ModelConfig, max_lora_rank: int) -> SlotLayout:
        """That of a model: of attention, and of feed-forwards without experts."""
        rank = -(-max_lora_rank // _ROUND) * _ROUND
        found: list[SlotLinear] = []
        size = row = column = 0
        for layer, spec in enumerate(config.layers):
            kinds = {"mixer": spec.mixer.kind in _MIXERS, "feed_forward": spec.feed_forward.kind in _FEED_FORWARDS}
            for path, linear in config.linears(layer).items():
                if not kinds[path.partition(".")[0]]:
                    continue
                modules = config.modules(layer, path)
                down, up = size, size + len(modules) * rank * linear.in_features
                size = up + linear.out_features * rank
                found.append(SlotLinear(layer, path, len(found), linear.in_features, modules, down, up, row, column))
                row, column = row + linear.out_features, column + linear.in_features
        return cls(rank, tuple(found), size, row, column)

    @property
    def most_pieces(self) -> int:
        """Pieces of the linear that has most."""
        return max((len(one.modules) for one in self.linears), default=1)

    def find(self, layer: int, path: str) -> SlotLinear | None:
        """The linear at `path` of `layer`; None where no adapter may change it."""
        return next((one for one in self.linears if (one.layer, one.path) == (layer, path)), None)
