"""The adapter of a corrected model: its factors by layer while the engine runs, and PEFT's folder at the end."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor, nn

from hone.base.durable import write_atomic
from hone.compress.matrix import Parts
from hone.compress.shards import read_shard, shard_bytes, write_shard
from hone.compress.step import Targets
from hone.model.adapters import ADAPTERS, peft
from hone.model.folder import ADAPTER
from hone.model.quantized.low_rank import FACTORS, LowRank

if TYPE_CHECKING:
    from hone.base.artifact import Draft
    from hone.model.adapters.lora import LoRA
    from hone.model.config import ModelConfig

CONFIG = {peft.KEY: ADAPTER}
"""What config.json says of the folder."""


def spec(rank: int, config: ModelConfig, targets: Targets) -> LoRA:
    """The adapter of the linears in `targets`: its alpha is its rank, so that B A is added as it is."""
    chosen = (name for linears in targets for linear in linears for name, _ in linear.modules)
    names = peft.target_modules(config, chosen)
    return ADAPTERS.read({"kind": "lora", "rank": rank, "alpha": float(rank), "target_modules": names})


def file_bytes(rank: int, targets: Targets, stored: torch.dtype) -> int:
    """Bytes of its adapter_model.safetensors, with factors of dtype `stored`."""
    return shard_bytes(
        (peft.key(name, part), stored, shape)
        for linears in targets
        for linear in linears
        for name, rows in linear.modules
        for part, shape in (("lora_A", (rank, linear.columns)), ("lora_B", (rows, rank)))
    )


def tensors(names: Iterable[str], factors: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The adapter's tensors by key, of checkpoint modules and their (A, B)."""
    found = {}
    for name, (down, up) in zip(names, factors, strict=True):
        found |= {peft.key(name, "lora_A"): down, peft.key(name, "lora_B"): up}
    return found


def split(written: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of the model and those of the adapter."""
    added = {name: tensor for name, tensor in written.items() if name.startswith(peft.PREFIX)}
    return {name: tensor for name, tensor in written.items() if name not in added}, added


def keep(draft: Draft, index: int, added: dict[str, Tensor]) -> None:
    """Keeps the factors of layer `index` for `write_folder` and for a run that resumes."""
    if added:
        write_shard(_file(draft, index), added)


def read(draft: Draft, index: int) -> dict[str, Tensor]:
    """The factors that `keep` wrote; none without a correction."""
    path = _file(draft, index)
    return read_shard(path) if path.exists() else {}


def write_folder(draft: Draft, num_layers: int, adapter: LoRA) -> None:
    """Writes the adapter's folder from the factors of all layers, which stay in their mapped files until they are written."""
    folder = draft.folder / ADAPTER
    folder.mkdir(exist_ok=True)
    found: dict[str, Tensor] = {}
    for index in range(num_layers):
        path = _file(draft, index)
        if path.exists():
            with safe_open(path, framework="pt") as file:
                found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    write_shard(folder / peft.WEIGHTS, found)
    write_atomic(folder / peft.CONFIG, (json.dumps(peft.config_values(adapter), indent=2) + "\n").encode())


def corrected(inner: nn.Module, parts: Parts) -> nn.Module:
    """The factors in `parts` around the linear `inner`, as in a model that is loaded."""
    names, config, path = [name for name, _ in parts.linear.modules], parts.config, parts.linear.path
    rank = len(parts.tensors[peft.key(names[0], "lora_A")])
    adapter = ADAPTERS.read({"kind": "lora", "rank": rank, "alpha": float(rank), "target_modules": names})
    around = config.model_copy(update={"adapters": (adapter,)})
    linear = config.linears(parts.index)[path]
    ((_, pieces),) = around.wrappers(parts.index, path, linear)
    with torch.device("meta"):
        wrapped = adapter.wrap(inner, linear, pieces)
    for name, piece in zip(names, pieces, strict=True):
        for part in ("lora_A", "lora_B"):
            value = parts.tensors[peft.key(name, part)].to(parts.device, parts.dtype)
            setattr(wrapped, f"{part}_{piece.name}", nn.Parameter(value, requires_grad=False))
    return wrapped


def factored(dense: nn.Module, parts: Parts) -> nn.Module:
    """A linear of the factors of all modules in place of `dense`."""
    with torch.device("meta"):
        made = LowRank(parts.linear.columns, parts.linear.rows, False)
    made.load([{name: part[name].to(dense.weight) for name in FACTORS} for part in parts.modules()])
    made.bias = dense.bias
    return made.requires_grad_(False)


def _file(draft: Draft, index: int) -> Path:
    return draft.state / f"adapter-{index:05d}.safetensors"
