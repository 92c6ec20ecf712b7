"""What each of several ranks does in the tests of fp8 training with tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch

from hone.base.ranks import Mesh
from hone.feed.load import PackedTokens
from hone.train.loop import Trainer
from tests.train.ranks import batch, trainer


def compared(folder: str, settings: list[dict[str, Any]]) -> list[tuple[float, float, dict[str, float], list[str]]]:
    """For each of `settings`: the loss, that of one process, how far each divided weight's gradient is from the part of its (norms), and
    the linears in fp8."""
    torch.set_num_threads(1)
    mesh, data, found = Mesh.from_environment(), PackedTokens(folder), []
    for setting in settings:
        with mesh.together():
            alone = trainer(data, Mesh(), {name: value for name, value in setting.items() if name != "parallelism"})
            ours = trainer(data, mesh, setting)
            whole, part = (gradients(one, data) for one in (alone, ours))
            cuts, away = ours.model.cuts, {}
            for name, (_, grad) in part.items():
                if name in cuts:
                    wanted = cuts[name].take(whole[name][1]).float()
                    away[name] = ((grad.float() - wanted).norm() / wanted.norm()).item()
            names = {linear: name for name, linear in ours.model.named_modules()}
            coded = [names[linear] for linear in ours.linears.linears] if ours.linears else []
            found.append((part["embed_tokens.weight"][0], whole["embed_tokens.weight"][0], away, coded))
    return found


def gradients(one: Trainer, data: PackedTokens) -> dict[str, tuple[float, torch.Tensor]]:
    """The loss and the gradient by each weight, of one batch."""
    with one.ranks.mesh.transfers():
        sums, counts = one.gradients(batch(data, one.ranks, 0))
        loss = one._means(sums, counts)[0].item()
    weights = one.update.weights
    return {name: (loss, weights.grad(name).clone()) for name in weights.parameters}
