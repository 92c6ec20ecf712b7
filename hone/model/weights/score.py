"""A language model as the reward model that it is to become: its own layers, and a new head of one output."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hone.model.decoder import Decoder, draw_initial
from hone.model.families.stored import HEAD, refuse_unread
from hone.model.linear_spec import INIT_STD
from hone.model.weights import values as checked
from hone.model.weights.model import ModelSource, expected_shapes


class WithScore(ModelSource):
    """The model of `source` with a head of one output in place of its own, drawn from `seed` as `hone.model.decoder.build` would."""

    def __init__(self, source: ModelSource, seed: int) -> None:
        how = {"quantization": source.quantization, "hadamards": source.hadamards}
        super().__init__(source.folder, source.config.scoring(), source.values, source.weights, **how)
        self._seed = seed

    def check(self, decoder: Decoder) -> None:
        """As `ModelSource.check`, of the tensors that are not drawn."""
        expected = expected_shapes(decoder)
        for name, shape in expected.items():
            if name.startswith("score."):
                continue
            found = self.shape(name)
            if not checked.fits(found, shape):
                raise checked.misfit(self.file(name), name, found, shape)
        refuse_unread({name: self.file(name) for name in self.names() if name != HEAD}, expected, self.config)

    def load_part(self, part: Any, path: str, device: torch.device | str, dtype: torch.dtype) -> None:
        """As `ModelSource.load_part`; the head is drawn."""
        if path != "lm_head":
            super().load_part(part, path, device, dtype)
            return
        drawn = torch.empty(self.config.ends()[path].out_features, self.config.hidden_size)
        draw_initial(drawn, f"{self._seed}/{path}", (0.0, INIT_STD))
        part.weight = nn.Parameter(drawn.to(device, dtype))
