"""The compress stage: writes a smaller model folder from a given one, by an ordered list of steps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from hone.base.artifact import Artifact, Draft
from hone.base.durable import write_jsonl
from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.base.plan import Facts, Plan, check_order, need
from hone.base.run import Run
from hone.base.stage import Stage
from hone.base.table import Choice, Technique
from hone.compress import ALLOCATIONS, STEPS, fitting, planning
from hone.compress.allocations.base import Budget, read_bytes
from hone.compress.caches.kv_cache import KVCache, kv_cache_of
from hone.compress.low_rank.base import correction_of, low_rank_last
from hone.compress.matrix import Step, quantizer_of, storage_of
from hone.compress.structured.base import StructuredPruner, structured_first
from hone.compress.transforms.base import Transform, transforms_first
from hone.compress.transforms.rotation import Rotation
from hone.compress.written import engines
from hone.cost.energy import with_energy
from hone.data.facts import DataFacts
from hone.measure.machine import Machine
from hone.measure.warm import warm_up
from hone.measure.window import Window
from hone.model.facts import CheckpointFacts

torch = lazy("torch")
adapters = lazy("hone.compress.low_rank.adapter")
allocating = lazy("hone.compress.allocations.planning")
calibration = lazy("hone.compress.calibration")
chain = lazy("hone.compress.structured.chain")
capture = lazy("hone.compress.capture")
card = lazy("hone.compress.written.card")
checks = lazy("hone.compress.check")
dense = lazy("hone.model.quantized.dense")
gradients = lazy("hone.compress.gradients")
hf = lazy("hone.model.hf")
result = lazy("hone.compress.written.result")
rotation = lazy("hone.compress.transforms.rotated")
shards = lazy("hone.compress.shards")
sizes = lazy("hone.compress.sizes")
statistics = lazy("hone.compress.statistics")
stream = lazy("hone.compress.stream")
targets_of = lazy("hone.compress.targets")
texts = lazy("hone.data.plain")

_FACT_WAYS = "give calibration inputs: set calibration_text=FILE, or give data that the model was trained on as data (--from.data=FOLDER)"


class CompressPlan(Plan):
    """A plan with the engine's job: linears by layer, dtype of the forward passes, calibration."""

    targets: tuple[tuple[Any, ...], ...]
    embedding: Any = None
    """The embedding as a matrix, where it is compressed."""
    compute_dtype: str
    calibrated: planning.Calibrated | None
    budget: Budget | None
    chosen: Any = None
    """The spec with the steps that `fit` or `target_latency` chose; None when the steps were given."""


class Compress(Stage):
    """Prunes and quantizes a model layer by layer; the folder it writes loads in transformers and stays packed in hone."""

    stage: ClassVar[str] = "compress"
    roles: ClassVar[dict[str, bool]] = {"model": True, "data": False}
    every_rank: ClassVar[bool] = True
    remedies = planning.remedies

    steps: tuple[Annotated[Technique, Choice(STEPS)], ...] = Field(
        (),
        description="Steps in order: structured pruners, transforms, pruners, at most one quantizer, at most one low-rank step; "
        "kv_cache anywhere; empty with fit or target_latency, which choose them.",
    )
    fit: str | None = Field(
        None, description="Bytes that the weights may take, as 6GB or 5.5GiB: chooses the best steps that fit."
    )
    target_latency: str | None = Field(
        None, description="Time for one token of one sequence, as 8ms: chooses the best steps that are fast enough."
    )
    allocation: Annotated[Technique, Choice(ALLOCATIONS)] | None = Field(
        None, description="Gives each matrix bits of its own, within a budget; empty: the quantizer's bits for all."
    )
    targets: tuple[str, ...] = Field(
        (r"\.layers\.",),
        description="Regular expressions; a linear is compressed if one of them is found in its checkpoint name. 're:EXPRESSION' "
        "begins at the name's start, as in vLLM and compressed-tensors.",
    )
    ignore: tuple[str, ...] = Field(
        ("lm_head",),
        description="Regular expressions, as those of targets; a linear is left unchanged if one of them is found in its name. "
        "The head, lm_head, and the embedding, embed_tokens, are compressed where targets has them and ignore does not.",
    )
    num_sequences: int = Field(128, gt=0, description="Calibration sequences.")
    seq_len: int = Field(0, ge=0, description="Tokens of one sequence; 0: the model's context, up to 512.")
    batch_size: int = Field(8, gt=0, description="Sequences computed at once.")
    seed: int = Field(0, ge=0, description="Seed of the choice of sequences.")
    check_sequences: int = Field(
        8,
        ge=0,
        description="Sequences outside the calibration, on which predictions are compared with the given model's.",
    )
    calibration_text: str | None = Field(
        None,
        description="Texts to calibrate with, in place of the role data: a text file, JSONL (.gz, .zst, .xz) or Parquet with rows of "
        "text or messages, a folder of them, or hf:owner/name.",
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Dtype of the forward passes; auto is float32 on a CPU, bfloat16 on a GPU."
    )

    rest_dtype: Literal["keep", "bfloat16", "float16"] = Field(
        "keep", description="Dtype of the stored embedding and head, which are most of a small model's bytes."
    )
    engine: engines.Engine = Field(
        "any",
        description="Engine that is to load the folder: a format that it refuses is an error. llama.cpp: after `hone export`.",
    )
    requantize: bool = Field(
        False,
        description="Whether a quantized model may be given: its weights are dequantized, which adds both errors.",
    )

    @model_validator(mode="after")
    def _steps_follow(self) -> Compress:
        # Checks the order of the steps; `plan` checks whether there is calibration data.
        wanted = self.fit is not None or self.target_latency is not None
        if wanted == bool(self.steps):
            raise ValueError("give steps, or fit or target_latency, which choose them: one of the two")
        for text, read in ((self.fit, read_bytes), (self.target_latency, fitting.read_seconds)):
            if text is not None:
                read(text)
        if wanted and self.allocation is not None:
            raise ValueError("fit and target_latency choose the allocation of bits as well: leave it out")
        if wanted and self.engine == "llama.cpp":
            raise ValueError("fit and target_latency are of the folder, not of a GGUF file: give steps for llama.cpp")
        low_rank_last(self.layer_steps)
        check_order(self.steps, frozenset({"weights:float"}).union(*(step.needs for step in self.steps)), {})
        structured_first(self.steps)
        kv_cache_of(self.steps)
        transforms_first(self.layer_steps)
        if self.gradient_sequences and any(isinstance(step, (Transform, StructuredPruner)) for step in self.steps):
            raise ValueError(
                f"observer {self.quantizer.observer.kind} reads gradients of the given model, which transforms and structured "
                "pruners change: use observer mse"
            )
        if self.allocation is not None:
            self.allocation.check(self.quantizer)
            if self._correction is not None:
                raise ValueError(
                    f"an allocation budgets weights alone, not the adapter of {self._correction.kind}: use one"
                )
        for step in self.layer_steps[1:]:
            if step.reads_model:
                raise ValueError(f"{step.kind} reads the weights of the given model: it must be the first step")
        for pattern in (*self.targets, *self.ignore):
            try:
                re.compile(pattern.removeprefix("re:"))
            except re.error as error:
                raise ValueError(f"'{pattern}' is not a regular expression: {error}") from None
        return self

    def files(self) -> dict[str, Path]:
        """The calibration texts: others at the same path change the fingerprint."""
        return {} if self.calibration_text is None else texts.local_files(self.calibration_text, "calibration_text")

    def plan(self, facts: Mapping[str, Facts], machine: Machine) -> CompressPlan:
        """Exact size of the compressed model; seconds and memory from its shapes. Raises SpecError where steps do not support it.

        With `fit` or `target_latency`, the plan of the steps that they choose. Raises FitError when none are enough.
        """
        model = need(facts, "model", CheckpointFacts)
        data = need(facts, "data", DataFacts) if "data" in facts else None
        self._check_model(model)
        calibrated = planning.calibrated(self, model, data)
        if not self.steps:
            chosen, plan, why = fitting.choose(
                self, model, machine, lambda spec: spec.plan(facts, machine), calibrated is not None
            )
            return plan.model_copy(update={"chosen": chosen, "notes": why})
        given = {"weights:float"} | (statistics.STATISTICS.keys() if calibrated is not None else frozenset())
        applied = (*self.steps,) if self.allocation is None else (self.allocation, *self.steps)
        check_order(applied, frozenset(given), dict.fromkeys(statistics.STATISTICS, _FACT_WAYS))
        quantizer = self.quantizer
        if quantizer is not None and calibrated is None and quantizer.input_statistics:
            raise SpecError(
                f"{quantizer.kind} with activations {quantizer.activations} needs calibration inputs",
                fix="add data: NAME OR FOLDER, or set calibration_text=FILE",
            )
        whole, model = model, self._cut(model, calibrated is not None)
        cache = self._checked_cache(model.config, calibrated is not None)
        targets, embedding = ((),) * model.config.num_layers, None
        if self.layer_steps:
            targets = targets_of.select(model.config, self.targets, self.ignore)
            embedding = targets_of.embedding(model.config, self.targets, self.ignore)
        model = planning.with_head(model, targets)
        planning.check_targets(self, targets, embedding)
        written = planning.written(self, model.config, targets, cache, embedding)
        engines.check(self.engine, written)
        dtype = getattr(torch, model.dtype)
        before = sizes.entries(whole, model.config if self.structured else None) | sizes.untied(whole, model)
        if cache is not None:
            before |= cache.tensors(model.config, dtype)
        planned, budget = allocating.assigned(
            self.allocation,
            storage_of(self.layer_steps),
            before,
            targets,
            self._rest_dtype,
            dtype,
            model.where,
            embedding,
        )
        made = sizes.shard_sizes(before, targets, planned, self._rest_dtype, dtype, embedding)
        compute = self.compute_dtype
        if compute == "auto":
            compute = "bfloat16" if machine.device.startswith("cuda") else "float32"
        config, adapter_bytes = adapters.planned(self._correction, model.config, targets, dtype)
        work = planning.work(self, whole, model, targets, tuple(made), calibrated, dtype.itemsize, compute, embedding)
        work = replace(work, adapter_bytes=adapter_bytes)
        hadamards = self.hadamards(model.config, targets)
        quantization = result.quantization_config(
            model.config, targets, planned, model.dtype, hadamards, cache and cache.scheme, embedding
        )
        update = {"where": f"compressed {model.where}", "quantization": quantization, "config": config}
        update["weights_bytes"] = sum(made) + work.adapter_bytes
        return CompressPlan(
            estimates=with_energy(planning.estimates(self, whole, model, machine, work, budget), machine),
            facts=model.model_copy(update=update),
            ways=planning.WAYS,
            targets=targets,
            embedding=embedding,
            compute_dtype=compute,
            calibrated=calibrated,
            budget=budget,
            notes=planning.notes(self, whole, model, targets, embedding, written),
        )

    def _check_model(self, model: CheckpointFacts) -> None:
        """Raises SpecError for a model that is not compressed, or not by these steps."""
        if model.quantization is not None and model.quantization.get("quant_method") == "low_rank":
            raise SpecError(f"{model.where} stores low-rank factors", fix="compress the checkpoint it was made from")
        if model.quantization is not None and not self.requantize:
            raise SpecError(
                f"{model.where} is quantized already ({model.quantization.get('quant_method')})",
                fix="compress the checkpoint it was made from, or set requantize=true to dequantize its weights first, "
                "which adds the errors of both",
            )
        if any(isinstance(step, Transform) for step in self.steps):
            for index, layer in enumerate(model.config.layers):
                if layer.mixer.reuses_kv:
                    raise SpecError(
                        f"layer {index} uses the values of another layer, and a transform changes one layer at a time",
                        fix="compress without transforms",
                    )
        if model.config.adapters:
            raise SpecError(f"{model.where} has adapters around its linears", fix="compress the model without them")

    def run(self, plan: CompressPlan, draft: Draft, parents: dict[str, Artifact], run: Run) -> None:
        """Writes the model shard by shard, resuming after the last complete layer."""
        mesh = run.mesh
        if plan.chosen is not None:
            mesh.from_leader(lambda: fitting.keep(plan.chosen, draft.state))
        for line in plan.notes:
            run.say(line)
        if plan.chosen is not None:
            plan.chosen.run(plan.model_copy(update={"chosen": None, "notes": ()}), draft, parents, run)
            return
        folder = parents["model"].folder
        checkpoint = self._open(folder, run)
        samples = mesh.from_leader(lambda: self._samples(plan, checkpoint, parents))
        if samples is not None and -(-len(samples.tokens) // self.batch_size) < mesh.world_size:
            run.warn(f"there are fewer batches of {self.batch_size} sequences than ranks: lower batch_size to use all")
        if samples is not None:
            columns = [linear.columns for linears in plan.targets for linear in linears]
            widest = max(columns, default=0) if self._fits_hessian else 0
            for line in (*samples.notes, *calibration.shortage(samples, widest)):
                run.warn(line)
        dtype = getattr(torch, plan.compute_dtype)
        warm_up(run.device)
        mesh.sum(torch.zeros(1, device=run.device))  # connects GPUs
        with draft.measuring(Window(run.device)), shards.full_disk_said(draft.folder):
            options = {"paired": self.paired, "mesh": mesh}
            flow = None if samples is None else capture.Flow(samples, self.batch_size, run.device, dtype, **options)
            checkpoint, said = chain.cut(checkpoint, self.structured, flow, draft, run)
            hadamards = self.hadamards(checkpoint.config, plan.targets)
            checkpoint = rotation.rotated(checkpoint, self.rotation, hadamards, run)
            if checkpoint.config.tie_embeddings and targets_of.has_head(plan.targets):
                checkpoint = shards.untied(checkpoint)
            job = stream.Job(
                checkpoint,
                self.layer_steps,
                plan.targets,
                run.device,
                dtype,
                self._rest_dtype,
                mesh=mesh,
                cache=self.kv_cache,
                embedding=plan.embedding,
            )
            if self.allocation is not None:
                few = samples.part(slice(self.allocation.num_sequences))
                few = capture.Flow(few, self.batch_size, run.device, dtype, mesh=mesh)
                allocated = self.allocation.allocate(plan.budget, job, few, draft, run)
                job = replace(job, bits=allocated.bits)
                predicted = self.allocation.predicted(allocated.loss)
                if predicted is not None and samples.spare is not None:
                    draft.predict({"kl_to_dense": predicted})
                    run.say(f"predicted divergence {predicted.value:.3g} nats a token: {predicted.formula}")
            if self.gradient_sequences and self.layer_steps:
                few = samples.part(slice(self.gradient_sequences))
                few = capture.Flow(few, 1, run.device, dtype, mesh=mesh)
                job = replace(job, gradients=gradients.measured(job, few, draft, run))
            check = None
            if samples is not None and samples.spare is not None and not self.structured:
                check = checks.Check(samples.spare, self.batch_size, run.device, dtype, mesh)
            rows = stream.run_job(job, flow if self.calibrated_steps else None, draft, run, check)
            if not mesh.leads:
                return
            checked = checks.read(draft.state)
            stored = replace(job.quantizers, template=storage_of(self.layer_steps))
            more = (stored, plan.facts.dtype, hadamards, job.cache and job.cache.scheme, plan.embedding)
            quantization = result.quantization_config(checkpoint.config, plan.targets, *more)
            result.describe(draft, checkpoint, quantization, adapted=self._correction is not None)
            if self.layer_steps:
                write_jsonl(draft.folder / "layers.jsonl", rows)
        result.techniques(draft, run, self, samples, said, None if self.allocation is None else allocated.loss)
        result.record(draft, folder, checkpoint, rows)
        result.record_check(draft, checked, self.check_sequences, self.rotation is not None)
        card.write(draft.folder, folder, self, draft.figures, quantization)
        if mesh.world_size > 1:
            note = "time is of all, memory and energy are of rank 0's device"
            draft.record("num_ranks", mesh.world_size, "processes", note=note)
        if checked is not None and checked.dense_perplexity > checkpoint.config.vocab_size / result.CHANCE:
            run.warn(
                f"the given model has a perplexity of {checked.dense_perplexity:.4g} on the calibration text, of "
                f"{checkpoint.config.vocab_size} tokens: is it text in a language the model does not know?"
            )

    def _open(self, folder: Path, run: Run) -> Any:
        """The checkpoint; of a quantized one its dequantized weights, which is said."""
        checkpoint = hf.Checkpoint(folder)
        if checkpoint.quantization is None:
            return checkpoint
        method = checkpoint.quantization.get("quant_method")
        run.warn(
            f"{folder} is quantized already ({method}): its dequantized weights are compressed, which adds both errors"
        )
        return dense.dequantized(checkpoint)

    @property
    def structured(self) -> tuple[StructuredPruner, ...]:
        return tuple(step for step in self.steps if isinstance(step, StructuredPruner))

    @property
    def layer_steps(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if not isinstance(step, (StructuredPruner, KVCache)))

    @property
    def kv_cache(self) -> KVCache | None:
        return kv_cache_of(self.steps)

    def _checked_cache(self, config: Any, calibrated: bool) -> KVCache | None:
        if self.kv_cache is not None:
            self.kv_cache.check_model(config, storage_of(self.layer_steps), calibrated=calibrated)
        return self.kv_cache

    @property
    def calibrated_steps(self) -> tuple[Step, ...]:
        """The steps that work on layers, with calibration inputs if there are any."""
        return (*self.layer_steps, *((self.kv_cache,) if self.kv_cache is not None else ()))

    @property
    def _fits_hessian(self) -> bool:
        """Whether a step fits weights to second moments of their inputs."""
        return any("hessian" in step.needs for step in self.layer_steps)

    @property
    def rotation(self) -> Rotation | None:
        return next((step for step in self.steps if isinstance(step, Rotation)), None)

    def hadamards(self, config: Any, targets: tuple[tuple[Any, ...], ...]) -> dict[str, int]:
        """Sizes of the Hadamard matrices that multiply inputs, by the linear's name."""
        return {} if self.rotation is None else self.rotation.hadamards(config, targets)

    @property
    def quantizer(self) -> Any:
        return quantizer_of(self.layer_steps)

    @property
    def _correction(self) -> Any:
        return correction_of(self.layer_steps)

    @property
    def paired(self) -> bool:
        """Whether a step needs statistics of the inputs in the model that is not compressed."""
        return any(step.needs & statistics.PAIRED for step in self.steps)

    @property
    def gradient_sequences(self) -> int:
        """Sequences on which the whole uncompressed model is differentiated for scales of inputs; 0: none."""
        return 0 if self.quantizer is None else self.quantizer.gradient_sequences

    @property
    def _rest_dtype(self) -> Any:
        return None if self.rest_dtype == "keep" else getattr(torch, self.rest_dtype)

    def _cut(self, model: CheckpointFacts, calibrated: bool) -> CheckpointFacts:
        """The facts of the dense model that structured pruners and a rotation leave. Raises SpecError where they cannot."""
        for step in self.structured:
            if not calibrated and step.passes(model.config) is not None:
                raise SpecError(f"{step.kind} measures importances on calibration inputs", fix=_FACT_WAYS)
        config = chain.shrink(model.config, self.structured)
        config = config if self.rotation is None else self.rotation.reshape(config)
        return model.model_copy(update={"config": config})

    def _samples(self, plan: CompressPlan, checkpoint: Any, parents: dict[str, Artifact]) -> Any:
        """The calibration sequences, or None."""
        if plan.calibrated is None:
            return None
        options = {"num_sequences": self.num_sequences, "seq_len": plan.calibrated.seq_len, "seed": self.seed}
        options["num_spare"] = self.check_sequences
        if self.calibration_text is not None:
            samples = calibration.from_text(self.calibration_text, checkpoint.folder, **options)
        else:
            samples = calibration.from_data(parents["data"].folder, **options)
        calibration.check(samples, checkpoint.config.vocab_size)
        return samples
