"""Gradients of the loss in the whole model, measured once: what rounding errors of a linear's inputs or outputs cost.

Shapes: B sequences, S tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from hone.base.artifact import Draft
from hone.base.durable import write_atomic
from hone.base.run import Run
from hone.compress.capture import Flow
from hone.compress.engine.job import Job
from hone.compress.targets import matrix_name
from hone.model.decoder import Decoder
from hone.ops import linear_cross_entropy

Watch = Callable[[str, nn.Module], None]
Targets = Callable[[Decoder, Tensor, Tensor, slice, Flow], Tensor]
"""(model, last hidden states [B, S, D], tokens [B, S], their rows in the flow, the flow) -> labels int64 [B, S]."""


def measured(job: Job, flow: Flow, draft: Draft, run: Run) -> dict[str, Tensor]:
    """`measure`, once: kept in the draft's state, so that a resumed run reads the same bytes."""
    path = draft.state / "gradients.safetensors"
    kept = run.mesh.from_leader(lambda: path.read_bytes() if path.exists() else None)
    if kept is not None:
        return load(kept)
    found = measure(job, flow, run)
    run.mesh.from_leader(lambda: write_atomic(path, save(found)))
    return found


def measure(job: Job, flow: Flow, run: Run) -> dict[str, Tensor]:
    """Of each target's inputs, sums of squared gradients of the loss by the input's value, over all ranks: float64 [65536], on the CPU.

    An entry belongs to the number of bfloat16 with its 16 bits, the one nearest to an input. The loss is the next-token cross
    entropy in nats over the sequences of `flow`. Holds the whole uncompressed model on the device, with what its backward
    pass keeps of one batch.
    """
    sums = {}

    def watch(name: str, linear: nn.Module) -> None:
        sums[name] = torch.zeros(1 << 16, dtype=torch.float64, device=job.device)
        linear.register_forward_pre_hook(_Weigh(sums[name]))

    differentiate(job, flow, run, watch, _targets)
    found = {name: flow.mesh.sum(total).cpu() for name, total in sums.items()}
    unseen = {name for name, total in found.items() if name.rpartition(".")[2].isdigit() and not bool(total.any())}
    return found | {name: _of_all_experts(name, found) for name in unseen}


def _of_all_experts(name: str, found: dict[str, Tensor]) -> Tensor:
    """The sum over the expert that has the matrix `name` ('layers.0.feed_forward.down.3') and those beside it."""
    holder = name.rpartition(".")[0]
    return torch.stack([total for other, total in found.items() if other.rpartition(".")[0] == holder]).sum(0)


def differentiate(job: Job, flow: Flow, run: Run, watch: Watch, targets: Targets) -> None:
    """A backward pass of the summed cross entropy through the uncompressed model for every batch of this rank.

    `watch` sees every target linear before, by `matrix_name`, and hangs its hooks there; `targets` gives the labels of a batch.
    """
    model = job.checkpoint.build(job.device, job.dtype).requires_grad_(False)
    model.embed_tokens.register_forward_hook(lambda _, __, out: out.requires_grad_())  # where the graph begins
    for index, linears in enumerate(job.targets[: job.checkpoint.config.num_layers]):  # not the head
        for linear in linears:
            watch(matrix_name(index, linear.path), model.layers[index].get_submodule(linear.path))
    tokens = torch.from_numpy(flow.own.tokens)
    with run.progress("gradients", len(tokens), "sequences") as bar, torch.enable_grad():
        for piece, context, _ in flow.batches():
            rows = tokens[piece].to(job.device)
            hidden = model.hidden(rows, context)
            labels = targets(model, hidden.detach(), rows, piece, flow)
            options = {"reduction": "sum", "softcap": model.config.logits_softcap}
            linear_cross_entropy(model.head_input(hidden), model.head_weight, labels, **options).backward()
            bar.advance(len(rows))


def _targets(model: Decoder, hidden: Tensor, rows: Tensor, piece: slice, flow: Flow) -> Tensor:
    """The next token of every token of `rows` [B, S]; -100 where the sequence or its document ends, and for padding."""
    targets = torch.full_like(rows, -100)
    targets[:, :-1] = rows[:, 1:]
    if flow.own.document_ids is not None:
        owners = torch.from_numpy(flow.own.document_ids[piece]).to(rows.device)
        targets[:, :-1][(owners[:, 1:] != owners[:, :-1]) | (owners[:, :-1] < 0)] = -100
    return targets


class _Weigh:
    """A pre-forward hook of a linear that adds squared gradients of its inputs to `total`, in the backward pass."""

    def __init__(self, total: Tensor) -> None:
        self.total = total

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        values = args[0].detach().to(torch.bfloat16).flatten().view(torch.uint16).to(torch.int32)
        args[0].register_hook(lambda gradient: self._add(values, gradient))

    def _add(self, values: Tensor, gradient: Tensor) -> None:
        weights = gradient.flatten().double().square()
        self.total += torch.bincount(values, weights=weights, minlength=1 << 16)
