"""A model folder with quantized weights: random codes and scales in the layout of a scheme."""

from __future__ import annotations

from pathlib import Path

import torch

from hone.model import hf
from hone.model.decoder import Decoder
from hone.model.quantized import config as config_of
from hone.model.quantized import layouts
from hone.model.quantized.scheme import Quantization, Scheme
from hone.model.shards import write_tensors
from hone.model.weights.model import fused_linears


def write_quantized(model: Decoder, folder: Path, scheme: Scheme, method: str) -> Path:
    """`model` with every linear of its layers rounded to `scheme`; the head and routers stay dense."""
    config, linears, dense = model.config, set(), ["lm_head"]
    for index in range(config.num_layers):
        for path, names in fused_linears(config, index).items():
            dense += names if config.linears(index)[path].precise else ()
            linears |= set(names)
    linears -= set(dense)
    quantization = Quantization(((("Linear",), scheme),), tuple(dense), method)
    tensors = dict(hf.state(model))
    for name in linears:
        weight = tensors.pop(f"{name}.weight").float()
        rows, columns = weight.shape
        high, wide = scheme.extent(rows, columns)
        blocks = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
        peaks = blocks.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).abs().amax((1, 3))
        if scheme.scales == "e4m3":
            scales = (peaks / 6 / peaks.amax() * 400).clamp(min=1).to(torch.float8_e4m3fn)
            stored = scheme.quantize(weight, scales, None, (400 * 6 / peaks.amax()).view(1))
        elif scheme.scales == "e8m0":
            exponents = (peaks / (6 if scheme.bits == 4 else 448)).log2().ceil().clamp(-120, 120)
            stored = scheme.quantize(weight, (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu))
        else:
            points = None if scheme.symmetric else torch.zeros(peaks.shape, dtype=torch.int8)
            top = 448.0 if scheme.number == "e4m3" else 2.0 ** (scheme.bits - 1) - 1
            stored = scheme.quantize(weight, peaks / top, points)
        tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in layouts.write(stored).items()}
    folder.mkdir()
    hf.write_config(model.config, folder, torch.float32, config_of.to_json(quantization))
    write_tensors(iter(tensors.items()), folder, 10**9)
    return folder
