"""What mixers and feed-forwards have in common: a spec that declares its weights, and a module that is built from it."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import nn

from hone.base.errors import SpecError
from hone.base.table import Technique
from hone.model.linear import MakeLinear
from hone.model.linear_spec import LinearSpec, NormSpec, Parameter
from hone.model.norm import rms_norm_of


class Placement(NamedTuple):
    """The place of a mixer or feed-forward in its decoder, and the function that makes its linears."""

    hidden_size: int
    layer: int
    """Index of its layer, under which a cache stores its state."""
    name: str
    """Its dotted path in the decoder: 'layers.3.mixer'."""
    norm_eps: float
    make: MakeLinear
    norm_offset: float = 0.0
    """Added to the weight of every norm."""


class BlockSpec(Technique):
    """Base of the specs of mixers and feed-forwards."""

    splits: ClassVar[tuple[str, ...]] = ()
    """Fields that are divided by the number of tensor-parallel ranks ('num_heads'); empty: it cannot be split."""
    reads_once: ClassVar[bool] = False
    """Whether its module uses its input in one product alone, and its output is that of another one: transfers of tokens between
    ranks may then be made inside these two."""
    sums_once: ClassVar[bool] = False
    """Whether tensor-parallel ranks sum its module's output, which is linear in those of its row-parallel linears, and not each of these."""

    def linears(self, hidden_size: int) -> tuple[LinearSpec, ...]:
        """Its linears in the order in which they are built and stored; names and pieces are unique within the block."""
        raise NotImplementedError

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        """Its norms, and other parameters outside its linears."""
        return ()

    def build(self, place: Placement) -> Block:
        """The module."""
        raise NotImplementedError

    def num_params(self, hidden_size: int) -> int:
        """Number of parameters of the module."""
        return sum(part.num_params for part in (*self.linears(hidden_size), *self.parameters(hidden_size)))

    def local(self, num_ranks: int) -> Self:
        """The spec of one of `num_ranks` tensor-parallel ranks: of its heads, or of its part of the inner width.

        Its linears are those of this spec after `LinearSpec.local`; the sum of all ranks' outputs is this block's
        output. Key heads are replicated where there are fewer than ranks. Raises SpecError when the sizes do not
        divide.
        """
        if num_ranks == 1:
            return self
        if not self.splits:
            raise SpecError(
                f"'{self.kind}' cannot be split over {num_ranks} tensor-parallel ranks: its heads are not alike",
                fix="set tensor_parallel_size=1, or take another technique for this slot",
            )
        found = {}
        for name in self.splits:
            value = getattr(self, name)
            if name == "num_kv_heads" and value < num_ranks and num_ranks % value == 0:
                found[name] = 1
                continue
            if value % num_ranks:
                raise SpecError(
                    f"{self.kind}.{name} {value} cannot be divided among {num_ranks} tensor-parallel ranks",
                    fix=f"set tensor_parallel_size to a divisor of {value}",
                )
            found[name] = value // num_ranks
        return self.model_copy(update=found)


class Block(nn.Module):
    """Base of their modules: every linear and parameter of the spec is an attribute of that name."""

    def __init__(self, spec: Any, place: Placement) -> None:
        super().__init__()
        self.spec = spec
        self.layer = place.layer
        self.rows: dict[str, list[int]] = {}  # of each linear, its pieces' counts
        for linear in spec.linears(place.hidden_size):
            self.rows[linear.name] = list(linear.parts.values())
            setattr(self, linear.name, place.make(f"{place.name}.{linear.name}", linear))
        for part in spec.parameters(place.hidden_size):
            norm = isinstance(part, NormSpec)
            made = (
                rms_norm_of(part.size, place.norm_eps if part.eps is None else part.eps, place.norm_offset)
                if norm
                else nn.Parameter(torch.empty(part.shape), requires_grad=part.trained)
            )
            setattr(self, part.name, made)
