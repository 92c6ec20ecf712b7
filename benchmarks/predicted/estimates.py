"""What hone's estimates say of a configuration as a ledger's row records it, in the unit of the row.

A configuration is a dict that JSON holds: `room` ("training", "serving" or "compression"), `shape` (a name of `SHAPES`), `layers` where it is
not the shape's, and the room's own fields, which are the parameters of the functions below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

from benchmarks.compress import SHAPES as COMPRESSED
from benchmarks.compress import VOCABULARY
from benchmarks.serve import SHAPES as SERVED
from benchmarks.serve_cpu import SHAPES as SERVED_ON_CPU
from benchmarks.serve_cpu import VOCAB as VOCAB_ON_CPU
from benchmarks.serve_load import load_of
from benchmarks.train import SHAPES as TRAINED
from hone.base.figure import Estimate
from hone.base.plan import MEMORY
from hone.compress.stage import Compress
from hone.cost.memory import BYTES
from hone.cost.serve.schedule import StepKind, Traffic
from hone.cost.train.cut import cut
from hone.cost.train.figures import growth_bytes, step_seconds
from hone.cost.train.pipeline import layer_seconds
from hone.cost.train.training import Training
from hone.feed.facts import DataFacts, SplitFacts
from hone.measure.machine import Machine
from hone.model.config import ModelConfig
from hone.model.facts import CheckpointFacts
from hone.model.shape import Shape
from hone.plan.search.serving.formats import FORMATS
from hone.serve.planning import estimates, serving_of
from hone.serve.sizing import sized
from hone.serve.spec import EngineSpec
from hone.train import ACTIVATION_CHECKPOINTINGS, OFFLOADS
from hone.train.fp8.fits import fp8_products
from hone.train.optimizers.adamw import AdamW
from hone.train.parallelism import Parallelism
from hone.train.precision import FP8_RECIPES, TORCH_NAMES

SHAPES: Mapping[str, Mapping[str, tuple[Shape, int]]] = {
    "training": {**SERVED, **TRAINED},
    "serving": {**{name: (shape, VOCAB_ON_CPU) for name, shape in SERVED_ON_CPU.items()}, **TRAINED, **SERVED},
    "compression": {name: (shape, VOCABULARY) for name, shape in COMPRESSED.items()},
}
"""Shape and vocabulary by room and name, as the room's benchmarks know it."""


class Said(NamedTuple):
    """What is estimated of one row: in units of time or rate, and bytes; a unit that is missing is not estimated."""

    by_unit: Mapping[str, float]
    bound: bool
    """Whether the seconds are only a bound."""
    formula: str


def said_of(config: Mapping[str, Any], machine: Machine) -> Said:
    """The estimates of a configuration on `machine`. Raises HoneError where it cannot be planned there."""
    given = dict(config)
    return ROOMS[given.pop("room")](machine, **given)


def model_of(
    room: str, shape: str, layers: int | None = None, vocab_size: int | None = None, seq_len: int = 0
) -> ModelConfig:
    """The config of a shape of a room, with other layers and another vocabulary where they are given, for at least `seq_len` tokens."""
    found, vocab = SHAPES[room][shape]
    changed: dict[str, Any] = {"max_seq_len": max(found.max_seq_len, seq_len)}
    return found.model_copy(update=changed | ({"num_layers": layers} if layers else {})).config(vocab_size or vocab)


def training_of(
    machine: Machine,
    *,
    shape: str,
    batch_size: int,
    seq_len: int,
    precision: str,
    layers: int | None = None,
    vocab_size: int | None = None,
    passes: int = 1,
    recomputation: Any = "none",
    parallelism: Mapping[str, Any] | None = None,
    ranks: int = 1,
    offload: Any = "none",
    timed_cut: bool = False,
    tied: bool | None = None,
    compiled: bool = False,
) -> Training:
    """A step of `batch_size` sequences on all ranks together, in `passes` micro-batches, without packing; AdamW.

    `timed_cut`: pipeline stages have the layers that take equal simulated seconds, as `hone train` gives them. `compiled` changes no
    estimate: it is recorded all the same.
    """
    config = model_of("training", shape, layers, vocab_size, seq_len)
    if tied is not None:
        config = config.model_copy(update={"tie_embeddings": tied})
    dtype, device = TORCH_NAMES[precision], machine.device.partition(":")[0]
    shared = Parallelism.read(dict(parallelism or {}))
    costs = partial(AdamW().cost, dtype=dtype, device=device)
    timed = partial(layer_seconds, machine=machine, tokens=batch_size * seq_len // passes, seq_len=seq_len, dtype=dtype)
    parts = shared.shared(config, costs, passes, seq_len, *((timed,) if timed_cut else ()))
    work = Training(
        model=config.dims(),
        steps=1,
        batch_size=batch_size,
        seq_len=seq_len,
        dtype=dtype,
        segments=ACTIVATION_CHECKPOINTINGS.read(recomputation).segments(config.num_layers),
        update=parts.update,
        gradient_accumulation_steps=passes,
        packed=False,
        divided=shared.with_experts(shared.divided(ranks), config),
        experts=shared.expert_rows,
        context=shared.context_parallel.cost(),
        context_degree=shared.context_parallel_degree,
        tensor=parts.tensor,
        pipeline=parts.pipeline,
        offload=OFFLOADS.read(offload),
        fp8=fp8_products(precision),
        fp8_recipe=FP8_RECIPES.get(precision, ""),
    )
    return cut(work, machine) if timed_cut else work


def training(machine: Machine, **given: Any) -> Said:
    """A training's step: rates of tokens, and bytes on the rank that needs most. Parameters as `training_of`."""
    ranks = given.get("ranks", 1)
    machine = machine.model_copy(update={"num_ranks": ranks})
    work = training_of(machine, **given)
    step, grown = step_seconds(work, machine), growth_bytes(work, machine.device)
    rate = given["batch_size"] * given["seq_len"] / step.value
    times = {"tokens/s": rate, "tokens/s a GPU": rate / ranks, "s": step.value}
    return Said({**times, "B": grown.value, "GiB": grown.value / 2**30}, step.bound, step.formula)


def facts_of(config: ModelConfig, where: str, dtype: str) -> CheckpointFacts:
    """The facts of a checkpoint of `config` with weights in `dtype`."""
    sizes = {"dtype": dtype, "weights_bytes": BYTES[dtype] * config.num_params}
    return CheckpointFacts(where=where, config=config, tokenizer=None, **sizes)


def tokens_of(count: int, vocab_size: int) -> DataFacts:
    """The facts of so many tokens in one document."""
    train = SplitFacts(tokens=count, documents=1, bytes=count)
    return DataFacts(
        where="data", splits={"train": train}, vocab_size=vocab_size, eos_token_id=0, tokenizer=None, exact=False
    )


@cache
def quantized(shape: str, layers: int | None, format: str, processor: str) -> CheckpointFacts:
    """The facts of a shape in one of the search's formats, as the plan of its compression says."""
    config = model_of("serving", shape, layers)
    plain = facts_of(config, shape, "bfloat16")
    steps = [dict(step) for step in FORMATS[format].steps]
    if not steps:
        return plain
    spec = Compress.read({"steps": steps})
    given = {"model": plain, "data": tokens_of(spec.num_sequences * spec.seq_len + 1, config.vocab_size)}
    anywhere = Machine(
        cpu=processor, num_cores=1, num_threads=1, ram_bytes=1 << 40, os="", python="", torch=None, device="cpu"
    )
    made = spec.plan(given, anywhere).facts
    assert isinstance(made, CheckpointFacts), "a compression makes a checkpoint"
    return made


def traffic_of(load: str | Mapping[str, int], vocab_size: int, concurrency: int) -> Traffic:
    """The requests of a load of `benchmarks.serve_load` by its name, or `requests` equal ones of `prompt_tokens` and `output_tokens`,
    which were served once before they were measured unless `repeated` is 0."""
    if isinstance(load, str):
        made = load_of(load, vocab_size)
        shared = 4096 if load.startswith("shared") else 0
        return Traffic(tuple(map(len, made.prompts)), tuple(made.outputs), shared, min(concurrency, len(made.prompts)))
    count = load["requests"]
    return Traffic(
        (load["prompt_tokens"],) * count,
        (load["output_tokens"],) * count,
        0,
        min(concurrency, count),
        bool(load.get("repeated", 1)),
    )


def serving(
    machine: Machine,
    *,
    shape: str,
    load: str | Mapping[str, int],
    engine: Mapping[str, Any],
    format: str = "16 bit",
    dtype: str | None = None,
    layers: int | None = None,
    step: Mapping[str, int] | None = None,
) -> Said:
    """A closed loop of requests: output tokens, prompt tokens and requests a second, and milliseconds of a token of one stream.

    With `step` (`decoding` sequences at a mean `context`) a decode step alone instead of `load`.
    """
    model = quantized(shape, layers, format, machine.processor)
    if dtype is not None and format == "16 bit":
        model = facts_of(model.config, shape, dtype)
    spec = EngineSpec.read(dict(engine))
    if step is not None:
        opened = serving_of(sized(spec, machine), model, machine)
        count = step["decoding"]
        took = opened.step_seconds(StepKind(count, step["context"], (), count, 1))
        rates = {"ms/token": 1e3 * took.value, "tokens/s": count / took.value}
        return Said(rates, took.bound, took.formula)
    concurrency = sized(spec, machine).max_num_seqs or 1
    traffic = traffic_of(load, model.config.vocab_size, concurrency)
    found: dict[str, Estimate] = estimates(spec, traffic, [model], machine)
    rate = found["tokens_per_s"]
    seconds = sum(traffic.outputs) / rate.value
    by_unit = {
        "output tokens/s": rate.value,
        "tokens/s": sum(traffic.prompts) / seconds if max(traffic.outputs) == 1 else rate.value,
        "requests/s": len(traffic.outputs) / seconds,
        "B": found[MEMORY].value,
        "GiB": found[MEMORY].value / 2**30,
    }
    if len(traffic.outputs) == 1:  # without the prompt's own step, as the load measures it
        first = Traffic(traffic.prompts, (1,), 0, 1)
        before = 1 / estimates(spec, first, [model], machine)["tokens_per_s"].value
        by_unit["ms/token"] = 1e3 * (seconds - before) / max(traffic.outputs[0] - 1, 1)
    return Said(by_unit, rate.bound, rate.formula)


def compression(
    machine: Machine,
    *,
    shape: str,
    steps: list[Mapping[str, Any]],
    num_sequences: int,
    seq_len: int,
    layers: int | None = None,
    vocab_size: int | None = None,
    batch_size: int = 4,
    check_sequences: int = 8,
    dtype: str = "bfloat16",
    ranks: int = 1,
) -> Said:
    """A compression by `steps`, calibrated by random tokens: seconds of a layer, and bytes."""
    config = model_of("compression", shape, layers, vocab_size)
    fields = {"num_sequences": num_sequences, "seq_len": seq_len, "batch_size": batch_size}
    spec = Compress.read({"steps": [dict(one) for one in steps], "check_sequences": check_sequences, **fields})
    facts = {
        "model": facts_of(config, shape, dtype),
        "data": tokens_of(num_sequences * seq_len + 1, config.vocab_size),
    }
    machine = machine.model_copy(update={"num_ranks": ranks})
    found = spec.plan(facts, machine).estimates
    took, grown = found["time_s"], found[MEMORY]
    return Said({"s": took.value / config.num_layers, "B": grown.value}, took.bound, took.formula)


ROOMS: dict[str, Callable[..., Said]] = {"training": training, "serving": serving, "compression": compression}
