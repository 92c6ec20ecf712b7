"""Rotations."""
from __future__ import annotations

import pytest
import torch

from hone.model.hf import load
from tests.compress.test_export import transformers_logits

TOKENS = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))

@pytest.mark.parametrize("family", ("llama", "qwen2", "qwen3", "mistral", "phi3", "granite", "smollm3"))
def test_same(family, family_folder, compress):
    folder = family_folder(family)
    made = compress(folder, {"kind": "rotation"})
    with torch.no_grad():
        before, after = load(folder)(TOKENS), load(made.folder)(TOKENS)
    print((before-after).abs().max(), before.abs().max())
    assert (before - after).abs().max() <= 1e-5 * before.abs().max()
    assert (transformers_logits(made.folder, TOKENS) - before).abs().max() <= 1e-5 * before.abs().max()
