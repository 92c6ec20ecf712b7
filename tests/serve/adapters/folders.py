"""Random adapters as PEFT folders, and the model with one merged: the oracle of many adapters at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hone.model.adapters import peft
from hone.model.adapters.base import Adapter
from hone.model.adapters.lora import LoRA
from hone.model.decoder import Decoder, build


def adapter_folder(folder: Path, model: Decoder, seed: int, kind: type[Adapter] = LoRA, **options: Any) -> Path:
    """A folder with a random adapter for `model`, large enough to change its text."""
    adapter = kind.read({"kind": kind.__name__.lower(), **options})
    config = peft.adapted(model.config, adapter)
    with torch.no_grad():
        whole = build(config, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        named = dict(whole.named_parameters())
        keys = peft.keys(config)
        tensors = {}
        for index in range(config.num_layers):
            singles = config.singles(index)
            for path in config.adapter_parameters(index):
                one = named[f"layers.{index}.{path}"]
                near_one = "ia3" in path or "magnitude" in path
                drawn = torch.randn(one.shape, generator=generator) * (0.3 if near_one else 0.5) + near_one
                tensors[keys[singles[path]]] = drawn
    peft.write(folder, config, tensors)
    return folder


def merged(model: Decoder, folder: Path) -> Decoder:
    """A copy of `model` with the adapter in `folder`, computed by hone's own modules around its weights."""
    config = peft.adapted(model.config, peft.read(folder))
    found = build(config, seed=0)
    from safetensors.torch import load_file

    back = {key: name for name, key in peft.keys(config).items()}
    stored = {back[key]: tensor for key, tensor in load_file(folder / peft.WEIGHTS).items()}
    with torch.no_grad():
        base = dict(model.named_parameters())
        for name, parameter in found.named_parameters():
            plain = name.replace(".inner.", ".")
            if plain in base:
                parameter.copy_(base[plain])
        for index in range(config.num_layers):
            for path, name in config.singles(index).items():
                if name in stored:
                    found.get_parameter(f"layers.{index}.{path}").copy_(
                        stored[name].view_as(found.get_parameter(f"layers.{index}.{path}"))
                    )
    return found.eval()
