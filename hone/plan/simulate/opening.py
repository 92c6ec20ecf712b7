"""Opens a simulation of an engine: its sizes and step times from a model's facts and a machine, as the engine itself would have them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hone.base.errors import SpecError, did_you_mean
from hone.measure.machine import Machine, describe
from hone.model.facts import CheckpointFacts
from hone.plan.simulate.replica import EngineSizes
from hone.plan.simulate.steps import PredictedSteps
from hone.serve.spec import EngineSpec


class Opened(NamedTuple):
    """An engine as a simulation needs it."""

    sizes: EngineSizes
    steps: PredictedSteps
    dtype: str


def machine_named(name: str, device: str = "cpu") -> Machine:
    """This machine for '' with its calibration, that of a JSON file (`Machine`), or one GPU of a data sheet ('H200'), uncalibrated.

    Raises SpecError for another name or a file that is no machine.
    """
    from hone.cost.catalogue.read import catalogue

    if not name:
        return describe(device)
    if Path(name).is_file():
        try:
            return Machine.model_validate_json(Path(name).read_text(encoding="utf8"))
        except ValueError as error:
            raise SpecError(
                f"{name} describes no machine: {str(error).splitlines()[0]}", fix="give the JSON of a Machine"
            ) from None
    known = [row for row in catalogue().accelerators if row.kind == "gpu" and row.memory_bytes and row.bytes_per_s]
    sheet = next((row for row in known if name.lower() in {one.lower() for one in (row.name, *row.names)}), None)
    if sheet is None:
        names = [row.short for row in known]
        raise SpecError(
            f"--machine={name} is neither a file nor a GPU with a data sheet",
            fix=f"{did_you_mean(name, names)}one of: {', '.join(names)}",
        )
    return describe("cpu").model_copy(update={"gpus": (sheet.gpu(),), "device": "cuda", "calibration": None})


def open_simulation(
    spec: EngineSpec, model: CheckpointFacts, machine: Machine, *, host_s: float = 0.0, step_factor: float = 1.0
) -> Opened:
    """The sizes and step times of an engine of `model` on `machine`. `host_s` and `step_factor` as in `PredictedSteps`.

    Raises SpecError for what a simulation cannot follow, FitError for a model that does not fit.
    """
    from hone.cost.serve.offload import ExpertCopies
    from hone.serve.planning import HELD_24, budget_on, expert_copies, of_a_rank, pages_bytes, serving_of, sparse_saving
    from hone.serve.sizing import DeviceMemory, cache_pages, kept_of, sized, will_widen, work_bytes

    _followed(spec)
    if spec.tensor_parallel_size > 1 and machine.num_ranks == 1:
        machine = machine.model_copy(update={"num_ranks": spec.num_ranks})
    spec = sized(spec, machine)
    part = of_a_rank(spec, model)
    dtype = part.dtype if spec.dtype == "auto" else spec.dtype
    one = pages_bytes(spec, [part])
    budget, copies = budget_on(spec, part, machine, one), expert_copies(spec, part, dtype)
    weights = part.loaded_bytes(dtype) - sparse_saving(spec, part, dtype) * HELD_24
    if isinstance(copies, ExpertCopies):
        weights -= sum(size * (count - copies.num_cached) for count, _, size in copies.layers)
    sizes = spec
    if budget is not None:
        weights = budget.ends + budget.offload.device_bytes
        sizes = budget.sized(spec, weights)
    longest, kept = spec.max_model_len or part.config.max_seq_len, kept_of(spec, part.config)
    if kept.compaction is not None:
        raise SpecError(
            f"engine.kv_policy={spec.kv_policy.kind if spec.kv_policy else ''} moves keys between steps, which a simulation does not follow",
            fix="use full, window or streaming_llm",
        )
    assert spec.max_num_batched_tokens is not None and spec.max_num_seqs is not None, "sized() fills both in"
    most = kept.most_pages(longest, spec.max_num_batched_tokens, spec.block_size)
    dims = part.config.dims()
    widens = will_widen(part.loaded_bytes(dtype), dims, dtype, machine)
    work = work_bytes(dims, spec, dtype, machine.device, widens=widens)
    pages = cache_pages(sizes, one, DeviceMemory.of(machine), most * spec.block_size, weights=weights, work=work)
    serving = serving_of(spec, part, machine, copies if budget is None else budget.offload)
    if machine.device.startswith("cuda") and machine.elsewhere:
        # Which kernels there are is asked of this machine; a GPU with a data sheet has those that read pages in place.
        serving = replace(serving, in_place=True, compiled=False)
    return Opened(
        EngineSizes(
            num_pages=pages,
            block_size=spec.block_size,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            max_model_len=longest if most <= pages else min(longest, pages * spec.block_size),
            enable_prefix_caching=spec.enable_prefix_caching,
            batching=spec.batching,
            max_delay_s=spec.max_delay_s,
            steps_ahead=_ahead(spec, machine),
            eviction=spec.eviction,  # type: ignore[arg-type]
            kept=kept,
        ),
        PredictedSteps(serving, host_s=host_s, factor=step_factor),
        dtype,
    )


def _ahead(spec: EngineSpec, machine: Machine) -> int:
    """Steps that the engine launches before it reads the last one's tokens."""
    wanted = spec.async_scheduling
    return int(machine.device.startswith("cuda") if wanted is None else wanted)


def _followed(spec: EngineSpec) -> None:
    """Raises SpecError for an engine whose steps a simulation cannot predict."""
    for name, given, why in (
        (
            "drafter",
            spec.drafter is not None or spec.draft is not None,
            "how many guesses are accepted is unknown before",
        ),
        ("pipeline_parallel_size", spec.pipeline_parallel_size > 1, "the stages' steps overlap"),
    ):
        if given:
            raise SpecError(f"engine.{name} is not simulated: {why}", fix=f"leave engine.{name} out")
