"""What fits: the compression with the best quality within bytes or a time a token, or the fewest bytes that lose no more than asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hone.base.errors import FitError, SpecError
from hone.base.figure import Estimate, human_bytes
from hone.base.plan import MEMORY, Facts, Plan, need
from hone.compress.allocations.base import read_bytes, read_seconds
from hone.compress.planning import check_model
from hone.compress.plans.calibrated import calibrated_of
from hone.compress.spec import CompressSpec
from hone.compress.written import engines
from hone.cost.serve import serving
from hone.feed.facts import DataFacts
from hone.model.facts import CheckpointFacts
from hone.serve import planning
from hone.serve import spec as engine

if TYPE_CHECKING:
    from hone.measure.machine import Machine

CONTEXT = 512
"""Tokens before the one whose latency is predicted; one sequence decodes alone."""

QUOTED = Path(__file__).with_name("quoted.json")
"""Divergences of hone's reference model by method, which `python -m benchmarks.compression_page` copies from the ledger."""


class Option(NamedTuple):
    """A way to compress, of those with the best quality first."""

    name: str
    steps: tuple[dict[str, Any], ...]
    allocated: tuple[int, ...] = ()
    """Bits that an allocation chooses from to use up the budget; empty: the same bits for all."""
    losses: str = "kl"
    """The allocation that chooses."""
    method: str = ""
    """The same method in the ledger, for its divergence from the reference model; "" where the allocation predicts that of this
    model."""


def options(calibrated: bool) -> tuple[Option, ...]:
    """Candidates in the order of quality measured on hone's reference model (docs/compression.md).

    Without calibration inputs weights are rounded to nearest with searched scales, and nothing is allocated.
    """
    int8 = Option("int8, a scale per row", ({"kind": "rtn", "bits": 8, "group_size": 0},), method="rtn int8 channel")
    quantizer = {"kind": "gptq"} if calibrated else {"kind": "rtn", "scale": "search"}
    four = {**quantizer, "bits": 4, "group_size": 128, "uneven": "nearest"}
    three = four | {"bits": 3}
    method = "gptq" if calibrated else "rtn searched"
    plain = (Option(f"int4 {quantizer['kind']}, groups of 128", (four,), method=f"{method} int4 g128"),)
    low = (Option(f"int3 {quantizer['kind']}, groups of 128", (three,), method=f"{method} int3 g128"),)
    if not calibrated:
        return (int8, *plain, *low)
    # Only 4 and 8 bits have fast kernels: fewer bits are chosen where nothing else fits.
    return (
        int8,
        Option("int4 and int8 gptq, by sensitivity", (four,), (4, 8)),
        *plain,
        Option("int2 to int4 gptq, by sensitivity", (four,), (2, 3, 4)),
        *low,  # where memory does not hold the whole model, which a measurement of sensitivities takes
    )


def lean_options(calibrated: bool) -> tuple[Option, ...]:
    """Candidates for a limit of the divergence: bits of each matrix by what it loses, then the same bits for all, the fewest first.

    What the first two lose is predicted from this model's own inputs, what the others lose is quoted of another model.
    """
    plain = tuple(one for one in reversed(options(calibrated)) if not one.allocated)
    if not calibrated:
        return plain
    four = {"kind": "gptq", "bits": 4, "group_size": 128, "uneven": "nearest"}
    each = Option("2 to 8 bits gptq, by divergence", (four,), (2, 3, 4, 8))
    return (each, each._replace(name="2 to 8 bits gptq, by output errors", losses="hessian"), *plain)


class Tried(NamedTuple):
    """An option with its plan: bytes, seconds a token, and what is wrong with it."""

    name: str
    model_bytes: float
    latency_s: float
    wrong: str
    kl: Estimate | None = None
    """Quoted, in nats a token; see `quoted_kl`."""
    most: bool = False
    """Whether bytes and seconds are the most that may be: the fewest bytes are chosen when losses are measured."""

    def line(self, chosen: bool) -> str:
        """A row of the table that says why."""
        mark = "chosen" if chosen else self.wrong or "not needed: a better one fits"
        quality = "" if self.kl is None else f"KL {self.kl.value:.4f}*"
        up_to = "<= " if self.most else ""
        size, latency = up_to + human_bytes(self.model_bytes), f"{up_to}{1e3 * self.latency_s:.2f} ms/token"
        latency = latency if self.latency_s == self.latency_s else "-"  # not planned
        return f"{self.name:36} {size:>13} {latency:>18} {quality:>10}  {mark}"


def quoted() -> dict[str, Any]:
    """The `model` whose divergences are quoted with its size, the `ledger` they come from, and `kl` by method: value, n, date, commit."""
    return json.loads(QUOTED.read_text(encoding="utf8"))


def quoted_kl(method: str, known: Mapping[str, Any]) -> Estimate | None:
    """The divergence that the ledger has of `method` on another model, which its formula names; None where it has none."""
    row = known["kl"].get(method)
    if row is None:
        return None
    model = known["model"]
    seeds = f", mean of {row['n']} calibration seeds" if row["n"] > 1 else ""
    formula = f"quoted from a {model['num_params'] / 1e6:.0f} M model ({model['name']}), {row['tokens']:,} tokens{seeds}, {row['date']}"
    return Estimate(value=row["value"], unit="nats/token", formula=formula)


def fitted(spec: CompressSpec, facts: Mapping[str, Facts], machine: Machine) -> Plan:
    """The plan of the first option within `spec.fit`, `spec.target_latency` and `spec.max_kl`, with the spec of its steps as `chosen`, and why as notes.

    Options come in the order of quality, with `max_kl` in that of bytes. Raises SpecError when the model fits as it is, FitError when no option does.
    """
    model = need(facts, "model", CheckpointFacts)
    data = need(facts, "data", DataFacts) if "data" in facts else None
    check_model(spec, model)
    calibrated = calibrated_of(spec, model, data) is not None
    most = read_bytes(spec.fit) if spec.fit is not None else float("inf")
    longest = read_seconds(spec.target_latency) if spec.target_latency is not None else float("inf")
    dense = _tried("as it is", model, model.weights_bytes, machine, most, longest)
    if not dense.wrong and spec.max_kl is None:
        wanted = " and ".join(text for text in (spec.fit, spec.target_latency) if text is not None)
        raise SpecError(
            f"{model.where} takes {human_bytes(dense.model_bytes)} and {1e3 * dense.latency_s:.2f} ms a token as it is, within "
            f"{wanted}",
            fix="use it as it is, or give a smaller budget",
        )
    tried, found, known = [dense], None, quoted()
    for option in options(calibrated) if spec.max_kl is None else lean_options(calibrated):
        if option.allocated and spec.fit is None and spec.max_kl is None:
            continue
        candidate = _candidate(spec, model, option)
        try:
            planned = candidate.plan(facts, machine)
        except engines.Refused as refused:
            tried.append(Tried(option.name, most, float("nan"), refused.what))
            continue
        except FitError:
            tried.append(Tried(option.name, most, float("nan"), "too large with the fewest bits"))
            continue
        size = planned.estimates["model_bytes"]
        one = _tried(option.name, planned.facts, size.value, machine, most, longest)._replace(
            kl=quoted_kl(option.method, known), most=size.bound
        )
        if spec.max_kl is not None and not option.allocated and not one.wrong:
            one = one._replace(wrong=_loses(one.kl, spec.max_kl))
        memory = planned.estimates[MEMORY].value
        if option.allocated and memory > machine.free_memory_bytes:
            one = one._replace(wrong=f"takes {human_bytes(memory)} of memory: it measures the whole model")
        tried.append(one)
        if not one.wrong and found is None:
            found = (candidate, planned, len(tried) - 1)
    if found is None:
        asked = f"{spec.fit or 'any size'} and {spec.target_latency or 'any latency'}"
        asked += "" if spec.max_kl is None else f" and {spec.max_kl:g} nats a token"
        lines = "; ".join(" ".join(one.line(chosen=False).split()) for one in tried)
        raise FitError(
            f"no compression of {model.where} is within {asked}: {lines}",
            fix="raise the budget"
            + ("" if calibrated else ", or give calibration inputs (data or calibration_text) for fewer bits"),
        )
    candidate, planned, place = found
    told = sorted({one.kl.formula for one in tried if one.kl is not None})
    order = "for the order alone" if spec.max_kl is None or candidate.allocation is not None else "of another model"
    said = f"* {order}, {'; '.join(told)} ({known['ledger']}). {model.where} may lose more or less; "
    said += (
        "its own divergence is measured at the end (kl_to_dense)"
        if calibrated
        else "hone eval with --from.reference measures it"
    )
    why = (*(one.line(index == place) for index, one in enumerate(tried)), *([said] if told else []))
    return planned.model_copy(update={"chosen": candidate, "notes": why})


def _candidate(spec: CompressSpec, model: CheckpointFacts, option: Option) -> CompressSpec:
    """`spec` with the steps of `option` in place of what it asks for."""
    fields: dict[str, Any] = {"fit": None, "target_latency": None, "max_kl": None, "steps": list(option.steps)}
    if model.dtype == "float32" and spec.rest_dtype == "keep":
        fields["rest_dtype"] = "bfloat16"
    if option.allocated:
        fields["allocation"] = {"kind": option.losses, "bits": option.allocated, "model_bytes": spec.fit}
        fields["allocation"] |= {"max_kl": spec.max_kl} | ({"probe_bits": 4} if option.losses == "kl" else {})
    return type(spec).read(spec.model_dump(mode="json") | fields)


def _loses(kl: Estimate | None, most: float) -> str:
    """What is wrong with an option whose divergence is `kl`, quoted; "" where it is within `most`."""
    if kl is None:
        return "no divergence is known of it"
    return "" if kl.value <= most else f"loses more than {most:g} nats a token"


def _tried(name: str, facts: Any, size: float, machine: Machine, most: float, longest: float) -> Tried:
    spec = planning.sized(engine.EngineSpec(), machine)
    step = planning.serving_of(spec, facts, machine).step_seconds(serving.StepKind(1, CONTEXT, (), 1, 1))
    wrong = []
    if size > most:
        wrong.append(f"larger than {human_bytes(most)}")
    if step.value > longest:
        wrong.append(f"slower than {1e3 * longest:g} ms")
    return Tried(name, size, step.value, ", ".join(wrong))
