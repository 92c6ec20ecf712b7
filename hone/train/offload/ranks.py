"""The trained weights of several ranks, each with the masters and the state of its share on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hone.model.decoder import Decoder
from hone.train.data_parallel.weights import DividedWeights
from hone.train.offload.memory import Stage
from hone.train.offload.states import StateFile
from hone.train.offload.steps import HostSteps
from hone.train.offload.techniques import Host
from hone.train.optimizers.base import Parameter, Rule


class DividedHostWeights(HostSteps, DividedWeights):
    """`DividedWeights` of a rank whose masters are in its host's memory or in its file; passes are those of `DividedWeights`."""

    def __init__(
        self,
        model: Decoder,
        dtype: torch.dtype,
        *,
        offload: Host,
        rules: Mapping[str, Rule],
        described: Mapping[str, Parameter],
        **options: Any,
    ) -> None:
        DividedWeights.__init__(self, model, dtype, **options)
        self._prepare(torch.device(self.grid.device), dtype)
        on_device, self.zeros = self.masters, {name: mask.cpu() for name, mask in self.zeros.items()}
        if offload.to_files:
            shapes = {name: tuple(one.shape) for name, one in on_device.items()}
            self.files = StateFile(Path(offload.scratch), shapes, rules, described, offload.memory_bytes)
            self.masters = self.files.masters
        else:
            self.masters = {name: torch.empty(one.shape) for name, one in on_device.items()}
        stage = Stage()
        for name, master in on_device.items():
            if self.files is None:
                stage.copy(self.masters[name], master.detach())
            else:
                self.files.put(name, master.detach())
        for bucket in self._buckets:
            bucket.moved(self.masters)

    def target(self, name: str) -> Tensor | None:
        """This rank's piece in what the others gather."""
        return self._home[name].rounded(name)

    def rounded(self, name: str) -> Tensor | None:
        """No step on the host writes where others gather."""
        return None

    def stepped(self, names: Sequence[str]) -> None:
        """Steps on the host are still under way: `published` brings all weights to the other ranks."""

    def _arrived_on_host(self, names: Sequence[str]) -> None:
        """All gradients are dropped together, by `published`."""
