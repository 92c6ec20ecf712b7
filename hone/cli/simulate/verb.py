"""Verb simulate: a serving run under a predicted clock, on this machine or on one that is not here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hone.cli.options import calibrated, circumstances, fields, list_fields, need, say_doubt

if TYPE_CHECKING:
    from hone.base.figure import Figure
    from hone.plan.simulate.simulation import Simulated

OF_SIMULATE = ("out", "machine", "device", "quiet")
_USAGE = """usage: hone simulate MODEL_FOLDER [TRACE] [--machine=H200] [--out=FILE.csv] [--field=value ...]

The engine's own scheduler, pages and prefix cache serve the requests of TRACE (Azure's or BurstGPT's CSV, Mooncake's JSON lines), or
drawn ones (--traffic.rate=4), under a clock that each step moves by its predicted time. MODEL_FOLDER needs no weights, only its config.json.
--machine: a GPU of a data sheet, whose latencies are then lower limits, or a Machine's JSON file; without it, this machine as calibrated.
--out: a CSV file with the times of every request."""


def simulate(words: list[str], options: dict[str, str]) -> int:
    """Simulates a serving run and prints its figures."""
    from pathlib import Path

    from hone.base.durable import write_atomic
    from hone.base.errors import SpecError
    from hone.base.partial import PULL, need_local
    from hone.measure.machine import machine_of
    from hone.model.facts import CheckpointFacts
    from hone.plan.simulate.figures import to_csv
    from hone.plan.simulate.opening import machine_named
    from hone.plan.simulate.simulation import run_simulation
    from hone.plan.simulate.spec import SimulationSpec

    if "help" in options:
        print(f"{_USAGE}\n\nfields:\n{list_fields(SimulationSpec)}")
        return 0
    changes = fields(options, *OF_SIMULATE)
    if len(words) == 3:
        if changes.get("traffic.trace", words[2]) != words[2]:
            raise SpecError(
                f"two traces are given: {words[2]} and {changes['traffic.trace']}", fix="leave one of them out"
            )
        changes["traffic.trace"] = words[2]
        words = words[:2]
    folder = need(words, "MODEL_FOLDER")
    need_local(folder, PULL)
    if not (Path(folder) / CheckpointFacts.mark).is_file():
        raise SpecError(
            f"{folder} has no {CheckpointFacts.mark}", fix="give the folder of a model, its weights are not needed"
        )
    if not any(name.partition(".")[0] == "traffic" for name in changes):
        raise SpecError("hone simulate needs requests", fix="give a TRACE file, or --traffic.rate=REQUESTS_PER_S")
    spec = SimulationSpec.from_overrides(changes)
    if "machine" in options:
        if "device" in options:
            raise SpecError(
                "--machine and --device are both given", fix="leave --device out: the machine says what computes"
            )
        machine = machine_named(options["machine"])
    else:
        run = calibrated(circumstances(options))
        say_doubt(run)
        machine = machine_of(run)
    model = CheckpointFacts.of(Path(folder))
    found = run_simulation(spec, model, machine)
    if "out" in options:
        write_atomic(Path(options["out"]), to_csv(found.run.served).encode())
    print(report(found, machine.processor))
    return 0


_EXPLAINED = {
    "attainment", "utilization", "page_waste", "goodput_requests_per_s", "kv_transfer_p50_s", "kv_waiting_bytes",
    "prefill_utilization", "decode_utilization", "break_even_link_bytes_per_s", "best_prefill_replicas",
}  # fmt: skip


def report(found: Simulated, processor: str) -> str:
    """The figures of a run as text: latencies in a table, then one a line."""
    trace, by_name = found.trace, {one.name: one for one in found.figures}
    gaps = "" if trace.burstiness is None else f", gaps' coefficient of variation {trace.burstiness:.2f}"
    apart = found.run.apart
    replicas = (
        str(len(found.run.members)) if apart is None else f"({apart.how.prefill} prefill + {apart.how.decode} decode)"
    )
    lines = [
        f"{len(trace.arrivals)} requests of {trace.source}: {trace.rate:.4g} requests/s{gaps}, on {processor}",
        f"{replicas} x {found.opened.sizes.num_pages} pages of {found.opened.sizes.block_size} tokens, "
        f"max_num_seqs={found.opened.sizes.max_num_seqs} max_num_batched_tokens={found.opened.sizes.max_num_batched_tokens}",
    ]
    if found.left_out:
        lines.append(f"left out: {found.left_out} requests longer than {found.opened.sizes.max_model_len} tokens")
    if found.opened.steps.bound:
        lines.append(
            "step times are limits of the hardware, since nothing is calibrated: latencies are at least these, goodput at most this"
        )
    lines.append(f"\n{'s':8}{'p50':>12}{'p90':>12}{'p99':>12}")
    for name in ("ttft", "tpot", "e2e", "queue"):
        lines.append(
            f"{name:8}" + "".join(f"{_value(by_name.pop(f'{name}_p{percent}_s')):>12}" for percent in (50, 90, 99))
        )
    lines.append("")
    for one in by_name.values():
        about = one.note.partition(";")[0] if one.name in _EXPLAINED else ""
        about = one.note.partition(";")[0] if one.value is None else about
        lines.append(f"{one.name:24}{_value(one):>12} {one.unit:12}{about}".rstrip())
    return "\n".join(lines)


def _value(figure: Figure) -> str:
    return "unknown" if figure.value is None else f"{figure.value:.4g}"
