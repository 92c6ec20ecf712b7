"""A run of the compress stage: the calibration, the phases in order, and the finished folder with its figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hone.base.artifact import Artifact, Draft
from hone.base.durable import write_atomic, write_jsonl
from hone.base.errors import DriftError
from hone.base.run import Run
from hone.compress import calibration, capture, gradients, shards, stream
from hone.compress import check as checks
from hone.compress.conversions.kept import kept_bytes
from hone.compress.engine import ends
from hone.compress.engine.head import untied
from hone.compress.engine.job import Job
from hone.compress.matrix import notes_said
from hone.compress.planning import CompressPlan
from hone.compress.plans.matrices import hadamards_of, paired, rest_dtype
from hone.compress.spec import CompressSpec
from hone.compress.step import storing
from hone.compress.structured import chain
from hone.compress.targets import has_head
from hone.compress.written import card, result
from hone.cost.compress.decoding import KEPT
from hone.measure.warm import warm_up
from hone.measure.window import Window, power_trace, record_energy_per
from hone.model import hf
from hone.model.quantized import dense
from hone.model.weights.model import ModelSource


def compress(spec: CompressSpec, plan: CompressPlan, draft: Draft, parents: dict[str, Artifact], run: Run) -> None:
    """See `hone.compress.stage.Compress.run`."""
    mesh = run.mesh
    if plan.chosen is not None:
        mesh.from_leader(lambda: _keep(plan.chosen, draft.state))
    for line in plan.notes:
        run.say(line)
    if plan.chosen is not None:
        plan.chosen.run(plan.model_copy(update={"chosen": None, "notes": ()}), draft, parents, run)
        if mesh.leads and spec.max_kl is not None and plan.chosen.allocation is None:
            _said_if_above(
                spec.max_kl, draft.figures["kl_to_dense"].value, "what another model lost by these steps", run
            )
        return
    folder = parents["model"].folder
    checkpoint, requantized = _opened(folder, run)
    samples = mesh.from_leader(lambda: _samples(spec, plan, checkpoint, parents))
    if samples is not None:
        _warn_of(samples, spec, plan, run)
    dtype = getattr(torch, plan.compute_dtype)
    warm_up(run.device)
    mesh.sum(torch.zeros(1, device=run.device))  # connects GPUs
    window = Window(run.device, power_trace(run, draft))
    with draft.measuring(window), shards.full_disk_said(draft.folder):
        options = {"paired": paired(spec), "mesh": mesh}
        flow = None if samples is None else capture.Flow(samples, spec.batch_size, run.device, dtype, **options)
        given = checkpoint
        checkpoint, said = chain.rewrite(checkpoint, spec.model_steps, flow, plan.targets, draft, run)
        if checkpoint.config.tie_embeddings and has_head(plan.targets):
            checkpoint = untied(checkpoint)
        job = Job(
            checkpoint.with_each_expert(),
            spec.layer_steps,
            plan.targets,
            run.device,
            dtype,
            rest_dtype(spec),
            mesh=mesh,
            cache=spec.cache,
            embedding=plan.embedding,
            requantized=requantized,
            stacked=result.stacked_experts(checkpoint, storing(spec.steps)),
        )
        loss = None
        if spec.allocation is not None:
            job, loss = _allocated(spec, plan, job, samples, draft, run)
        if spec.gradient_sequences and spec.layer_steps:
            few = samples.part(slice(spec.gradient_sequences))
            few = capture.Flow(few, 1, run.device, dtype, mesh=mesh)
            job = replace(job, gradients=gradients.measured(job, few, draft, run))
        check = None
        if samples is not None and samples.spare is not None and not spec.reshapes:
            check = checks.Check(samples.spare, spec.batch_size, run.device, dtype, mesh)
        rows = _written(job, flow if spec.calibrated_steps else None, check, draft, run)
        if mesh.leads:
            hadamards = hadamards_of(spec, checkpoint.config, plan.targets)
            more = (job.storage, plan.facts.dtype, hadamards, job.cache and job.cache.cache_scheme, plan.embedding)
            quantization = result.quantization_config(checkpoint.config, plan.targets, *more)
            added = {key: value for step in spec.steps for key, value in step.config_values().items()}
            result.describe(draft, checkpoint, quantization, added)
            if spec.layer_steps:
                write_jsonl(draft.folder / "layers.jsonl", rows)
            if spec.reshapes and samples is not None and samples.spare is not None and checks.read(draft.state) is None:
                whole = checks.Check(samples.spare, spec.batch_size, run.device, dtype)
                whole.compare_models(given, hf.Checkpoint(draft.folder), draft.state)
            checked = checks.read(draft.state)
    peak = max(mesh.gather(window.memory_growth_bytes))
    if not mesh.leads:
        return
    result.techniques(draft, run, spec, samples, said, loss)
    result.record(draft, folder, checkpoint, rows)
    if spec.converts:
        note = "two tokens decoded by a layer of each kind, in the dtype of the weights"
        draft.record(KEPT, kept_bytes(hf.Checkpoint(draft.folder)), "B", note=note)
    record_energy_per(draft, "joules_per_billion_params", checkpoint.config.num_params / 1e9, "1e9 parameters")
    changed = "" if spec.reshapes else "".join(step.checked_against for step in spec.steps)  # else as it was given
    result.record_check(draft, checked, spec.check_sequences, changed)
    card.write(draft.folder, folder, spec, draft.figures, quantization)
    if mesh.world_size > 1:
        _record_ranks(draft, window, peak, mesh.world_size)
    if checked is not None:
        _judged(spec, checked, checkpoint.config.vocab_size, run)


def _judged(spec: CompressSpec, checked: checks.Checked, vocab_size: int, run: Run) -> None:
    """Says where a measured divergence is above the limit that it was chosen for, and where the text is one that the model cannot predict."""
    most = None if spec.allocation is None else spec.allocation.max_kl
    if most is not None:
        _said_if_above(most, checked.kl, "what each matrix loses alone, and losses add up otherwise here", run)
    if checked.dense_perplexity > vocab_size / result.CHANCE:
        run.warn(
            f"the given model has a perplexity of {checked.dense_perplexity:.4g} on the calibration text, of "
            f"{vocab_size} tokens: is it text in a language the model does not know?"
        )


def _said_if_above(most: float, kl: float | None, by: str, run: Run) -> None:
    """Warns where the measured divergence `kl` is above `most`, within which a choice was made by other losses."""
    if kl is not None and kl > most:
        run.warn(
            f"the model lost {kl:.3g} nats a token, more than max_kl={most:g}: bits are chosen by {by}: lower max_kl"
        )


def _record_ranks(draft: Draft, window: Window, growth: int, num_ranks: int) -> None:
    """Records the memory of the rank that needed most, as the plan estimates it, in place of rank 0's."""
    for name, before in (("peak_memory_bytes", window.start_memory_bytes), ("memory_growth_bytes", 0)):
        note = f"{draft.figures[name].note}; of the rank that needed most"
        draft.record(name, before + growth, "B", note=note)
    draft.record("num_ranks", num_ranks, "processes", note="time is of all, energy is of rank 0's device")


def _keep(chosen: CompressSpec, state: Path) -> None:
    """Keeps the chosen spec in `state`. Raises DriftError when a run that resumes would take another one: it depends on this
    machine's measured speed and on its free memory, which may have changed since."""
    path, text = state / "chosen.json", json.dumps(chosen.model_dump(mode="json"))
    if path.exists() and path.read_text(encoding="utf8") != text:
        before = ", ".join(str(step) for step in json.loads(path.read_text(encoding="utf8"))["steps"])
        raise DriftError(
            f"the interrupted run had chosen {before}, and this machine's measured speed or free memory chooses others "
            "now",
            fix="resume with both as they were, or start again with --redo",
        )
    write_atomic(path, text.encode())


def _warn_of(samples: calibration.Calibration, spec: CompressSpec, plan: CompressPlan, run: Run) -> None:
    """Says what a user must know of the calibration: how it was drawn, and where it is too little."""
    if -(-len(samples.tokens) // spec.batch_size) < run.mesh.world_size:
        run.warn(f"there are fewer batches of {spec.batch_size} sequences than ranks: lower batch_size to use all")
    columns = [linear.columns for linears in plan.targets for linear in linears]
    widest = max(columns, default=0) if spec.fits_hessian else 0
    for line in (*samples.notes, *calibration.shortage(samples, widest)):
        run.warn(line)


def _allocated(
    spec: CompressSpec, plan: CompressPlan, job: Job, samples: calibration.Calibration, draft: Draft, run: Run
) -> tuple[Job, float | None]:
    """`job` with the bits that the allocation chooses for each matrix, and the loss that it expects of them."""
    few = samples.part(slice(spec.allocation.num_sequences))
    few = capture.Flow(few, spec.batch_size, job.device, job.dtype, mesh=job.mesh)
    allocated = spec.allocation.allocate(plan.budget, job, few, draft, run)
    predicted = spec.allocation.predicted(allocated.loss)
    if predicted is not None and samples.spare is not None:
        draft.predict({"kl_to_dense": predicted})
        run.say(f"predicted divergence {predicted.value:.3g} nats a token: {predicted.formula}")
    return replace(job, bits=allocated.bits), allocated.loss


def _written(
    job: Job, flow: capture.Flow | None, check: checks.Check | None, draft: Draft, run: Run
) -> list[dict[str, Any]]:
    """Writes every shard of the compressed model and its index; returns one row per matrix (on rank 0; none on others).

    Resumes after the last layer whose marker is in `draft.state`. `check` compares the models' predictions at the end and keeps
    the result there.
    """
    mesh, count = job.mesh, len(job.targets)
    done = mesh.from_leader(lambda: shards.finished_layers(draft, count))
    if mesh.leads:
        ends.write(job, draft)
    if mesh.from_leader(lambda: checks.read(draft.state) is not None):
        check = None
    if done < count and job.steps and job.steps[0].reads_model:  # rank 0 alone: it computes next to nothing
        job = replace(job, model=mesh.from_leader(lambda: job.steps[0].prepare(job.weights)))
    stream.Stream(job, draft, run, done=done, flow=flow, checked=None if check is None else check.flow).compress()
    if check is not None:
        mesh.from_leader(lambda: None)  # the head is on disk
        dense, compressed = (job.checkpoint.build_ends(job.device, job.dtype) for _ in range(2))
        ends.put_all(job, draft, compressed)
        check.keep(dense, compressed, draft.state)
    return _finished(job, draft, run) if mesh.leads else []


def _finished(job: Job, draft: Draft, run: Run) -> list[dict[str, Any]]:
    """Writes the index over all shards and what lies beside them; returns the rows of all layers; prints notes once."""
    rows = shards.write_index(draft, job.num_shards, ends.sizes(job), embedding=job.embedding is not None)
    for step in job.steps:
        step.conclude(draft, job.checkpoint.config, job.targets)
    for line in notes_said(rows):
        run.warn(line)
    return rows


def _opened(folder: Path, run: Run) -> tuple[ModelSource, bool]:
    """The checkpoint, of a quantized one its dequantized weights, which is said; and whether it is a quantized one."""
    checkpoint = hf.Checkpoint(folder)
    if checkpoint.quantization is None:
        return checkpoint, False
    method = checkpoint.quantization.get("quant_method")
    run.warn(
        f"{folder} is quantized already ({method}): its dequantized weights are compressed, which adds both errors"
    )
    return dense.dequantized(checkpoint), True


def _samples(
    spec: CompressSpec, plan: CompressPlan, checkpoint: ModelSource, parents: dict[str, Artifact]
) -> calibration.Calibration | None:
    """The calibration sequences, or None."""
    if plan.calibrated is None:
        return None
    options = {"num_sequences": spec.num_sequences, "seq_len": plan.calibrated.seq_len, "seed": spec.seed}
    options["num_spare"] = spec.check_sequences
    if spec.calibration_text is not None:
        samples = calibration.from_text(spec.calibration_text, checkpoint.folder, **options)
    else:
        samples = calibration.from_data(parents["data"].folder, **options)
    calibration.check(samples, checkpoint.config.vocab_size)
    return samples
