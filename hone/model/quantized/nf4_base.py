"""A dense model read as one of NF4 linears: each matrix is quantized when it is read, so that never more than one is dense in memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.model.linear_spec import is_router
from hone.model.quantized.config import to_json
from hone.model.quantized.layouts import layout_of, shapes_of
from hone.model.quantized.layouts.bitsandbytes_4bit import quantize
from hone.model.quantized.scheme import Quantization, Scheme
from hone.model.weights.model import ModelSource
from hone.model.weights.source import View
from hone.model.weights.tensors import Module, layer_modules


class NF4Weights(View):
    """The weights of `source` with the tensors of NF4 in place of the `weight` of each of `modules`.

    They are computed on `device`, the codes as bitsandbytes would write them.
    """

    def __init__(self, source: ModelSource, modules: list[Module], scheme: Scheme, device: torch.device | str) -> None:
        super().__init__(source.weights)
        self._scheme, self._device, self._dtype = scheme, device, source.dtype
        self._found = {
            f"{one.name}.{suffix}": (one.name, shape)
            for one in modules
            for suffix, shape in shapes_of(scheme, *one.shape).items()
        }
        self._made: tuple[str, dict[str, Tensor]] = ("", {})

    def names(self) -> list[str]:
        """As of a folder of NF4 weights."""
        dense = {f"{module}.weight" for module, _ in self._found.values()}
        return [name for name in self.source.names() if name not in dense] + list(self._found)

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape; (-1,) of a description, whose length is not fixed."""
        return self._found[name][1] if name in self._found else self.source.shape(name)

    def tensor(self, name: str) -> Tensor:
        """The stored tensor, or one of a matrix that is quantized now: the last one is kept, for its other tensors."""
        if name not in self._found:
            return self.source.tensor(name)
        module = self._found[name][0]
        if self._made[0] != module:
            self._made = ("", {})
            weight = self.source.tensor(f"{module}.weight").to(self._device)
            self._made = (module, layout_of(self._scheme).write(quantize(weight, self._scheme, self._dtype)))
        return self._made[1][name.removeprefix(f"{module}.")]

    def file(self, name: str) -> Path:
        """The file of the tensor, or of the matrix that it is made of."""
        return self.source.file(f"{self._found[name][0]}.weight" if name in self._found else name)

    def close(self) -> None:
        """Unmaps the files and forgets the last matrix."""
        self._made = ("", {})
        super().close()


def nf4_base(
    source: ModelSource, *, double_quant: bool = True, block_size: int = 64, device: torch.device | str = "cpu"
) -> ModelSource:
    """The dense model of `source` with NF4 weights in the linears of its layers, for QLoRA: arXiv:2305.14314.

    `build` then needs the memory of the 4-bit model and of one matrix. Embedding, head, norms, routers and biases stay as they
    are, as do adapters, which `source` may have. `device` computes the codes. Raises SpecError for a model that is quantized
    already, or whose rows are no multiple of `block_size`.
    """
    if source.quantization is not None or source.hadamards:
        raise SpecError(
            f"{source.folder} is quantized already",
            fix="train its adapter as it is, or start from the model that it was made from",
        )
    scheme = Scheme(4, block_size, "nf4-nested" if double_quant else "nf4", number="nf4")
    config, modules, kept = source.config, list[Module](), ["lm_head"]
    for index in range(config.num_layers):
        linears = config.linears(index)
        for one in layer_modules(config, index):
            if is_router(linears, one.path):
                kept.append(one.name)
            elif one.shape[1] % block_size:
                raise SpecError(
                    f"{one.name} has {one.shape[1]} input features, no multiple of the {block_size} weights of an NF4 block",
                    fix="give a block_size that divides it, from 32 on, or train without quantizing the base",
                )
            else:
                modules.append(one)
    ignore = tuple(f"re:.*{name}$" for name in kept)
    options = {"bnb_4bit_compute_dtype": str(source.dtype).removeprefix("torch.")}
    quantization = to_json(Quantization(((("Linear",), scheme),), ignore, "bitsandbytes", options))
    quantization["llm_int8_skip_modules"] = kept
    weights = NF4Weights(source, modules, scheme, device)
    return ModelSource(source.folder, config, source.values, weights, quantization=quantization)
