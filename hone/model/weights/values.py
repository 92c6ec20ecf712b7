"""What a model keeps of a stored tensor: its dtype and shape are checked, its floats converted, and nothing stays mapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hone.base.errors import ArtifactError
from hone.model.folder import CONFIG
from hone.model.weights.header import DTYPES
from hone.model.weights.header import FLOATS as NAMES

FLOATS = tuple(getattr(torch, name) for name in NAMES)
"""Dtypes of weights that are not quantized."""
CODES = tuple(getattr(torch, name) for name in DTYPES.values() if name not in NAMES)
"""Dtypes of codes of quantized weights."""
AS_STORED = (
    "weight_scale", "weight_scale_inv", "_global_scale", "input_scale", ".k_scale", ".v_scale", ".scales", "absmax", "quant_map", ".SCB",
)  # fmt: skip
"""Ends of the names of floats whose dtype stays: scales of quantized weights, to which a wider one adds up to one bit a weight."""


IN_FLOAT32 = (".router_bias", ".e_score_correction_bias")
"""Ends of the names of floats that are float32 whatever the model computes in: a router's bias moves in steps that fewer bits would lose."""


def stated_dtype(values: dict[str, Any]) -> torch.dtype | None:
    """The float dtype that the values of a config.json name, if they do."""
    name = str(values.get("dtype") or values.get("torch_dtype")).removeprefix("torch.")
    return getattr(torch, name) if name in NAMES else None


def kept(
    file: Path, name: str, stored: Tensor, device: torch.device | str, dtype: torch.dtype, *, integers: bool = False
) -> Tensor:
    """A copy of `stored`, all or a part of the tensor `name` of `file`, as a model keeps it: floats in `dtype`, scales as stored, biases
    of routers in float32."""
    kind = torch.float32 if name.endswith(IN_FLOAT32) else None if name.endswith(AS_STORED) else dtype
    taken = converted(file, name, stored, device, kind, integers=integers)
    # Copied, because a mapped tensor would change or fault when the file is written again.
    return taken.clone() if taken.data_ptr() == stored.data_ptr() else taken


def converted(
    file: Path,
    name: str,
    stored: Tensor,
    device: torch.device | str,
    dtype: torch.dtype | None,
    *,
    integers: bool = False,
) -> Tensor:
    """The tensor `name` of `file` with the values `stored`, on `device`; floats are converted to `dtype` (None: their own).

    Raises ArtifactError when it is not a float tensor (with `integers`: not an integer tensor) or not finite.
    """
    kind = str(stored.dtype).removeprefix("torch.")
    if integers:
        if stored.dtype not in CODES:
            raise ArtifactError(
                f"{file}: {name} is {kind}, but codes of a quantized weight are integers or 8-bit floats",
                fix="pair the weights with the config.json they were saved with",
            )
        return stored.to(device)
    if stored.dtype not in FLOATS:
        raise ArtifactError(
            f"{file}: {name} is {kind}, but a weight must be a float",
            fix="save the weights as float32, bfloat16 or float16",
        )
    taken = stored.to(device=device, dtype=dtype)
    if not finite(taken):
        if finite(stored):
            raise ArtifactError(
                f"{file}: {name} has values that {str(dtype).removeprefix('torch.')} cannot hold",
                fix="load it as bfloat16 or float32",
            )
        raise ArtifactError(
            f"{file}: {name} has values that are not finite (NaN or infinity)", fix="use a checkpoint without them"
        )
    return taken


def finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite; one pass without temporaries, ten times cheaper than a copy."""
    return tensor.numel() == 0 or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def fits(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a tensor has the wanted shape, in which -1 is any length."""
    return len(found) == len(wanted) and all(b in (-1, a) for a, b in zip(found, wanted, strict=True))


def misfit(file: Path, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> ArtifactError:
    """The error for the tensor `name` of `file`, whose shape is not the one that its config.json describes."""
    return ArtifactError(
        f"{file}: {name} has shape {list(found)}, but {CONFIG} describes {list(wanted)}",
        fix="pair the weights with the config.json they were saved with",
    )
