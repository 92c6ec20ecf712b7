"""Squared gradients of every matrix's outputs for tokens that the model itself draws: the diagonal of its Fisher matrix by outputs.

Shapes: N rows of a matrix, B sequences, S tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hone.base.run import Run
from hone.compress.allocations.base import HEAD_TOKENS
from hone.compress.capture import Flow
from hone.compress.engine.job import Job
from hone.compress.gradients import differentiate
from hone.model.decoder import Decoder


def of_outputs(job: Job, flow: Flow, num_sequences: int, run: Run) -> dict[str, Tensor]:
    """Mean of g^2 [N] over the tokens of `num_sequences` sequences, of every matrix, float32 on the engine's device."""
    few = flow.calibration.part(slice(num_sequences))
    one = Flow(few, 1, flow.device, flow.dtype, mesh=flow.mesh)
    sums: dict[str, Tensor] = {}

    def watch(name: str, linear: nn.Module) -> None:
        sums[name] = torch.zeros(linear.weight.shape[0], dtype=torch.float64, device=job.device)
        linear.register_forward_hook(_Weigh(sums[name]))

    differentiate(job, one, run, watch, drawn)
    return {name: (flow.mesh.sum(total) / few.num_tokens).float() for name, total in sums.items()}


class _Weigh:
    """A forward hook of a linear that adds the squared gradients of its outputs to `total` [N], in the backward pass."""

    def __init__(self, total: Tensor) -> None:
        self.total = total

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        out.register_hook(self._add)

    def _add(self, gradient: Tensor) -> None:
        self.total += gradient.flatten(0, -2).double().square().sum(0)


def drawn(model: Decoder, hidden: Tensor, rows: Tensor, piece: slice, flow: Flow) -> Tensor:
    """A token from the model's prediction for every token of `rows` [B, S]; -100 for padding.

    Gradients for the model's own tokens give the Fisher matrix, those for the text's tokens something else that is larger
    where the model predicts the text badly.
    """
    first = int(rows.sum()) % (1 << 31)  # the same labels with any number of ranks
    generator = torch.Generator().manual_seed(first)
    drawn = []
    with torch.no_grad():
        for part in hidden.flatten(0, 1).split(HEAD_TOKENS):
            predicted = model.head(part).float().softmax(-1).cumsum(-1)
            level = torch.rand(len(part), 1, generator=generator).to(predicted) * predicted[:, -1:]
            drawn.append(torch.searchsorted(predicted, level, right=True).clamp(max=predicted.shape[1] - 1)[:, 0])
    labels = torch.cat(drawn).view(rows.shape)
    if flow.own.document_ids is not None:
        labels[torch.from_numpy(flow.own.document_ids[piece]).to(rows.device) < 0] = -100
    return labels
