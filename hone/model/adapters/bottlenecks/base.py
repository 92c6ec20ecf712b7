"""The base of bottleneck adapters: y + s U f(D z) in place of a block's output y, with z that output, its sum with the stream, or the stream.

The three are computed as AdapterHub's library does in pre-norm models, where the stream is that before the block's norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from hone.model.adapters.base import Adapter
from hone.model.linear_spec import ParameterSpec

if TYPE_CHECKING:
    from torch import nn

PLACES = {"mixer": "attention_adapters", "feed_forward": "output_adapters"}
"""AdapterHub's name of the adapters behind a block."""
_INNER = {"down": "adapter_down.0", "up": "adapter_up"}


class Bottleneck(Adapter):
    """Base of their specs."""

    reduction_factor: float = Field(16.0, ge=1, description="The model's width over that of the bottleneck.")
    non_linearity: Literal["relu", "swish", "gelu"] = Field("relu", description="Between the two linears.")
    scaling: float = Field(1.0, gt=0, description="What the second linear's output is multiplied with.")
    adapter_name: str = Field("hone", description="Its name in AdapterHub's folder, and in the names of its tensors.")

    folder_format: ClassVar[str] = "adapterhub"

    blocks: ClassVar[tuple[str, ...]] = ("feed_forward",)
    """The blocks that have one: 'mixer', 'feed_forward'."""
    reads: ClassVar[Literal["output", "sum", "stream"]] = "output"
    """What goes into the bottleneck: the block's output, the stream after it was added, or before the block's norm."""
    first_up: ClassVar[float] = 0.02
    """Standard deviation of the second linear's first weights."""

    def width(self, hidden_size: int) -> int:
        """The bottleneck's."""
        return max(1, int(hidden_size // self.reduction_factor))

    def first_down(self, inputs: int) -> Any:
        """The first linear's initial distribution."""
        return (0.0, 0.02)

    def layer_parameters(self, config: Any) -> tuple[ParameterSpec, ...]:
        hidden, thin = config.hidden_size, self.width(config.hidden_size)
        found: list[ParameterSpec] = []
        for block in self.blocks:
            at, up = f"{block}_adapter", (0.0, self.first_up)
            found += [
                ParameterSpec(f"{at}.down.weight", (thin, hidden), self.first_down(hidden), multiplied=True),
                ParameterSpec(f"{at}.down.bias", (thin,), (0.0, 0.0)),
                ParameterSpec(f"{at}.up.weight", (hidden, thin), up, multiplied=True),
                ParameterSpec(f"{at}.up.bias", (hidden,), (0.0, 0.0)),
            ]
        return tuple(found)

    def layer_modules(self, config: Any) -> dict[str, nn.Module]:
        from hone.model.adapters.bottlenecks.module import BottleneckModule

        hidden = config.hidden_size
        how = {"reads": self.reads, "non_linearity": self.non_linearity, "scaling": self.scaling}
        return {f"{block}_adapter": BottleneckModule(hidden, self.width(hidden), **how) for block in self.blocks}

    def keys(self, config: Any) -> dict[str, str]:
        found = {}
        for index in range(config.num_layers):
            names = config.singles(index)
            for one in self.layer_parameters(config):
                block, inner, leaf = one.name.replace("_adapter", "").split(".")
                place = f"model.layers.{index}.{PLACES[block]}.adapters.{self.adapter_name}"
                found[names[one.name]] = f"{place}.{_INNER[inner]}.{leaf}"
        return found

    def hub_values(self) -> dict[str, Any]:
        """The "config" in AdapterHub's adapter_config.json."""
        return {
            "mh_adapter": "mixer" in self.blocks,
            "output_adapter": "feed_forward" in self.blocks,
            "reduction_factor": self.reduction_factor,
            "non_linearity": self.non_linearity,
            "original_ln_before": self.reads == "sum",
            "original_ln_after": True,
            "residual_before_ln": True,
            "adapter_residual_before_ln": False,
            "ln_before": False,
            "ln_after": False,
            "is_parallel": self.reads == "stream",
            "scaling": self.scaling,
        }
