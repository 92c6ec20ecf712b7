"""What a teacher and a text of a distillation cannot be combined with, and what a plan says of their costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hone.base.errors import SpecError
from hone.base.plan import Facts, need
from hone.feed.epochs import epoch_of, steps_for
from hone.feed.facts import DataFacts
from hone.model.facts import CheckpointFacts
from hone.train.cached_logits.facts import LogitsFacts
from hone.train.cached_logits.stage import check_cache
from hone.train.precision import FP8_RECIPES
from hone.train.teachers.peer import Peer
from hone.train.teachers.temporal_ensemble import TemporalEnsemble
from hone.train.teachers.theseus import Theseus

if TYPE_CHECKING:
    from hone.model.config import ModelConfig


def check_teacher(
    spec: Any, config: ModelConfig, num_ranks: int, data: list[DataFacts], facts: Mapping[str, Facts]
) -> None:
    """Raises SpecError where the teacher or the text of a train spec's objective needs what its other fields do not give."""
    objective = spec.objective
    if objective.from_cache:
        _check_cached(spec, config, data, facts)
    elif "logits" in facts:
        raise SpecError(
            f"logits {facts['logits'].where} are not read", fix="set objective: {kind: distill, teacher: cached}"
        )
    teacher = getattr(objective, "teacher", None)
    if isinstance(teacher, TemporalEnsemble):
        _check_ensemble(spec, config, num_ranks, data)
    elif objective.reads_teacher and not objective.from_teacher:
        _check_own(spec, config, num_ranks)
    if isinstance(teacher, Theseus):
        _check_theseus(spec, config, facts)
    text = getattr(objective, "text", None)
    if text is not None and text.writer:
        given = text.writer == "teacher" and objective.from_teacher
        _check_text(spec, need(facts, "teacher", CheckpointFacts).config if given else config, num_ranks)


def _check_text(spec: Any, writer: ModelConfig, num_ranks: int) -> None:
    """For text that the engine of each rank writes with a model of config `writer`."""
    from hone.serve.paging.cache import first_unserved

    text, layout = spec.objective.text, spec.parallelism
    where = f"objective.text {text.kind}"
    unserved = first_unserved(writer)
    if unserved is not None:
        raise SpecError(
            f"{where} is written by the engine, which has no pages for '{unserved[1]}' of the {text.writer}'s layer {unserved[0]}",
            fix="set objective.text: data",
        )
    if layout.offload.kind != "none" or spec.precision in FP8_RECIPES:
        given = f"precision {spec.precision}" if layout.offload.kind == "none" else f"offload {layout.offload.kind}"
        raise SpecError(
            f"{where} does not work with {given}: the engine runs the weights as they are on the device",
            fix="take precision: bf16 and parallelism.offload: none, or set objective.text: data",
        )
    for name in ("pipeline", "tensor", "context", "expert"):
        degree = getattr(layout, f"{name}_parallel_degree")
        if degree > 1:
            raise SpecError(
                f"{where} is written by a whole model, of which each rank of {name}_parallel_degree {degree} has a part",
                fix=f"set parallelism.{name}_parallel_degree: 1, or objective.text: data",
            )
    if num_ranks > 1 and "weights" in layout.data_parallel.sharded:
        raise SpecError(
            f"{where} is written by a whole model, of which each rank of {layout.data_parallel.kind} has a part",
            fix="set parallelism.data_parallel: ddp, or objective.text: data",
        )
    if spec.checkpoint.check.rerun_interval:
        raise SpecError(
            f"{where} is another on each rank, so that no rank can compute a step of another again",
            fix="leave checkpoint.check.rerun_interval out, or set objective.text: data",
        )
    if text.prompt_tokens >= spec.seq_len:
        raise SpecError(
            f"objective.text.prompt_tokens {text.prompt_tokens} leaves nothing to write of seq_len {spec.seq_len}",
            fix=f"give at most {spec.seq_len - 1}",
        )


def _check_cached(spec: Any, config: ModelConfig, data: list[DataFacts], facts: Mapping[str, Facts]) -> None:
    """For a teacher whose predictions are on disk."""
    objective, where = spec.objective, "objective.teacher cached"
    if "logits" not in facts:
        raise SpecError(
            f"{where} needs the input 'logits'",
            fix="hone teach MODEL --from.data=DATA writes it; then add --from.logits=FOLDER",
        )
    logits = need(facts, "logits", LogitsFacts)
    check_cache(logits, data, spec.seq_len, objective.temperature)
    _check_no_model(objective, config, f"{where} is on disk")
    if objective.divergence.kind != "forward_kl" and (logits.sampled or objective.teacher.rest == "zero"):
        what = "ids that were drawn" if logits.sampled else "rest: zero"
        raise SpecError(
            f"divergence {objective.divergence.kind} has no meaning with {what}",
            fix="set objective.divergence: forward_kl, or take the most likely ids with rest: bucket",
        )
    for name in ("pipeline", "tensor", "context"):
        degree = getattr(spec.parallelism, f"{name}_parallel_degree")
        if degree > 1:
            raise SpecError(
                f"{where} is of whole sequences and the whole vocabulary, of which each rank of {name}_parallel_degree {degree} has a part",
                fix=f"set parallelism.{name}_parallel_degree: 1; data-parallel ranks may share the work",
            )


def _check_no_model(objective: Any, config: ModelConfig, told: str) -> None:
    """For a teacher that keeps predictions alone."""
    if objective.text.writer or objective.pairs(config.num_layers, config.num_layers):
        what = f"text {objective.text.kind}" if objective.text.writer else f"objective {objective.kind}"
        raise SpecError(f"{what} needs a teacher in memory, and {told}", fix="set objective.teacher: fixed")


def _check_ensemble(spec: Any, config: ModelConfig, num_ranks: int, data: list[DataFacts]) -> None:
    """For a teacher that keeps what the student predicted of each text."""
    teacher, where = spec.objective.teacher, "objective.teacher temporal_ensemble"
    _check_no_model(spec.objective, config, f"{where} keeps predictions of the last layer")
    if num_ranks > 1:
        raise SpecError(
            f"{where} does not work with {num_ranks} ranks, of which each would keep the texts that it reads",
            fix="train on one rank, or take objective.teacher: fixed",
        )
    if teacher.k >= config.vocab_size:
        raise SpecError(
            f"{where}: k {teacher.k} leaves nothing of a vocabulary of {config.vocab_size} tokens",
            fix=f"set objective.teacher.k: {min(16, config.vocab_size - 1)}",
        )
    epoch = epoch_of(data, spec.seq_len)
    steps = spec.steps or steps_for(epoch, spec.batch_size, spec.tokens)
    if steps * spec.batch_size <= epoch.num_sequences:
        raise SpecError(
            f"{where} learns from earlier epochs, and {steps} steps x batch_size {spec.batch_size} read no text of {epoch.num_sequences} sequences twice",
            fix=f"set steps to more than {epoch.num_sequences // spec.batch_size}, such as {3 * epoch.num_sequences // spec.batch_size}, or take less data",
        )


def _check_theseus(spec: Any, config: ModelConfig, facts: Mapping[str, Facts]) -> None:
    """For a teacher whose layers stand in for the student's."""
    for name in ("pipeline", "tensor", "expert"):
        if getattr(spec.parallelism, f"{name}_parallel_degree") > 1:
            raise SpecError(
                f"objective.teacher theseus replaces whole layers, of which each rank of {name}_parallel_degree has a part",
                fix=f"set parallelism.{name}_parallel_degree: 1, or objective.teacher: fixed",
            )
    for what, given in (
        ("compile", spec.compile),
        ("an adapter", bool(config.adapters)),
        (
            f"objective {spec.objective.kind}, which reads inside layers that may be replaced",
            spec.objective.reads_heads,
        ),
    ):
        if given:
            raise SpecError(f"objective.teacher theseus does not work with {what}", fix="take objective.teacher: fixed")
    spec.objective.teacher.check_models(config, need(facts, "teacher", CheckpointFacts).config)


def _check_own(spec: Any, config: ModelConfig, num_ranks: int) -> None:
    """For a teacher that the training makes beside its model."""
    teacher = spec.objective.teacher
    where = f"objective.teacher {teacher.kind}"
    wrong = {
        f"{num_ranks} ranks, of which each would have one": ("train on one rank", num_ranks > 1),
        f"offload {spec.parallelism.offload.kind}": (
            "set parallelism.offload: none",
            spec.parallelism.offload.kind != "none",
        ),
        "an adapter, whose base it would copy": ("merge the adapter first", bool(config.adapters)),
    }
    for what, (fix, given) in wrong.items():
        if given:
            raise SpecError(f"{where} does not work with {what}", fix=f"{fix}, or take objective.teacher: fixed")
    if not isinstance(teacher, Peer):
        return
    if spec.precision == "fp16":
        raise SpecError(f"{where} has no loss scale, which fp16 needs", fix="set precision: bf16")
    if teacher.seed == spec.seed:
        raise SpecError(
            f"{where}: seed {teacher.seed} is also that of the training, so that both would begin with the same weights",
            fix=f"set objective.teacher.seed: {spec.seed + 1}",
        )


def cost_notes(objective: Any) -> tuple[str, ...]:
    """What estimates leave out."""
    found = []
    if isinstance(getattr(objective, "teacher", None), Peer):
        found.append(
            "estimates count the peer's forward pass alone: it also trains, so a step needs about twice the time and memory"
        )
    text = getattr(objective, "text", None)
    if text is not None and text.writer:
        found.append(
            "estimates do not count the seconds in which text is written, a token after the other, nor the memory of its keys and values"
        )
    return tuple(found)
