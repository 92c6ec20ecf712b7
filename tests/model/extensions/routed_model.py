"""A small model whose feed-forwards have experts, with a tokenizer."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from hone.model.decoder import build
from hone.model.feed_forwards import FEED_FORWARDS
from hone.model.hf import save
from hone.model.shape import Shape
from tests.conftest import byte_tokenizer

NUM_EXPERTS, UNUSED = 5, 4
"""Experts of each of its two layers, and the one that no token visits in the first one."""
EXPERTS = {"kind": "top_experts", "intermediate_size": 32, "num_experts": NUM_EXPERTS, "top_k": 2}


def add_line(patch: pytest.MonkeyPatch) -> None:
    """The table line of its feed-forward."""
    patch.setitem(FEED_FORWARDS.rows, "top_experts", "tests.model.extensions.top_experts:TopExperts")


def write(folder: Path) -> None:
    """Random weights. The router of layer 0 never sends a token to the last expert: its score is 0, and two of s, -s, t and -t are at
    least that."""
    folder.mkdir(exist_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 32}
    config = Shape(**sizes, max_seq_len=64).config(len(tokenizer))
    values = config.model_dump(mode="json")
    values["layers"] = [{**layer, "feed_forward": EXPERTS} for layer in values["layers"]]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", RuntimeWarning)  # that transformers cannot read it
        add_line(patch)
        model, generator = build(type(config).read(values), seed=1), torch.Generator().manual_seed(2)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1, generator=generator)
        rows = model.layers[0].feed_forward.router.weight
        rows[1], rows[3], rows[UNUSED] = -rows[0], -rows[2], 0
        save(model, folder)
