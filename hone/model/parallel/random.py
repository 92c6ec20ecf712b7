"""A checkpoint of random weights: the tensors that a config.json describes, quantized ones too, without any file of them."""

from __future__ import annotations

from math import log2
from pathlib import Path
from statistics import fmean
from typing import Self

import torch
from torch import Tensor, nn

from hone.base.errors import ArtifactError, SpecError
from hone.model.decoder import Decoder
from hone.model.families.config_json import from_hf
from hone.model.folder import CONFIG, model_folder, read_json
from hone.model.quantized.layouts import layout_of
from hone.model.quantized.scheme import Scheme
from hone.model.weights.model import ModelSource
from hone.model.weights.values import stated_dtype
from hone.ops.rounding.inputs import tensors_of
from hone.ops.rounding.numbers import NUMBERS, Values

_STD = 0.02


class NoWeights:
    """A source without tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        """None."""
        return []

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ArtifactError, as `tensor` and `file` do."""
        raise self._missing(name)

    def tensor(self, name: str) -> Tensor:
        """Raises ArtifactError."""
        raise self._missing(name)

    def file(self, name: str) -> Path:
        """Raises ArtifactError."""
        raise self._missing(name)

    def close(self) -> None:
        """Nothing is open."""

    def reopened(self) -> Self:
        """Itself."""
        return self

    def _missing(self, name: str) -> ArtifactError:
        return ArtifactError(f"{self.folder}: {name} is random", fix="give a folder with weights")


class RandomCheckpoint(ModelSource):
    """Weights drawn on the device, normal with standard deviation 0.02, or codes and scales that mean such numbers.

    For measuring speed: a model of 8 billion parameters is there in a second. `folder` needs a config.json only. Raises
    SpecError for formats whose codes cannot be drawn one by one.
    """

    def __init__(self, folder: Path | str, seed: int = 0) -> None:
        folder = model_folder(folder)
        values = read_json(folder / CONFIG)
        config = from_hf(values, str(folder / CONFIG))
        super().__init__(folder, config, values, NoWeights(folder), quantization=values.get("quantization_config"))
        self._seed = seed

    def load_ends(self, decoder: Decoder, device: torch.device | str, dtype: torch.dtype) -> None:
        torch.manual_seed(self._seed)  # they come first, also where layers are read one by one
        super().load_ends(decoder, device, dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in config.json, else bfloat16."""
        return stated_dtype(self.values) or torch.bfloat16

    def check(self, decoder: Decoder) -> None:
        """Nothing is stored, so nothing can be missing."""

    def load_linear(
        self, linear: nn.Module, names: dict[str, int], device: torch.device | str, dtype: torch.dtype
    ) -> None:
        scheme = getattr(linear, "scheme", None)
        if not isinstance(scheme, Scheme):
            super().load_linear(linear, names, device, dtype)
        elif scheme.permuted or scheme.scales not in ("float", "e8m0"):
            raise SpecError(
                f"no random weights of {scheme.described}",
                fix=f"use a folder with weights, or another quantization_config in {self.folder / CONFIG}",
            )
        else:
            linear.load([self._part(linear, scheme, count, device, dtype) for count in names.values()])

    def _part(
        self, linear: nn.Module, scheme: Scheme, rows: int, device: torch.device | str, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """The tensors of one module [rows, K], as its layout names them."""
        part = {}
        for name, (kind, shape) in layout_of(scheme).tensors(scheme, rows, linear.in_features, dtype).items():
            if name.endswith("shape"):
                part[name] = torch.tensor((rows, linear.in_features), dtype=kind)
            elif "scale" in name and scheme.scales == "e8m0":  # a power of two, stored as its exponent + 127
                part[name] = torch.full(shape, 127 + round(log2(_STD / _spread(scheme))), dtype=kind, device=device)
            elif "scale" in name:
                part[name] = torch.full(shape, _STD / _spread(scheme), dtype=kind, device=device)
            elif "zero" in name:
                part[name] = torch.zeros(shape, dtype=kind, device=device)
            else:
                part[name] = _codes(shape, kind, device)
        if linear.bias is not None:
            part["bias"] = torch.zeros(rows, dtype=dtype, device=device)
        for name, kind in tensors_of(scheme.activations).items():
            part[name] = torch.ones(1, dtype=kind, device=device)
        return part

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        device: torch.device | str,
        dtype: torch.dtype,
        integers: bool = False,
    ) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device=device)
        return made.normal_(std=_STD) if len(shape) > 1 else made.fill_(1.0)


def _codes(shape: tuple[int, ...], kind: torch.dtype, device: torch.device | str) -> Tensor:
    """Random codes: every bit pattern of integers, standard normal numbers of float8."""
    if kind.is_floating_point:
        return torch.randn(shape, dtype=torch.bfloat16, device=device).to(kind)
    limits = torch.iinfo(kind)
    return torch.randint(limits.min, limits.max + 1, shape, dtype=kind, device=device)


def _spread(scheme: Scheme) -> float:
    """The standard deviation of random codes."""
    found = NUMBERS[scheme.number]
    if isinstance(found, Values):
        return fmean(one * one for one in found.values) ** 0.5
    return 1.0 if scheme.number != "int" else 2**scheme.bits / 12**0.5
