"""Small draft heads that have learned a small model's text by heart."""

from __future__ import annotations

from pathlib import Path

import torch

from hone.model.context import Causal
from hone.model.decoder import Decoder
from hone.train import OBJECTIVES
from hone.train.objectives.draft_heads.fits import with_heads
from tests.serve.small import dense_greedy

KINDS = ["medusa", "eagle3"]
OPTIONS: dict[str, dict] = {"medusa": {}, "eagle3": {"ttt_length": 2, "steps": 40}}
PROMPTS = [[(5 * i + 2 * j) % 61 for j in range(1, 3 + 6 * i)] for i in range(4)]


def taught(folder: Path, kind: str, model: Decoder, vocab_size: int, steps: int = 60, **options) -> Path:
    """Heads that have learned the model's own greedy text by heart, in `folder`."""
    objective = OBJECTIVES.read({"kind": kind, **options})
    prompts = [[token % vocab_size for token in prompt] for prompt in PROMPTS]
    text = [(prompt + dense_greedy(model, prompt, 40))[:42] for prompt in prompts]
    tokens = torch.tensor([one for one in text if len(one) == 42])
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    with_heads(objective, model, None, 0)
    optimizer = torch.optim.AdamW(model.drafter.parameters(), lr=5e-3)
    for _ in range(steps):
        context = Causal(tokens)
        context.taps = context.memo["taps"] = dict.fromkeys(objective.own_taps(len(model.layers)))
        loss = objective.total_in(model, model.hidden(tokens, context), targets, context, None, None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    objective.save(model.drafter, model.config, folder, "nowhere", torch.float32)
    del model.drafter
    return folder
