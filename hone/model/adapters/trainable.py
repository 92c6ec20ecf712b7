"""A model whose adapters are to be trained: its own weights frozen in one dtype, those of the adapters in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hone.base.errors import SpecError
from hone.model.adapters.base import Adapter
from hone.model.adapters.lora import ROWS
from hone.model.adapters.peft import EMBEDDING, adapted
from hone.model.adapters.prompts.first_values import FirstValues
from hone.model.adapters.wrap import Adapted
from hone.model.config import ModelConfig
from hone.model.decoder import Decoder, DecoderLayer, draw_initial
from hone.model.families.stored import refuse_unread
from hone.model.linear_spec import ParameterSpec
from hone.model.weights import values as checked
from hone.model.weights.model import ModelSource, expected_shapes


class Trainable(ModelSource):
    """The model of `source`, in which the parameters of its adapters alone require gradients, and are float32.

    With `adapter` it is a new one around a model that has none, drawn from `seed` as `hone.model.decoder.build` would; else they are
    those that the source stores.
    """

    def __init__(self, source: ModelSource, adapter: Adapter | None = None, seed: int = 0) -> None:
        config = source.config if adapter is None else adapted(source.config, adapter)
        how = {"quantization": source.quantization, "hadamards": source.hadamards}
        super().__init__(source.folder, config, source.values, source.weights, **how)
        self._drawn_from = None if adapter is None else seed
        self._names = adapter_names(config)
        self._own = {name: one for one in config.own_weights() for name in one.tensors}
        if self.quantization is not None and any(path.endswith(".bias") for path in self._trained_paths):
            raise SpecError("the biases of a quantized model are not trained", fix="set adapter.bias: none")

    def check(self, decoder: Decoder) -> None:
        """As `ModelSource.check`, of the tensors that are not drawn."""
        expected = expected_shapes(decoder)
        for name, shape in expected.items():
            if name in self._names and self._drawn_from is not None:
                continue
            found = self.shape(name)
            if not checked.fits(found, shape):
                raise checked.misfit(self.file(name), name, found, shape)
        refuse_unread({name: self.file(name) for name in self.names()}, expected, self.config)

    def load_layer(self, layer: DecoderLayer, index: int, device: torch.device | str, dtype: torch.dtype) -> None:
        """As `ModelSource.load_layer`; then new adapters begin, and all else is frozen."""
        super().load_layer(layer, index, device, dtype)
        for module in layer.modules() if self._drawn_from is not None else ():
            if isinstance(module, Adapted):
                module.spec.start(module)
        own = self.config.adapter_parameters(index)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(
                (name in own and own[name].trained) or f"layers.{index}.{name}" in self._trained_paths
            )

    def load_part(self, part: Any, path: str, device: torch.device | str, dtype: torch.dtype) -> None:
        """As `ModelSource.load_part`; what is outside the layers is frozen."""
        super().load_part(part, path, device, dtype)
        if path == "prompt" and self._drawn_from is not None:
            how = {"quantization": self.quantization, "hadamards": self.hadamards}
            plain = self.config.model_copy(update={"adapters": ()})
            bare = ModelSource(self.folder, plain, self.values, self.weights, **how)
            self.config.prompt.start(part, FirstValues(bare, self._drawn_from))
        if not path.startswith("layers."):
            for name, parameter in part.named_parameters():
                parameter.requires_grad_(path == "prompt" or name == "rows" or f"{path}.{name}" in self._trained_paths)

    @property
    def _trained_paths(self) -> set[str]:
        """The paths of the model's own weights that are trained."""
        return {one.path for one in self._own.values()}

    def take(
        self, name: str, shape: tuple[int, ...], device: torch.device | str, dtype: torch.dtype, integers: bool = False
    ) -> Tensor:
        """As `ModelSource.take`, in float32 what is trained."""
        return super().take(name, shape, device, torch.float32 if name in self._own else dtype, integers)

    def _set(
        self, module: nn.Module, attribute: str, name: str, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        if name not in self._names:
            super()._set(module, attribute, name, device, dtype)
        elif self._drawn_from is None:
            super()._set(module, attribute, name, device, torch.float32)
        else:
            path, spec = self._names[name]
            if name == ROWS:
                rows = self.tensor(EMBEDDING)[list(self.config.token_rows())]
                setattr(module, attribute, nn.Parameter(rows.float().to(device)))
                return
            drawn = torch.empty(spec.shape)
            draw_initial(drawn, f"{self._drawn_from}/{path}", spec.initial)
            setattr(module, attribute, nn.Parameter(drawn.to(device)))


def adapter_names(config: ModelConfig) -> dict[str, tuple[str, ParameterSpec]]:
    """The path in the decoder and the declaration of every parameter of the adapters of `config`, by its name in hone's checkpoints."""
    found = {}
    for index in range(config.num_layers):
        names = config.singles(index)
        for path, spec in config.adapter_parameters(index).items():
            found[names[path]] = (f"layers.{index}.{path}", spec)
    if rows := config.token_rows():
        found[ROWS] = ("embed_tokens.rows", ParameterSpec("rows", (len(rows), config.hidden_size)))
    own = config.prompt_parameters()
    return found | {f"prompt.{path}": (f"prompt.{path}", spec) for path, spec in own.items()}
