"""An export format of someone's own: every weight as float32 in one NumPy archive."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from hone.base.run import Run
from hone.exports.base import Export, Exported
from hone.model.hf import Checkpoint
from hone.model.quantized.dense import dequantized


class NPZ(Export):
    """One NumPy archive with the checkpoint's names; quantized weights are dequantized."""

    ending: ClassVar[str] = ".npz"

    dtype: Literal["float32", "float16"] = Field("float32", description="Type of the arrays.")

    def write(self, model: Path, path: Path, run: Run, importance: Mapping[str, Tensor]) -> Exported:
        source = Checkpoint(model)
        notes = ["quantized weights are dequantized"] if source.quantization else []
        source = dequantized(source) if source.quantization else source
        arrays = {name: source.tensor(name).to(torch.float32).numpy().astype(self.dtype) for name in source.names()}
        partial = path.with_name(f"{path.name}.partial")
        with open(partial, "wb") as file:
            np.savez(file, **arrays)
        os.replace(partial, path)
        return Exported(path, path.stat().st_size, dict.fromkeys(arrays, self.dtype), notes)
