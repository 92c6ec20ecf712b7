"""Allocation by the curvature of the loss: output errors of a matrix, each row's weighted by the squared gradient of its output.

Legend: N rows, K columns of a matrix, H [K, K] mean of x x^T, D [N, K] change of the weights, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from hone.base.lazy import lazy
from hone.compress.allocations.base import HEAD_TOKENS, Allocation, candidates
from hone.compress.quantizers.base import quantizer_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hone.base.run import Run
    from hone.compress.capture import Flow
    from hone.compress.engine.job import Job
    from hone.model.decoder import Decoder

torch = lazy("torch")
capture = lazy("hone.compress.capture")
gradients = lazy("hone.compress.gradients")
sensitivity = lazy("hone.compress.allocations.sensitivity")


class FisherAllocation(Allocation):
    """Bits by 1/2 sum_i E[g_i^2] (D H D^T)_ii, g the gradients of the outputs for tokens that the model itself draws: the divergence of its predictions, by the Kronecker-factored Fisher matrix of Martens and Grosse 2015, arXiv:1503.05671."""

    paper: ClassVar[str] = "arXiv:1503.05671"

    gradient_sequences: int = Field(8, gt=0, description="Calibration sequences that the gradients are measured on.")

    @property
    def differentiated(self) -> int:
        return self.gradient_sequences

    def losses(self, job: Job, flow: Flow, run: Run) -> dict[str, dict[int, float]]:
        """Holds the whole uncompressed model on the device, with what its backward pass keeps of one sequence."""
        quantizers = candidates(quantizer_of(job.steps), self.bits)
        rows = self._energies(job, flow, run)
        measured = sensitivity.measure(job, flow, quantizers, run, rows)
        return {one.name: {bits: 0.5 * error for bits, error in one.errors.items()} for one in measured}

    def _energies(self, job: Job, flow: Flow, run: Run) -> dict[str, Tensor]:
        """Mean of g^2 [N] over the tokens, of every matrix, float32 on the engine's device."""
        few = flow.calibration.part(slice(self.gradient_sequences))
        one = capture.Flow(few, 1, flow.device, flow.dtype, mesh=flow.mesh)
        sums: dict[str, Tensor] = {}

        def watch(name: str, linear: nn.Module) -> None:
            sums[name] = torch.zeros(linear.weight.shape[0], dtype=torch.float64, device=job.device)
            linear.register_forward_hook(_Weigh(sums[name]))

        gradients.differentiate(job, one, run, watch, _drawn)
        return {name: (flow.mesh.sum(total) / few.num_tokens).float() for name, total in sums.items()}


class _Weigh:
    """A forward hook of a linear that adds the squared gradients of its outputs to `total` [N], in the backward pass."""

    def __init__(self, total: Tensor) -> None:
        self.total = total

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        out.register_hook(self._add)

    def _add(self, gradient: Tensor) -> None:
        self.total += gradient.flatten(0, -2).double().square().sum(0)


def _drawn(model: Decoder, hidden: Tensor, rows: Tensor, piece: slice, flow: Any) -> Tensor:
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
