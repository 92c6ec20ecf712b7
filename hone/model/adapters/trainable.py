"""A model whose adapters are to be trained: its own weights frozen in one dtype, those of the adapters in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from hone.base.durable import write_atomic
from hone.base.errors import SpecError
from hone.model.adapters.base import Adapter, LinearAdapter
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
    those that the source stores. What a new one computes of the model's weights (PiSSA) is read from the folder `first` where `keep`
    has written it there.
    """

    def __init__(
        self, source: ModelSource, adapter: Adapter | None = None, seed: int = 0, first: Path | None = None
    ) -> None:
        config = source.config if adapter is None else adapted(source.config, adapter)
        how = {"quantization": source.quantization, "hadamards": source.hadamards}
        super().__init__(source.folder, config, source.values, source.weights, **how)
        self._drawn_from = None if adapter is None else seed
        self._first, self._keeps = first, False
        self._names = adapter_names(config)
        self._own = {name: one for one in config.own_weights() for name in one.tensors}
        if self.quantization is not None and any(path.endswith(".bias") for path in self._trained_paths):
            raise SpecError("the biases of a quantized model are not trained", fix="set adapter.bias: none")

    def keep(self, device: torch.device | str, dtype: torch.dtype) -> None:
        """Writes the first values of a new adapter that take long to find, a file a layer, unless they are there: one process calls it before
        all of them load the model on a `device` in `dtype`."""
        linear = [one for one in self.config.adapters if isinstance(one, LinearAdapter)]
        takes = any(type(one).first_values is not LinearAdapter.first_values for one in linear)
        if self._drawn_from is None or self._first is None or not takes:
            return
        self._first.mkdir(parents=True, exist_ok=True)
        self._keeps = True
        for index in range(self.config.num_layers):
            if not self._file(index).exists():
                self.build_layer(index, device, dtype)
                self.close()
        self._keeps = False

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
        if self._drawn_from is not None:
            self._start(layer, index)
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

    def _start(self, layer: DecoderLayer, index: int) -> None:
        """Gives the new adapters of layer `index` their first values, from disk if they are there."""
        wrapped = {path: one for path, one in layer.named_modules() if isinstance(one, Adapted)}
        if self._first is not None and self._file(index).exists():
            first = load_file(self._file(index))
        else:
            found = ((path, one.spec.first_values(one).items()) for path, one in wrapped.items())
            first = {f"{path}.{name}": value for path, values in found for name, value in values}
        if self._keeps:
            write_atomic(self._file(index), save({name: one.cpu().contiguous() for name, one in first.items()}))
        for path, one in wrapped.items():
            own = {name.removeprefix(f"{path}."): value for name, value in first.items() if name.startswith(f"{path}.")}
            one.spec.start(one, own)

    def _file(self, index: int) -> Path:
        assert self._first is not None
        return self._first / f"layer-{index:05d}.safetensors"

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
