"""What decoding keeps of each token, measured: layers decode two tokens, and the tensors that they carry along are counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hone.model.incremental import Incremental
from hone.model.weights.model import ModelSource


def kept_bytes(source: ModelSource) -> float:
    """Bytes that decoding one more token adds to what the layers of `source` keep, in its dtype; layers with one mixer are alike."""
    config, found = source.config, {}
    mixers = [layer.mixer.model_dump_json() for layer in config.layers]
    for index, mixer in enumerate(mixers):
        if mixer not in found:
            found[mixer] = 0 if config.layers[index].mixer.reuses_kv else _added(source, index)
    return float(sum(found[mixer] for mixer in mixers))


@torch.no_grad()
def _added(source: ModelSource, index: int) -> int:
    """The bytes of the second token in layer `index`."""
    mixer = source.reopened().build_layer(index).mixer
    carry: dict[int, Any] = {}
    x, token, sizes = torch.zeros(1, 1, source.config.hidden_size, dtype=source.dtype), torch.zeros(1, 1).long(), []
    for start in range(2):
        mixer(x, Incremental(token, start, carry, rope_len=source.config.max_seq_len))
        sizes.append(sum(one.numel() * one.element_size() for one in _tensors(carry.get(index))))
    return sizes[1] - sizes[0]


def _tensors(kept: Any) -> Iterator[Tensor]:
    if isinstance(kept, Tensor):
        yield kept
    elif isinstance(kept, dict | list | tuple):
        for one in kept.values() if isinstance(kept, dict) else kept:
            yield from _tensors(one)
