"""What the predictions of a model lose when one matrix, or two, are rounded, measured in the whole model.

Legend: T tokens, B sequences, S tokens of one, D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hone.base.run import Run
from hone.compress.allocations.base import HEAD_TOKENS
from hone.compress.capture import Flow
from hone.compress.engine.job import Job
from hone.compress.quantizers.base import Quantizer
from hone.compress.targets import matrix_name
from hone.eval.compare import divergence as divergence_of
from hone.model.context import Causal
from hone.model.decoder import Decoder


def probe(job: Job, flow: Flow, quantizer: Quantizer, num_sequences: int, run: Run) -> dict[str, float]:
    """Divergence in nats a token of `num_sequences` sequences with each matrix rounded, one at a time."""
    with torch.no_grad():
        model = job.checkpoint.build(job.device, job.dtype)
        tokens = torch.from_numpy(flow.calibration.tokens[:num_sequences]).to(job.device)
        reference = _hidden(model, tokens)
        layers = job.targets[: job.checkpoint.config.num_layers]  # not the head
        places = [(index, linear) for index, linears in enumerate(layers) for linear in linears]
        mine, found = places[job.mesh.rank :: job.mesh.world_size], {}  # the ranks share the matrices
        with run.progress("divergence", len(mine), "matrices") as bar:
            for index, linear in mine:
                with _rounded(model.layers[index].get_submodule(linear.path), quantizer):
                    found[matrix_name(index, linear.path)] = _divergence(model, tokens, reference)
                bar.advance()
    return {name: value for part in job.mesh.gather(found) for name, value in part.items()}


def probe_pairs(
    job: Job, flow: Flow, quantizer: Quantizer, num_sequences: int, run: Run
) -> dict[tuple[str, str], float]:
    """As `probe`, with every two matrices rounded together, by their names in the order of the layers."""
    with torch.no_grad():
        model = job.checkpoint.build(job.device, job.dtype)
        tokens = torch.from_numpy(flow.calibration.tokens[:num_sequences]).to(job.device)
        reference = _hidden(model, tokens)
        layers = job.targets[: job.checkpoint.config.num_layers]
        places = [(index, linear) for index, linears in enumerate(layers) for linear in linears]
        modules = [model.layers[index].get_submodule(linear.path) for index, linear in places]
        names = [matrix_name(index, linear.path) for index, linear in places]
        mine, found = range(len(places))[job.mesh.rank :: job.mesh.world_size], {}
        with run.progress("divergence of pairs", sum(len(places) - 1 - one for one in mine), "pairs") as bar:
            for one in mine:
                with _rounded(modules[one], quantizer):
                    for other in range(one + 1, len(places)):
                        with _rounded(modules[other], quantizer):
                            found[names[one], names[other]] = _divergence(model, tokens, reference)
                        bar.advance()
    return {pair: value for part in job.mesh.gather(found) for pair, value in part.items()}


@contextmanager
def _rounded(module: nn.Module, quantizer: Quantizer) -> Iterator[None]:
    """`module` with its weight rounded to nearest."""
    weight = module.weight.data
    module.weight.data = quantizer.nearest(weight.float()).to(weight.dtype)
    try:
        yield
    finally:
        module.weight.data = weight


def _hidden(model: Decoder, tokens: Tensor) -> Tensor:
    """Last hidden states [T, D] of token rows [B, S]."""
    return torch.cat([model.hidden(row[None], Causal(row[None]))[0] for row in tokens])


def _divergence(model: Decoder, tokens: Tensor, reference: Tensor) -> float:
    total, hidden = 0.0, _hidden(model, tokens)
    for expected, given in zip(reference.split(HEAD_TOKENS), hidden.split(HEAD_TOKENS), strict=True):
        divergence = divergence_of(model.head(expected).float(), model.head(given).float())
        total += float(divergence.sum(dtype=torch.float64))
    return total / len(hidden)
