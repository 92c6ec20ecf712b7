"""`hone cost size`: parameters and tokens of a model, with what it will serve counted in."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from hone.cost.calculators.sheet import Calculator, Sheet
from hone.cost.scaling.laws import LAWS, Law

PAPER = "Sardana et al. 2024, arXiv:2401.00448"


class Size(Calculator):
    """Compute-optimal, trained longer for cheaper serving, and how far the published fits disagree."""

    parameters: float | None = Field(
        None, gt=0, description="Size of the model whose quality is wanted, trained compute-optimally."
    )
    flops: float | None = Field(
        None, gt=0, description="FLOPs of training in place of it: the compute-optimal size of them."
    )
    tokens: float | None = Field(
        None, gt=0, description="Tokens of its training, where they are not the compute-optimal ones."
    )
    served_tokens: float = Field(0.0, ge=0, description="Tokens that it will read and write in its life.")
    law: Literal["hoffmann", "hoffmann_source", "sardana", "besiroglu"] = Field(
        "sardana", description="Fit that is printed in full; the others follow."
    )
    prompt_share: float = Field(0.5, ge=0, le=1, description="Of the served tokens, those of prompts.")
    train_mfu: float | None = Field(
        None, gt=0, le=1, description="Use of the peak in training; with the three below, money in place of FLOPs."
    )
    prefill_mfu: float | None = Field(None, gt=0, le=1, description="Use of the peak in prompts.")
    decode_mfu: float | None = Field(None, gt=0, le=1, description="Use of the peak in generated tokens.")
    peak_tflops: float | None = Field(None, gt=0, description="Dense TFLOP/s of a GPU in training.")
    serve_peak_tflops: float | None = Field(
        None, gt=0, description="The same in serving, such as fp8's; empty: that of training."
    )
    usd_per_gpu_hour: float | None = Field(None, gt=0, description="Price of a GPU and hour.")

    @model_validator(mode="after")
    def _enough_is_given(self) -> Self:
        if (self.parameters is None) == (self.flops is None):
            raise ValueError("give parameters or flops, one of the two")
        if self.flops is not None and self.tokens is not None:
            raise ValueError("tokens go with parameters: flops have their own")
        money = (self.train_mfu, self.prefill_mfu, self.decode_mfu, self.peak_tflops, self.usd_per_gpu_hour)
        if any(one is not None for one in money) and None in money:
            raise ValueError("money needs train_mfu, prefill_mfu, decode_mfu, peak_tflops and usd_per_gpu_hour")
        return self

    def wanted(self, law: Law) -> tuple[float, float]:
        """Parameters and tokens of the model whose quality is wanted, by `law`."""
        if self.flops is not None:
            return law.compute_optimal(self.flops)
        assert self.parameters is not None
        return self.parameters, self.tokens or law.chinchilla_tokens(self.parameters)

    def cost(self, parameters: float, tokens: float) -> float:
        """What training and serving cost: FLOPs, or dollars where rates and a price are given."""
        train, serve = 6 * parameters * tokens, 2 * parameters * self.served_tokens
        if self.train_mfu is None:
            return train + serve
        assert self.prefill_mfu and self.decode_mfu and self.peak_tflops and self.usd_per_gpu_hour
        peak, serving = self.peak_tflops * 1e12, (self.serve_peak_tflops or self.peak_tflops) * 1e12
        seconds = train / (peak * self.train_mfu)
        seconds += serve * (self.prompt_share / self.prefill_mfu + (1 - self.prompt_share) / self.decode_mfu) / serving
        return seconds / 3600 * self.usd_per_gpu_hour

    def sheet(self) -> Sheet:
        """The wanted model, the cheapest one of its loss, and the same by every fit."""
        law = LAWS[self.law]
        parameters, tokens = self.wanted(law)
        unit = "FLOP" if self.train_mfu is None else "$"
        found = Sheet(f"parameters and tokens, by {law.source}")
        numbers = {"E": law.floor, "A": law.a, "B": law.b, "alpha": law.alpha, "beta": law.beta}
        loss = found.add("loss", "E + A / N ** alpha + B / D ** beta", "nats/token", law.source, value=law.loss(parameters, tokens), N=parameters, D=tokens, **numbers)  # fmt: skip
        found.add("tokens a parameter", "D / N", "", D=tokens, N=parameters)
        now = found.add("training alone", "6 * N * D", "FLOP", N=parameters, D=tokens)
        if self.served_tokens:
            now = found.add(
                "with serving", "6 * N * D + 2 * N * S", "FLOP", PAPER, N=parameters, D=tokens, S=self.served_tokens
            )
        if self.train_mfu is not None:
            now = self.cost(parameters, tokens)
            found.verdicts.append(
                f"this model costs ${now:,.0f} to train and to serve, each at its own use of the peak"
            )
        best, long, least = law.cheapest(loss, self.cost)
        found.add("cheapest of this loss: parameters", "N", "", PAPER, N=best)
        found.add("trained on", "(B / (L - E - A / N ** alpha)) ** (1 / beta)", "tokens", N=best, L=loss, **numbers)
        found.add("tokens a parameter, of the cheapest", "D / N", "", D=long, N=best)
        found.add(
            "tokens over those of the compute-optimal model of its size",
            "D / C",
            "",
            D=long,
            C=law.chinchilla_tokens(best),
        )
        found.add(f"change of {unit}", "best / now - 1", "%", best=least, now=now)
        found.verdicts.append("The same by every published fit (the spread is how little is known):")
        for other in LAWS.values():
            size, data = self.wanted(other)
            model, tokens_of, cost = other.cheapest(other.loss(size, data), self.cost)
            found.verdicts.append(
                f"  {other.name:15} {size / 1e9:.3g}B on {data / 1e12:.3g}T tokens -> {model / 1e9:.3g}B on {tokens_of / 1e12:.3g}T: "
                f"{cost / self.cost(size, data) - 1:+.1%} {unit}"
            )
        return found
