"""Importances of layers, heads and channels, from passes over the calibration inputs, one layer in memory at a time.

Shapes: B sequences, S tokens, D hidden channels, I feed-forward channels, H query heads, G key/value heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.base.run import Run
from hone.compress.calibration import not_finite
from hone.compress.capture import Flow, WithoutPadding
from hone.feed.load import IGNORE
from hone.model.decoder import DecoderLayer
from hone.model.linear_spec import column_axis
from hone.model.weights.exchanged import build_layer
from hone.model.weights.model import ModelSource
from hone.ops import linear_cross_entropy


@torch.no_grad()
def block_influence(checkpoint: ModelSource, flow: Flow, run: Run) -> list[float]:
    """Of every layer 1 - cos(its input, its output), mean over tokens. Men et al. 2024, arXiv:2403.03853, equation 1."""
    sums = [torch.zeros((), dtype=torch.float64, device=flow.device) for _ in checkpoint.config.layers]
    for index, layer in each_layer(checkpoint, flow, run):

        def add(inputs: Tensor, outputs: Tensor, counts: Tensor | None, index: int = index) -> None:
            similar = F.cosine_similarity(inputs.float(), outputs.float(), dim=-1).flatten()
            sums[index] += (similar if counts is None else similar[counts]).double().sum()

        flow.through(layer, add)
    totals = flow.mesh.sum(torch.stack(sums))
    return _finite([1.0 - total / flow.calibration.num_tokens for total in totals.tolist()], flow)


@torch.no_grad()
def added_losses(checkpoint: ModelSource, flow: Flow, run: Run) -> list[float]:
    """Of every layer how much the next-token loss grows when it alone is left out, in nats per token.

    Every model without one layer runs beside the whole one, from that layer on: L + 1 hidden states are in memory.
    """
    without: list[Flow] = []
    for _, layer in each_layer(checkpoint, flow, run):
        for other in without:
            other.through(layer)
        skipped = copy(flow)
        skipped.states = flow.states.clone()
        without.append(skipped)
        flow.through(layer)
    whole, *others = [next_token_loss(checkpoint, one) for one in (flow, *without)]
    return _finite([other - whole for other in others], flow)


class WidthScores(NamedTuple):
    """Importances by layer: of feed-forward channels [I] ([0] of experts) and key/value heads [G]; of hidden channels [D] over all
    layers."""

    intermediate: list[Tensor]
    kv_heads: list[Tensor]
    hidden: Tensor


@torch.no_grad()
def width_scores(checkpoint: ModelSource, flow: Flow, run: Run) -> WidthScores:
    """Importances from activations, as Minitron aggregates them: |x| by the mean over a sequence, then by the L2 norm over
    sequences. Muralidharan et al. 2024, arXiv:2407.14679, sections 2.2 and 4.

    x is the input of the down projection for feed-forward channels, the norm of a head's output for heads (summed over the
    query heads that one key/value head serves), and the normed hidden states for hidden channels (summed over all norms).
    """
    config = checkpoint.config
    hidden = torch.zeros(config.hidden_size)
    inner, heads = [], []
    for index, layer in each_layer(checkpoint, flow, run):
        linears, mixer = config.linears(index), config.layers[index].mixer
        alone = {path: one for path, one in linears.items() if one.experts is None}  # experts see some tokens each
        of_heads, *of_channels = (path for path, one in alone.items() if one.residual)
        of_hidden = {one.reads: path for path, one in alone.items() if column_axis(linears, path) == "hidden"}.values()
        paths = (*of_channels, *of_hidden)
        read = {path: _Sequences(linears[path].in_features) for path in paths}
        read[of_heads] = _Sequences(mixer.num_heads, by_head=True)
        inputs: dict[str, Tensor] = {}

        def add(states: Tensor, _: Tensor, counts: Tensor | None, read=read, inputs=inputs) -> None:
            for path, sequences in read.items():  # blocks with experts have tokens of all sequences on one axis
                sequences.add(inputs.pop(path).view(*states.shape[:2], -1), counts)

        hooks = [layer.get_submodule(path).register_forward_pre_hook(_keep(inputs, path)) for path in read]
        try:
            flow.through(layer, add)
        finally:
            for hook in hooks:
                hook.remove()
        scores = {path: one.score(flow) for path, one in read.items()}
        inner.append(torch.cat([torch.empty(0), *(scores[path] for path in of_channels)]))
        heads.append(scores[of_heads].unflatten(0, (mixer.num_kv_heads, -1)).sum(1))
        hidden += sum(scores[path] for path in of_hidden)
    ends = checkpoint.build_ends(flow.device, flow.dtype)
    last = _Sequences(config.hidden_size)
    for piece, _, counts in flow.batches():
        last.add(ends.norm(flow.states[piece]), counts)
    found = WidthScores(inner, heads, hidden + last.score(flow))
    _finite([float(one.sum()) for one in (*inner, *heads, found.hidden)], flow)
    return found


@torch.no_grad()
def expert_scores(checkpoint: ModelSource, flow: Flow, run: Run, *, weighted: bool) -> list[list[float]]:
    """Of every layer's experts the mean over their tokens of g |f(x)|, with f(x) an expert's output and g the weight with which it is
    added to the others; without `weighted` the number of tokens. [] of a layer without experts.

    Lasby et al. 2025 (REAP), arXiv:2510.13999. An expert without tokens has 0.
    """
    scores: list[list[float]] = []
    for index, layer in each_layer(checkpoint.with_each_expert(), flow, run):
        linears = checkpoint.config.linears(index)
        last = [path for path, one in linears.items() if one.experts is not None and one.residual]
        if not last:
            flow.through(layer)
            scores.append([])
            continue
        layer.requires_grad_(False)
        count, (block,) = linears[last[0]].experts, {path.partition(".")[0] for path in last}
        watched = _Weighted(
            [layer.get_submodule(path) for path in last], layer.get_submodule(block), count, flow.device
        )
        without = WithoutPadding(layer.get_submodule(block))
        for piece, context, counts in flow.batches():
            without.counts = counts
            flow.states[piece] = layer(flow.states[piece], context)
        norms, tokens = flow.mesh.sum(watched.norms), flow.mesh.sum(watched.tokens)
        scores.append(_finite((norms / tokens.clamp(min=1) if weighted else tokens).tolist(), flow))
    return scores


class _Weighted:
    """Adds up g |f(x)| and the tokens of every expert of a block, [E] each.

    g is the derivative of the block's output by the expert's: whatever a router does with its scores, and a block with the sum.
    """

    def __init__(self, linears: list[nn.Module], block: nn.Module, count: int, device: str) -> None:
        self.norms, self.tokens = (torch.zeros(count, dtype=torch.float64, device=device) for _ in range(2))
        self._outputs: list[tuple[int, Tensor]] = []
        self._forward = block.forward
        block.forward = self._weigh
        for linear in linears:
            for expert, own in enumerate(linear):
                own.register_forward_hook(partial(self._keep, expert))

    def _keep(self, expert: int, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        self._outputs.append((expert, out.detach().requires_grad_()))
        return self._outputs[-1][1]

    def _weigh(self, *args: Any) -> Tensor:
        with torch.enable_grad():  # of the steps after the experts alone: nothing before them needs a gradient
            out = self._forward(*args)
            made = [one for _, one in self._outputs]
            weights = torch.autograd.grad(out.sum(), made) if made else ()
        for (expert, one), weight in zip(self._outputs, weights, strict=True):
            self.norms[expert] += (weight[:, 0].abs().float() * one.detach().float().norm(dim=-1)).double().sum()
            self.tokens[expert] += len(one)
        self._outputs.clear()
        return out.detach()


class _Sequences:
    """Adds up the squares of every channel's (or head's) mean |x| over each sequence's tokens."""

    def __init__(self, size: int, *, by_head: bool = False) -> None:
        self.by_head = by_head
        self.total = torch.zeros(size)

    def add(self, x: Tensor, counts: Tensor | None) -> None:
        """x [B, S, K]; `counts` bool [B * S], False for padding."""
        x = x.float().unflatten(-1, (len(self.total), -1)).norm(dim=-1) if self.by_head else x.float().abs()
        if counts is None:
            means = x.mean(1)
        else:
            valid = counts.view(x.shape[:2]).unsqueeze(-1)
            means = (x * valid).sum(1) / valid.sum(1).clamp(min=1)
        self.total = self.total.to(x.device) + means.square().sum(0)

    def score(self, flow: Flow) -> Tensor:
        """The L2 norm over the sequences of all ranks of `flow`, float32 [K], on the CPU."""
        return flow.mesh.sum(self.total.to(flow.device)).sqrt().cpu()


def _keep(inputs: dict[str, Tensor], path: str):
    """A hook that keeps a linear's input until the batch is added."""

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs[path] = args[0]

    return hook


def each_layer(checkpoint: ModelSource, flow: Flow, run: Run) -> Iterator[tuple[int, DecoderLayer]]:
    """Every layer of `checkpoint` in turn, after the embedding; the caller advances `flow` through each."""
    flow.embed(checkpoint.build_ends(flow.device, flow.dtype))
    with run.progress("importance", checkpoint.config.num_layers, "layers") as bar:
        for index in range(checkpoint.config.num_layers):
            yield index, build_layer(checkpoint.reopened(), index, flow.device, flow.dtype, flow.mesh)
            bar.advance()


def next_token_loss(checkpoint: ModelSource, flow: Flow) -> float:
    """Mean next-token loss of the last hidden states, in nats; a document's last token has no target."""
    ends = checkpoint.build_ends(flow.device, flow.dtype)
    tokens, owners = torch.from_numpy(flow.own.tokens), flow.own.document_ids
    targets = torch.full_like(tokens, IGNORE)
    targets[:, :-1] = tokens[:, 1:]
    if owners is not None:
        ids = torch.from_numpy(owners)
        targets[:, :-1][(ids[:, 1:] != ids[:, :-1]) | (ids[:, :-1] < 0)] = IGNORE
    total = torch.zeros((), dtype=torch.float64, device=flow.device)
    softcap = checkpoint.config.logits_softcap
    for piece, _, _ in flow.batches():
        x, wanted = ends.head_input(flow.states[piece]), targets[piece].to(flow.device)
        total += linear_cross_entropy(x, ends.head_weight, wanted, reduction="sum", softcap=softcap).double()
    sums = torch.stack((total, (targets != IGNORE).sum().to(total)))
    loss, count = flow.mesh.sum(sums).tolist()
    return loss / max(count, 1)


def _finite(scores: list[float], flow: Flow) -> list[float]:
    """The scores. Raises ArtifactError when one is not finite."""
    if not bool(torch.isfinite(torch.tensor(scores, dtype=torch.float64)).all()):
        raise not_finite("hidden states", flow.dtype)
    return scores
