"""Words and options of a command line: parsed, and checked so that none is silently ignored."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

FLAGS = ("redo", "quiet", "help", "version", "plan", "json", "power_trace", "front", "advice")
"""Options without a value; --redo may have one, after `=`."""
CIRCUMSTANCES = ("device", "redo", "quiet", "executor", "workers", "numa_binding")
"""Options that do not change the result."""
_VALUED = (
    "numa_binding",
    "out",
    "work",
    "device",
    "executor",
    "workers",
    "mesh",
    "config",
    "nproc_per_node",
    "host",
    "port",
)
_HYPHENS = ("api_key", "chat_template", "nproc_per_node", "numa_binding")
"""Options that other programs write with hyphens."""
MAIN_ROLE = {"train": "data", "teach": "model", "compress": "model", "eval": "model", "bench": "model"}
"""The role of the folder that is a verb's argument."""
STAGE_OF = {"bench": "serve"}
"""The stage of a verb, where it has another name."""


def parse(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Splits arguments into words and options: `--a.b=c`, `--a.b c`, or an option without a value (value 'true').

    Flags and the boolean fields of the command's spec have no value. After `--` all are words. Raises SpecError for an
    option without its value, or with two.
    """
    from hone.base.errors import SpecError

    words: list[str] = []
    options: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            words += rest
            break
        if argument in ("-h", "-help"):
            argument = "--help"
        if not argument.startswith("--"):
            words.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        name = name.replace("-", "_") if name.replace("-", "_") in _HYPHENS else name
        if not equals:
            verb = words[0] if words else ""
            if name in FLAGS or _is_boolean(verb, name):
                value = "true"
            elif rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif name in _VALUED or _is_boolean(verb, name) is False:
                raise SpecError(f"--{name} needs a value", fix=f"write --{name}=VALUE")
            else:
                value = "true"
        if name in options:
            raise SpecError(f"--{name} is given twice: {options[name]} and {value}", fix="keep one of the two")
        options[name] = value
    return words, options


def _is_boolean(verb: str, name: str) -> bool | None:
    """Whether field `name` of the verb's spec is boolean; None when the spec has no such field."""
    if name in _VALUED:
        return False
    if name.startswith("profiling.") and verb in ("train", "run"):
        from hone.train.live.profiling import Profiling

        return dict(_kinds(Profiling)).get(name.removeprefix("profiling.")) == "bool"
    kinds = {row: kind for cls in specs_of(verb) for row, kind in _kinds(cls)}
    field = name.partition(".")[2] if verb in ("run", "plan") else name
    return None if field not in kinds else kinds[field] == "bool"


def specs_of(verb: str) -> list[Any]:
    """The specs whose fields are options of a verb."""
    from hone.base.lazy import resolve
    from hone.base.stage import STAGES

    stage = STAGE_OF.get(verb, verb)
    if verb in ("run", "plan"):
        return [resolve(row) for row in STAGES.values()]
    if verb in ("data", *MAIN_ROLE):
        return [resolve(STAGES[stage])]
    others = {
        "serve": "hone.serve.http:ServeConfig",
        "generate": "hone.serve.request:SamplingParams",
        "hardware": "hone.cli.hardware.spec:HardwareSpec",
        "simulate": "hone.plan.simulate.spec:SimulationSpec",
        "merge": "hone.exports.merged.spec:MergeSpec",
    }
    if verb == "export":
        table = resolve("hone.exports:EXPORTS")
        return [table[name] for name in table]
    if verb == "chat":
        return [resolve("hone.cli.chat.spec:ChatSpec"), resolve(others["generate"])]
    return [resolve(others[verb])] if verb in others else []


def _kinds(cls: Any) -> list[tuple[str, str]]:
    from hone.base.spec import describe_fields

    return [(name, kind) for name, kind, _, _ in describe_fields(cls)]


def need(words: list[str], what: str) -> str:
    """The only argument of a verb. Raises SpecError when there is none, or more."""
    from hone.base.errors import SpecError

    if len(words) < 2 or not words[1]:
        raise SpecError(
            f"hone {words[0]} needs {what}", fix=f"hone {words[0]} {what}; hone {words[0]} --help explains it"
        )
    at_most(words, 1, f"one {what}")
    return words[1]


def at_most(words: list[str], count: int, takes: str) -> None:
    """Raises SpecError when a verb is given more than `count` arguments."""
    from hone.base.errors import SpecError

    if len(words) > count + 1:
        raise SpecError(
            f"hone {words[0]} takes {takes}, got {' '.join(words[1:])}",
            fix="options start with --, and names with spaces are quoted",
        )


def only(words: list[str], options: dict[str, str], known: Iterable[str] = ()) -> None:
    """Raises SpecError for the first option that is not in `known` (a name that ends in '.' is a prefix)."""
    from hone.base.errors import SpecError, did_you_mean

    known = [*known]
    for name in options:
        if name not in known and not any(one.endswith(".") and name.startswith(one) for one in known):
            hint = did_you_mean(name, known, "--{}")
            takes = ", ".join(f"--{one}" for one in known) or "none"
            raise SpecError(f"hone {words[0]} has no option --{name}", fix=f"{hint}its options: {takes}")


def fields(options: dict[str, str], *circumstances: str) -> dict[str, str]:
    """The options that are fields of a spec: all but `circumstances` (a name that ends in '.' is a prefix)."""
    return {
        name: value
        for name, value in options.items()
        if name not in circumstances and not any(one.endswith(".") and name.startswith(one) for one in circumstances)
    }


def executor(options: Mapping[str, str]) -> dict[str, Any]:
    """The value of `Run.executor` from the options `executor`, `workers` and `executor.FIELD`; serial without them.

    Raises SpecError for an unknown executor or field.
    """
    from hone.base.errors import SpecError
    from hone.base.spec import parse_scalar
    from hone.data import EXECUTORS

    named = {name: value for name, value in options.items() if name == "workers" or name.startswith("executor.")}
    if named and "executor" not in options:
        given = ", ".join(f"--{name}" for name in named)
        raise SpecError(f"{given} without an executor", fix=f"add --executor=NAME, one of: {', '.join(EXECUTORS)}")
    values = {name.removeprefix("executor."): parse_scalar(value) for name, value in named.items()}
    return EXECUTORS.read({"kind": options.get("executor", "serial"), **values}).model_dump(mode="json")


def circumstances(options: dict[str, str]) -> Any:
    """The Run for `--device`, `--redo`, `--quiet`, `--executor`, `--wandb`, `--profiling`, `--clock`; takes `--numa_binding`; checks that the device exists."""
    from hone.base.errors import MachineError
    from hone.base.run import Run
    from hone.cli.machine.binding import take
    from hone.measure.machine import describe

    device = options.get("device", "cpu")
    take(options)
    if device != "cpu":
        import torch

        if not device.startswith("cuda") or not torch.cuda.is_available():
            raise MachineError(
                f"no device '{device}' on this machine", fix="use --device=cpu, or run where torch.cuda.is_available()"
            )
    clock = _clock(options, device)
    return Run(
        device=device,
        redo="redo" in options,
        quiet="quiet" in options,
        clock=clock,
        power_trace="power_trace" in options,
        executor=executor(options),
        wandb=_wandb(options),
        profiling=_profiling(options),
        machine=describe(device).model_dump(mode="json"),
    )


def _clock(options: dict[str, str], device: str) -> dict[str, Any] | None:
    """The policy of the GPU's clock; what a killed process has left set is restored first."""
    from hone.measure.clocks.governed import from_options, restore_what_is_left

    if device != "cpu":
        restore_what_is_left(lambda line: print(line, file=sys.stderr))
    return from_options(options, device) if any(name.startswith("clock.") for name in options) else None


def _wandb(options: dict[str, str]) -> dict[str, Any] | None:
    if not any(name.startswith("wandb.") for name in options):
        return None
    from hone.train.curves.wandb import from_options

    return from_options(options)


def _profiling(options: dict[str, str]) -> dict[str, Any] | None:
    if not any(name.startswith("profiling.") for name in options):
        return None
    from hone.train.live.profiling import from_options

    return from_options(options)


def dtypes_on(device: str) -> tuple[str, ...]:
    """The dtypes of the work on `device`: on a GPU evaluation is in float32, all else in bfloat16."""
    return ("float32",) if device == "cpu" else ("bfloat16", "float32")


def kernels_of(device: str, *, quick: bool = False) -> Any:
    """The kernels that a calibration of `device` measures; None on a CPU, whose trainings run torch's operations."""
    if device == "cpu":
        return None
    from hone.ops.probes import quick_probes, training_probes

    return quick_probes if quick else training_probes


def calibrated(run: Any, needed: Callable[[], bool] = lambda: True) -> Any:
    """Adds this machine's calibration (measured once, then stored) to `run`, so that estimates are predictions, not bounds.

    Nothing is measured where `needed`, which is asked only before that, says that nothing will be estimated: a mistake in a
    spec is then said at once.
    """
    run.machine = run.mesh.from_leader(lambda: _calibrated_machine(run, needed).model_dump(mode="json"))
    return run


def _calibrated_machine(run: Any, needed: Callable[[], bool]) -> Any:
    """The machine of `run` with its calibration, measured now where it is missing."""
    from hone.measure.calibrate import Disturbed, calibrate_all
    from hone.measure.machine import machine_of
    from hone.measure.scratch import here, sweep

    sweep(here())  # of a killed process
    machine = machine_of(run)
    known = machine.calibration.dtypes if machine.calibration is not None else ()
    if machine.calibration is not None and run.device != "cpu":  # else a benchmark measured it, without kernels
        known = tuple(machine.calibration.with_kernels)
    wanted = [dtype for dtype in dtypes_on(run.device) if dtype not in known]
    if not wanted or not needed():
        return machine
    run.say("measuring the speed of this machine (once, a few seconds)")  # the first import of torch takes long, too
    with run.progress("measuring", None), warnings.catch_warnings():
        warnings.simplefilter("ignore", Disturbed)  # said with what is predicted
        measured = calibrate_all(run.device, wanted, machine.calibration, kernels=kernels_of(run.device))
    if run.device != "cpu":
        run.say("kernels are compiled on their first use here: 10 to 20 s a kind of stage, once, which no plan counts")
    return machine.model_copy(update={"calibration": measured})


def say_doubt(run: Any) -> None:
    """Says with a prediction that it rests on rates that were measured beside other work."""
    from hone.measure.machine import machine_of

    calibration = machine_of(run).calibration
    if calibration is not None and calibration.doubt:
        run.warn(calibration.doubt)


def list_fields(cls: Any, left_out: Collection[str] = ()) -> str:
    """The fields of a spec but `left_out`, as --help shows them."""
    from hone.base.spec import describe_fields

    return "\n".join(
        f"  --{name}={kind}\n        {description} ({default if default == 'required' else f'default: {default}'})"
        for name, kind, default, description in describe_fields(cls)
        if name not in left_out
    )
