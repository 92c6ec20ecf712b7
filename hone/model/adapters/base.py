"""Specs of adapters: what they add to a model, and those that wrap the linears chosen by `target_modules`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, field_validator

from hone.base.errors import SpecError
from hone.base.table import Technique
from hone.model.adapters.own_weights import OwnWeight
from hone.model.linear_spec import LinearSpec, ParameterSpec, Piece

if TYPE_CHECKING:
    from torch import Tensor, nn

_EXPRESSION = re.compile(r"[\\*+?()\[\]{}|^$]")
"""What tells a regular expression from the end of a name."""

Wrappers = list[tuple["LinearAdapter", tuple[Piece, ...]]]
"""Adapters of one linear, the first innermost, each with the pieces it wraps: those that are checkpoint modules of their
own, or one piece of all rows where one module holds them."""


class Adapter(Technique):
    """Base of every adapter's spec: what it adds to a model, and how a PEFT folder stores it."""

    folder_format: ClassVar[str] = "peft"
    """Whose folders hold it: PEFT's or AdapterHub's."""
    peft_type: ClassVar[str] = ""
    """Its peft_type in adapter_config.json; '': PEFT has no such adapter."""

    def check(self, config: Any) -> None:
        """Raises ValueError where the model of `config`, which has this adapter alone, has no place for it."""

    def prompt_parameters(self, config: Any) -> tuple[ParameterSpec, ...]:
        """The parameters of the prompt that it puts before the tokens of the model of `config`; none: it has no prompt."""
        return ()

    def layer_parameters(self, config: Any) -> tuple[ParameterSpec, ...]:
        """The parameters of the modules that it adds to every layer of the model of `config`, by their path in the layer."""
        return ()

    def layer_modules(self, config: Any) -> dict[str, nn.Module]:
        """These modules by their attribute of a layer: mixer_adapter, feed_forward_adapter."""
        return {}

    def own_weights(self, config: Any) -> list[OwnWeight]:
        """The weights of the model itself that are trained with it."""
        return []

    def token_rows(self, config: Any) -> tuple[int, ...]:
        """The tokens whose rows of the embedding are trained."""
        return ()

    def keys(self, config: Any) -> dict[str, str]:
        """The key in a folder of each tensor that is not around a linear, by its name in hone's checkpoints."""
        return {}

    def lr_factor(self, name: str) -> float:
        """What the learning rate of its parameter `name` is multiplied with."""
        return 1.0

    def decays(self, name: str) -> bool:
        """Whether weight decay draws its parameter `name` to zero."""
        return True

    def exported(self, tensors: Mapping[str, Tensor]) -> tuple[Adapter, dict[str, Tensor]]:
        """What a PEFT folder holds of it when its training has ended, and its tensors by key, of the `tensors` of its parameters."""
        return self, dict(tensors)

    def peft_values(self) -> dict[str, Any]:
        """Its keys in adapter_config.json, beside those of every PEFT folder."""
        raise NotImplementedError

    def peft_sizes(self, config: Any) -> dict[str, Any]:
        """Keys in adapter_config.json that repeat sizes of the model of `config`."""
        return {}

    @classmethod
    def of_peft(cls, values: Mapping[str, Any]) -> Adapter | None:
        """The adapter that the adapter_config.json `values` of its `peft_type` describe; None: another technique's.

        Raises ValueError, KeyError or TypeError for values that are not those of one.
        """
        raise NotImplementedError


class LinearAdapter(Adapter):
    """Base of the adapters around linears: which they wrap, the parameters they add to each, and the wrapper module."""

    target_modules: tuple[str, ...] = Field(
        ("all-linear",),
        description="Checkpoint modules to wrap, by the end of their names ('q_proj', 'mlp.down_proj'), by regular expressions of whole names ('.*[02].self_attn.(q|v)_proj'), or all-linear.",
    )

    wraps_experts: ClassVar[bool] = False
    """Whether it can wrap linears with a weight for each expert; if not, all-linear leaves them out."""

    stored: ClassVar[dict[str, str]] = {}
    """The end of the key in a PEFT folder of each parameter that a piece has, by what its name begins with: NAME_PIECE."""

    @field_validator("target_modules")
    @classmethod
    def _expressions_compile(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            try:
                re.compile(name)
            except re.error as error:
                raise ValueError(f"{name!r} is no regular expression: {error}") from None
        return names

    def check(self, config: Any) -> None:
        """Raises ValueError where `target_modules` name no linear."""
        every = (
            (index, path, one) for index in range(config.num_layers) for path, one in config.linears(index).items()
        )
        if not any(config.wrappers(*one) for one in every):
            raise ValueError(f"target_modules {list(self.target_modules)} of adapter '{self.kind}' name no linear")

    def targets(self, module: str) -> bool:
        """Whether `target_modules` name checkpoint module `module` ('model.layers.0.self_attn.q_proj')."""
        return any(
            re.fullmatch(one, module) if _EXPRESSION.search(one) else f".{module}".endswith(f".{one}")
            for one in self.target_modules
        )

    def around(self, modules: Mapping[str, str]) -> LinearAdapter:
        """It as it is around one linear, of which each piece is the checkpoint module of `modules`: where its options name modules."""
        return self

    def parameters(self, linear: LinearSpec, pieces: tuple[Piece, ...]) -> tuple[ParameterSpec, ...]:
        """The parameters it adds to `linear`, whose `pieces` it wraps."""
        raise NotImplementedError

    def wrap(self, inner: nn.Module, linear: LinearSpec, pieces: tuple[Piece, ...]) -> nn.Module:
        """The module that replaces `inner`: an `hone.model.adapters.wrap.Adapted`."""
        raise NotImplementedError

    def first_values(self, module: nn.Module) -> dict[str, Tensor]:
        """What `start` needs of the linear in `module` and takes long to find, by name: `hone train` finds it once and keeps it on disk."""
        return {}

    def start(self, module: nn.Module, first: Mapping[str, Tensor]) -> None:
        """To be called once on what `wrap` made, when a new adapter's training begins: the linear has its weights, and the adapter's
        parameters are drawn. For adapters whose first values depend on the weights they wrap. `first` is what `first_values` gave."""


def wrappers(adapters: Iterable[Adapter], linear: LinearSpec, modules: Iterable[str]) -> Wrappers:
    """The `adapters` that wrap `linear`; `modules` are the checkpoint modules that hold its rows.

    Raises SpecError when an adapter names modules of experts and cannot wrap them.
    """
    modules, parts = list(modules), list(linear.parts)
    found: Wrappers = []
    for adapter in adapters:
        if not isinstance(adapter, LinearAdapter):
            continue
        named = [adapter.targets(module) for module in modules]
        if linear.experts is not None and not adapter.wraps_experts:
            if any(named):
                raise SpecError(
                    f"adapter '{adapter.kind}' cannot wrap {modules[named.index(True)]}, the weights of one expert",
                    fix="leave experts out of target_modules",
                )
            continue
        wanted = "all-linear" in adapter.target_modules or any(named)
        if wanted and len(modules) < len(parts):  # one module holds all rows: they are one piece
            found.append((adapter.around({linear.name: modules[0]}), (Piece(linear.name, linear.out_features),)))
            continue
        names = dict(zip((piece.name for piece in linear.pieces), modules))
        if "all-linear" in adapter.target_modules:
            found.append((adapter.around(names), linear.pieces))
        elif any(named):
            hit = {part.rpartition(".")[2] for part, taken in zip(parts, named, strict=True) if taken}
            found.append((adapter.around(names), tuple(piece for piece in linear.pieces if piece.name in hit)))
    return found
