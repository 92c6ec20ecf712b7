"""(IA)3: one trained factor for each output of keys and values, and for each input of a feed-forward's last linear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from hone.base.errors import SpecError
from hone.model.adapters.base import LinearAdapter
from hone.model.linear_spec import LinearSpec, ParameterSpec, Piece

if TYPE_CHECKING:
    from torch import nn


class IA3(LinearAdapter):
    """y = l (W x + b), or y = W (l x) + b where l is of the inputs; l is 1 at first. Liu et al. 2022, arXiv:2205.05638."""

    paper: ClassVar[str] = "arXiv:2205.05638"
    stored: ClassVar[dict[str, str]] = {"ia3_l": "ia3_l"}
    peft_type: ClassVar[str] = "IA3"

    target_modules: tuple[str, ...] = Field(
        ("k_proj", "v_proj", "down_proj"), description="Checkpoint modules to wrap, as for lora."
    )
    feedforward_modules: tuple[str, ...] = Field(
        ("down_proj",), description="Those of them whose inputs are multiplied, by the end of their names."
    )

    def around(self, modules: Mapping[str, str]) -> IA3:
        """As `Adapter.around`: `feedforward_modules` are pieces. Raises SpecError where the input is that of other modules, too."""
        inputs = [
            piece
            for piece, name in modules.items()
            if any(f".{name}".endswith(f".{end}") for end in self.feedforward_modules)
        ]
        if inputs and len(modules) > 1:
            raise SpecError(
                f"feedforward_modules name {modules[inputs[0]]}, which reads the same input as {len(modules) - 1} other modules",
                fix="name modules with an input of their own, such as down_proj",
            )
        return self.model_copy(update={"feedforward_modules": tuple(inputs)})

    def parameters(self, linear: LinearSpec, pieces: tuple[Piece, ...]) -> tuple[ParameterSpec, ...]:
        return tuple(
            ParameterSpec(
                f"ia3_l_{one.name}",
                (1, linear.in_features) if one.name in self.feedforward_modules else (one.out_features, 1),
                (1.0, 0.0),
            )
            for one in pieces
        )

    def wrap(self, inner: nn.Module, linear: LinearSpec, pieces: tuple[Piece, ...]) -> nn.Module:
        from hone.model.adapters.ia3_linear import IA3Linear

        return IA3Linear(self, inner.requires_grad_(False), linear, pieces)

    def decays(self, name: str) -> bool:
        """Factors are not drawn to zero, where they began as one."""
        return False

    def peft_values(self) -> dict[str, Any]:
        return {}

    def peft_sizes(self, config: Any) -> dict[str, Any]:
        """feedforward_modules by whole names where an end that they share is multiplied in some layers alone."""
        inputs, outputs = set[str](), set[str]()
        for index in range(config.num_layers):
            for path, linear in config.linears(index).items():
                modules = list(config.modules(index, path))
                for adapter, pieces in config.wrappers(index, path, linear):
                    named = dict(zip((one.name for one in linear.pieces), modules)) if len(modules) > 1 else {}
                    for piece in pieces:
                        where = inputs if piece.name in adapter.feedforward_modules else outputs
                        where.add(named.get(piece.name, modules[0]))
        ends = {name.rpartition(".")[2] for name in inputs}
        shared = ends & {name.rpartition(".")[2] for name in outputs}
        if shared:  # PEFT wants feedforward_modules among target_modules
            return {"feedforward_modules": sorted(inputs), "target_modules": sorted(inputs | outputs)}
        return {"feedforward_modules": sorted(ends)}

    @classmethod
    def of_peft(cls, values: Mapping[str, Any]) -> IA3 | None:
        inputs = values.get("feedforward_modules") or ()
        if isinstance(inputs, str):
            raise ValueError(f"feedforward_modules is the expression {inputs!r}, not a list of names")
        return cls.model_validate({"kind": "ia3", "feedforward_modules": tuple(inputs)})
