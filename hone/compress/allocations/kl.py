"""Allocation by divergence: what the model's predictions lose when one matrix alone is rounded.

Legend: T tokens, V vocabulary, D hidden width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from hone.base.figure import Estimate
from hone.base.lazy import lazy
from hone.compress.allocations.base import HEAD_TOKENS, Allocation, candidates
from hone.compress.quantizers.base import quantizer_of
from hone.compress.targets import matrix_name

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor

    from hone.base.run import Run
    from hone.compress.capture import Flow
    from hone.compress.engine.job import Job

torch = lazy("torch")
compare = lazy("hone.eval.compare")
contexts = lazy("hone.model.context")
sensitivity = lazy("hone.compress.allocations.sensitivity")

SHARES = (0.55, 0.8)
"""Divergence of the model over the sum of losses: 0.58 and 0.59 at 3.125 and 4.125 bits, 0.77 at 3.9 bits with 16 calibration
sequences (reference-29m, gptq). The losses are of rounding to nearest, of which gptq makes up a part."""


class KLAllocation(Allocation):
    """Bits by the divergence of the predictions that one rounded matrix causes at `probe_bits`, scaled to other bits by its output error."""

    probe_bits: int = Field(3, ge=2, le=8, description="Bits at which each matrix's divergence is measured.")
    probe_sequences: int = Field(4, gt=0, description="Calibration sequences that the divergence is measured on.")

    @model_validator(mode="after")
    def _probe_is_a_candidate(self) -> Self:
        if self.probe_bits not in self.bits:
            raise ValueError(f"probe_bits {self.probe_bits} is none of the candidate bits {list(self.bits)}")
        return self

    def probes(self, num_matrices: int) -> int:
        return self.probe_sequences * num_matrices

    def predicted(self, loss: float) -> Estimate:
        low, high = SHARES
        formula = f"between {low} and {high} x the sum of divergences {loss:.4g}, as gptq on hone's 29 M model"
        return Estimate(value=(low + high) / 2 * loss, unit="nats/token", formula=formula)

    def losses(self, job: Job, flow: Flow, run: Run) -> dict[str, dict[int, float]]:
        """Holds the whole uncompressed model on the device."""
        quantizers = candidates(quantizer_of(job.steps), self.bits)
        measured = {one.name: one.errors for one in sensitivity.measure(job, flow, quantizers, run)}
        probed = self._probe(job, flow, quantizers[self.probe_bits], run)
        found = {}
        for name, errors in measured.items():
            scale = probed[name] / max(errors[self.probe_bits], 1e-30)
            found[name] = {bits: scale * error for bits, error in errors.items()}
        return found

    def _probe(self, job: Job, flow: Flow, quantizer: Any, run: Run) -> dict[str, float]:
        """Divergence in nats a token with each matrix rounded, one at a time."""
        with torch.no_grad():
            model = job.checkpoint.build(job.device, job.dtype)
            tokens = torch.from_numpy(flow.calibration.tokens[: self.probe_sequences]).to(job.device)
            reference = self._hidden(model, tokens)
            layers = job.targets[: job.checkpoint.config.num_layers]  # not the head
            places = [(index, linear) for index, linears in enumerate(layers) for linear in linears]
            mine, found = places[job.mesh.rank :: job.mesh.world_size], {}  # the ranks share the matrices
            with run.progress("divergence", len(mine), "matrices") as bar:
                for index, linear in mine:
                    module = model.layers[index].get_submodule(linear.path)
                    weight = module.weight.data
                    module.weight.data = quantizer.nearest(weight.float()).to(weight.dtype)
                    found[matrix_name(index, linear.path)] = self._divergence(model, tokens, reference)
                    module.weight.data = weight
                    bar.advance()
        return {name: value for part in job.mesh.gather(found) for name, value in part.items()}

    def _hidden(self, model: Any, tokens: Tensor) -> Tensor:
        """Last hidden states [T, D] of token rows [B, S]."""
        return torch.cat([model.hidden(row[None], contexts.Causal(row[None]))[0] for row in tokens])

    def _divergence(self, model: Any, tokens: Tensor, reference: Tensor) -> float:
        total, hidden = 0.0, self._hidden(model, tokens)
        for expected, given in zip(reference.split(HEAD_TOKENS), hidden.split(HEAD_TOKENS), strict=True):
            divergence = compare.divergence(model.head(expected).float(), model.head(given).float())
            total += float(divergence.sum(dtype=torch.float64))
        return total / len(hidden)
