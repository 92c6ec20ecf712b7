"""The module of a bottleneck adapter.

Legend: D the model's width, c that of the bottleneck.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

_NONLINEAR = {"relu": F.relu, "swish": F.silu, "gelu": F.gelu}


class BottleneckModule(nn.Module):
    """Two linears, D to c and c to D, with biases."""

    def __init__(self, hidden_size: int, width: int, *, reads: str, non_linearity: str, scaling: float) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(hidden_size, width), nn.Linear(width, hidden_size)
        self.reads, self.scaling, self._f = reads, scaling, _NONLINEAR[non_linearity]

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        """The block's output y [..., D] with the adapter's; x [..., D] is the stream before the block. In y's dtype."""
        z = {"output": y, "stream": x}.get(self.reads)
        z = x + y if z is None else z
        down = F.linear(z, self.down.weight.to(z.dtype), self.down.bias.to(z.dtype))
        added = F.linear(self._f(down), self.up.weight.to(z.dtype), self.up.bias.to(z.dtype))
        return y + (added if self.scaling == 1.0 else added * self.scaling)
