"""Learning rates and weight decay of adapters' parameters, where they are others than those of a model's weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hone.model.config import ModelConfig
from hone.train.optimizers.base import Group


def adapter_groups(groups: Iterable[Group], config: ModelConfig) -> list[Group]:
    """`groups` of the parameters of `config`'s adapters, divided where these ask for other learning rates (LoRA+) or no decay."""
    if len(config.adapters) != 1:
        return list(groups)
    (adapter,) = config.adapters
    found = []
    for group in groups:
        kinds: dict[tuple[float, bool], list[str]] = {}
        for name in group.names:
            kinds.setdefault((adapter.lr_factor(name), adapter.decays(name)), []).append(name)  # type: ignore[attr-defined]
        for (factor, decays), names in kinds.items():
            decay = group.weight_decay if decays else 0.0
            found.append(replace(group, names=tuple(names), lr_factor=group.lr_factor * factor, weight_decay=decay))
    return found
