"""The train stage: packed tokens in, a Hugging Face folder with the trained model out, resumable at every checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from hone.base.artifact import Artifact, Draft
from hone.base.durable import read_jsonl, write_atomic
from hone.base.errors import SpecError
from hone.base.plan import Facts, facts_of, need
from hone.base.run import Run
from hone.base.spec import Circumstance, Spec
from hone.base.stage import Stage
from hone.base.table import Choice, Technique
from hone.cost.energy import with_energy
from hone.cost.memory import BYTES
from hone.data import CURRICULA, MIXTURES
from hone.data.facts import DataFacts
from hone.data.order.random import Random
from hone.measure.machine import Machine, machine_of
from hone.measure.warm import warm_up
from hone.measure.window import Window
from hone.model.facts import CheckpointFacts
from hone.model.folder import weights_bytes
from hone.model.shape import Shape
from hone.train import ACTIVATION_CHECKPOINTINGS, OBJECTIVES, OPTIMIZERS, SCHEDULES
from hone.train.activation_checkpointing import KeepAll
from hone.train.checkpoint import Checkpoints
from hone.train.mask import check_mask, masked, sparsity, zeros_of
from hone.train.objectives.next_token import NextToken
from hone.train.optimizers.adamw import AdamW
from hone.train.precision import TORCH_NAMES, Precision
from hone.train.schedules.cosine import Cosine
from hone.train.work import CHECKPOINTS, WAYS, TrainPlan, Work, affordable_steps, estimate, out_of_memory

if TYPE_CHECKING:
    from torch import Tensor

    from hone.data.load import PackedTokens
    from hone.data.mix.reading import Reading
    from hone.model.config import ModelConfig
    from hone.model.decoder import Decoder
    from hone.train.loop import Trainer
    from hone.train.watch import Watch


class Checkpointing(Spec):
    """How often checkpoints are written, and how many are kept while the stage runs."""

    interval: int = Field(
        100, ge=0, description="Steps between checkpoints; 0: none, so that a killed training starts over."
    )
    keep_latest_k: int = Field(2, gt=0, description="Checkpoints kept while the stage runs.")


class Train(Stage):
    """Trains a decoder on packed tokens, from random weights, another model's, or as a student of a teacher.

    Weights of layers' linears that are zero in the input `mask` are zero and stay zero.
    """

    stage: ClassVar[str] = "train"
    roles: ClassVar[dict[str, bool]] = {"data": True, "teacher": False, "model": False, "mask": False}
    several: ClassVar[frozenset[str]] = frozenset({"data"})
    renamed: ClassVar[dict[str, str | None]] = {
        "accumulation": "gradient_accumulation_steps",
        "checkpoint_every": "checkpoint.interval",
        "checkpoint_keep": "checkpoint.keep_latest_k",
        "clip": "max_grad_norm",
        "eval_rows": "eval_sequences",
        "remat": "activation_checkpointing",
    }

    model: Shape = Field(
        default_factory=Shape, description="Sizes of a new model; not used with a 'model' parent or init: teacher."
    )
    init: Literal["random", "teacher"] = Field(
        "random", description="Initial weights: random, or teacher: copies of every keep_every-th layer of the teacher."
    )
    keep_every: int = Field(
        2, ge=2, description="With init: teacher, layers 0, n, 2n, ... are kept; 2 halves the depth."
    )
    optimizer: Annotated[Technique, Choice(OPTIMIZERS, default="adamw")] = Field(
        AdamW(kind="adamw"), description="Update of the weights from their gradients."
    )
    schedule: Annotated[Technique, Choice(SCHEDULES)] = Field(
        Cosine(kind="cosine"), description="Learning rate over the steps."
    )
    objective: Annotated[Technique, Choice(OBJECTIVES)] = Field(
        NextToken(kind="next_token"), description="Loss that is minimised."
    )
    activation_checkpointing: Annotated[Technique, Choice(ACTIVATION_CHECKPOINTINGS)] = Field(
        KeepAll(kind="none"), description="Which activations are recomputed instead of kept."
    )
    mixture: Annotated[Technique, Choice(MIXTURES)] | None = Field(
        None,
        description="Weights of the sources, which are several data inputs or the values of a column; empty: none.",
    )
    curriculum: Annotated[Technique, Choice(CURRICULA)] = Field(
        Random(kind="random"), description="Order of each source's sequences."
    )
    precision: Precision = Field("fp32", description="Dtype of the computation; master weights are float32.")
    batch_size: int = Field(16, gt=0, description="Sequences of one optimizer step.")
    seq_len: int = Field(
        256, gt=1, description="Tokens of a sequence; tokens do not attend to other documents packed into it."
    )
    gradient_accumulation_steps: int = Field(
        1, gt=0, description="Micro-batches of a step: more need less memory, with the same result."
    )
    steps: int | None = Field(
        None, gt=0, description="Optimizer steps; empty: from tokens, else one pass over the data."
    )
    tokens: int | None = Field(None, gt=0, description="Training tokens, instead of steps.")
    time_budget_s: float | None = Field(
        None,
        gt=0,
        description="Take fewer steps where this machine would need more seconds for them; the plan says how many.",
    )
    max_grad_norm: float = Field(1.0, ge=0, description="Gradients are clipped to this global norm; 0: no clipping.")
    seed: int = Field(0, ge=0, description="Seed of the initial weights and of the data order.")
    eval_every: int = Field(0, ge=0, description="Steps between evaluations on the val split; 0: only at the end.")
    eval_sequences: int = Field(64, ge=0, description="Sequences of the val split in an evaluation; 0: all.")
    checkpoint: Annotated[Checkpointing, Circumstance()] = Field(
        Checkpointing(), description="Checkpoints from which a killed training resumes."
    )
    compile: Annotated[bool, Circumstance()] = Field(False, description="Run every layer through torch.compile.")

    @model_validator(mode="after")
    def _fits_together(self) -> Train:
        if self.batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                f"gradient_accumulation_steps {self.gradient_accumulation_steps} does not divide batch_size {self.batch_size}"
            )
        if self.steps is not None and self.tokens is not None:
            raise ValueError("give steps or tokens, not both")
        return self

    def num_steps(self, train_tokens: int) -> int:
        """Optimizer steps over a split of `train_tokens`."""
        budget = self.tokens or train_tokens
        return self.steps or max(1, math.ceil(budget / (self.batch_size * self.seq_len)))

    def files(self) -> dict[str, Path]:
        """The files from which the mixture is computed, whose content is part of the identity."""
        found = {} if self.mixture is None else self.mixture.files()
        return {name: path for name, path in found.items() if path.is_file()}

    def plan(self, facts: Mapping[str, Facts], machine: Machine) -> TrainPlan:
        """Time, memory and disk of the steps, and the facts of the trained model.

        Raises SpecError when data, model and teacher do not match, or the schedule does not fit the steps.
        """
        data = _data(facts)
        given = {role: need(facts, role, CheckpointFacts) for role in ("teacher", "model", "mask") if role in facts}
        config = self._config(given, data[0])
        wanted = self.num_steps(sum(one.split("train").tokens for one in data))
        if "mask" in given:
            check_mask(given["mask"], config)
        work = self._work(config, data, given, wanted, machine.device)
        steps = affordable_steps(work, self.time_budget_s, machine)
        if steps < wanted:
            work = self._work(config, data, given, steps, machine.device)
        self.schedule.share(0, steps)  # raises now when the warm-up is too long
        made = CheckpointFacts(
            where=self.stage,
            config=config,
            dtype=work.dtype,
            weights_bytes=BYTES[work.dtype] * config.num_params,
            tokenizer=data[0].tokenizer,
        )
        estimates = with_energy(estimate(work, machine), machine)
        return TrainPlan(estimates=estimates, facts=made, ways=WAYS, steps=steps, wanted_steps=wanted)

    def run(self, plan: TrainPlan, draft: Draft, parents: dict[str, Artifact], run: Run) -> None:
        """Trains (from the newest checkpoint if there is one), writes the folder and records the figures.

        Raises SpecError when mixture or curriculum do not fit the data, HoneError when the loss diverges.
        """
        from hone.data.mix.reading import Reading, data_parents
        from hone.model.hf import save

        plan = self._begun(plan, draft, parents, run)
        first = next(iter(data_parents(parents).values()))
        reading = Reading(parents, self.mixture, self.curriculum)
        reading.prepare(plan.steps * self.batch_size, self.seq_len, self.seed, draft, run)
        draft.predict(reading.estimates())
        warm_up(run.device)
        with draft.measuring(Window(run.device)) as window:
            model, teacher = self._models(parents, reading.sources.train, run)
            zeros = zeros_of(parents["mask"].folder, run.device) if "mask" in parents else {}
            trainer = self._trainer(model, teacher, plan.steps, zeros)
            checkpoints = Checkpoints(draft.state / "checkpoints", keep=self.checkpoint.keep_latest_k)
            watch = self._train(draft, trainer, reading, checkpoints, run)
            reading.evaluate(partial(self._loss, trainer.model), self.eval_sequences, draft)
            save(model, draft.folder, tokenizer_from=first.folder)
        self._record(draft, watch, model.config, reading.sources.num_tokens, window)
        said = f"of {plan.wanted_steps}: what {self.time_budget_s:g} s allow" if plan.steps < plan.wanted_steps else ""
        draft.record("num_steps", plan.steps, "steps", note=said)
        if zeros:
            draft.record(
                "sparsity", sparsity(zeros), "fraction", note="zeros in the layers' linears, fixed by the mask"
            )
        if CHECKPOINTS in plan.estimates:
            draft.record(CHECKPOINTS, checkpoints.largest_bytes, "B", note="on disk at once; gone at the end")
        reading.record(draft)

    def _begun(self, plan: TrainPlan, draft: Draft, parents: dict[str, Artifact], run: Run) -> TrainPlan:
        """The plan with the steps that the run began with: a new calibration must not change them in the middle."""
        if self.time_budget_s is None:
            return plan
        path = draft.state / "steps"
        if not path.exists():
            write_atomic(path, str(plan.steps).encode())
        elif (steps := int(path.read_text())) != plan.steps:
            fixed = self.model_copy(update={"steps": steps, "tokens": None, "time_budget_s": None})
            facts = {role: facts_of(parent) for role, parent in parents.items()}
            again = fixed.plan(facts, machine_of(run))
            draft.predict(again.estimates)
            return again.model_copy(update={"wanted_steps": plan.wanted_steps})
        return plan

    def _config(self, given: Mapping[str, CheckpointFacts], data: DataFacts) -> ModelConfig:
        """The config of the model to train, checked against the data and the parents in their roles."""
        from hone.train.student import student_config

        if self._wants_teacher and "teacher" not in given:
            raise SpecError(
                f"objective '{self.objective.kind}' with init '{self.init}' needs a teacher",
                fix="add teacher: NAME OR FOLDER, or use objective next_token and init random",
            )
        if "model" in given and self.init == "teacher":
            raise SpecError("init: teacher and a 'model' parent both give the initial weights", fix="drop one of them")
        starts = "teacher" if self.init == "teacher" else "model"
        if starts in given and given[starts].quantization:
            raise SpecError(
                f"{given[starts].where} has quantized weights, which cannot be trained",
                fix="start from the model it was compressed from",
            )
        for role, one in given.items():
            _same_tokens(one, data, role)
        if self.init == "teacher":
            config = student_config(given["teacher"].config, self.keep_every)
        elif "model" in given:
            config = given["model"].config
        else:
            config = self.model.config(data.vocab_size, eos=data.eos_token_id)
        config.must_be_causal("the next token would be visible to its own prediction")
        if self.seq_len > config.max_seq_len:
            raise SpecError(
                f"seq_len {self.seq_len} is longer than the model's max_seq_len {config.max_seq_len}",
                fix=f"give seq_len at most {config.max_seq_len}, or a longer model.max_seq_len",
            )
        return config

    @property
    def _wants_teacher(self) -> bool:
        return self.objective.from_teacher or self.init == "teacher"

    def _work(
        self,
        config: ModelConfig,
        data: list[DataFacts],
        given: Mapping[str, CheckpointFacts],
        steps: int,
        device: str,
    ) -> Work:
        """The sizes of `steps` steps on `data`, from which estimates are computed."""
        facts, dtype = config.facts(), TORCH_NAMES[self.precision]
        val = [one.splits["val"].num_sequences(self.seq_len) for one in data if "val" in one.splits]
        evaluated = min(sum(val), self.eval_sequences or sum(val))
        evaluations = 1 + ((steps - 1) // self.eval_every if self.eval_every else 0)
        if len(data) > 1:  # the sources of a mixture are also evaluated one by one
            by_source = sum(min(rows, self.eval_sequences or rows) for rows in val)
        else:
            by_source = 0 if self.mixture is None else evaluated
        update, teacher = self.optimizer.cost(facts, dtype, device), given.get("teacher")
        saved = (steps - 1) // self.checkpoint.interval if self.checkpoint.interval else 0
        return Work(
            model=facts,
            steps=steps,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            dtype=dtype,
            segments=self.activation_checkpointing.segments(config.num_layers),
            update=masked(update, facts) if "mask" in given else update,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            eval_sequences=evaluations * evaluated + by_source,
            teacher=teacher.config.facts() if teacher is not None and self.objective.from_teacher else None,
            num_checkpoints=min(saved, self.checkpoint.keep_latest_k + 1),
        )

    def _models(self, parents: dict[str, Artifact], data: PackedTokens, run: Run) -> tuple[Decoder, Decoder | None]:
        """(model in float32, teacher in the compute dtype or None) on the run's device."""
        import torch

        from hone.model.decoder import build
        from hone.model.hf import load
        from hone.train.precision import compute_dtype
        from hone.train.student import from_teacher

        teacher = load(parents["teacher"].folder, run.device, torch.float32) if self._wants_teacher else None
        if "model" in parents:
            model = load(parents["model"].folder, run.device, torch.float32)
        elif self.init == "teacher":
            assert teacher is not None, "planned without a teacher"
            model = from_teacher(teacher, self.keep_every)
        else:
            config = self.model.config(data.vocab_size, eos=data.eos_token_id)
            model = build(config, device=run.device, seed=self.seed)
        keep = teacher is not None and self.objective.from_teacher
        return model, teacher.to(compute_dtype(self.precision)) if keep else None

    def _trainer(self, model: Decoder, teacher: Decoder | None, steps: int, zeros: dict[str, Tensor]) -> Trainer:
        from hone.train.loop import Trainer

        return Trainer(
            model,
            steps=steps,
            schedule=self.schedule,
            optimizer=self.optimizer,
            objective=self.objective,
            activation_checkpointing=self.activation_checkpointing,
            precision=self.precision,
            max_grad_norm=self.max_grad_norm,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            teacher=teacher,
            compile=self.compile,
            zeros=zeros,
        )

    def _train(self, draft: Draft, trainer: Trainer, reading: Reading, checkpoints: Checkpoints, run: Run) -> Watch:
        """Runs the loop from the newest checkpoint's step."""
        from hone.train.loop import fit
        from hone.train.watch import Watch

        found = checkpoints.newest()
        if found is not None:
            trainer.restore(*found)
            run.say(f"resuming at step {trainer.done} of {trainer.steps}")
        calibration = machine_of(run).calibration
        with run.progress("train: step", trainer.steps) as progress:
            progress.skip(trainer.done)
            watch = Watch(
                draft.folder,
                draft.log,
                device=run.device,
                resume_at=trainer.done,
                forward_flops_per_token=trainer.model.config.flops_per_token(self.seq_len),
                peak_flops_per_s=calibration and calibration.peak_flops_per_s(TORCH_NAMES[self.precision]),
                progress=progress,
                kept=draft.keep_time,
            )
            try:
                fit(
                    trainer,
                    reading.feed,
                    batch_size=self.batch_size,
                    seq_len=self.seq_len,
                    seed=self.seed,
                    val=reading.sources.val if reading.sources.val.num_sequences(self.seq_len) else None,
                    eval_every=self.eval_every,
                    eval_sequences=self.eval_sequences,
                    watch=watch,
                    checkpoints=checkpoints,
                    checkpoint_every=self.checkpoint.interval,
                )
            except (RuntimeError, MemoryError) as error:
                said = out_of_memory(error, run.device, trainer.done + 1)
                if said is None:
                    raise
                raise said from None
            finally:
                watch.close()
        return watch

    def _loss(self, model: Decoder, part: PackedTokens) -> float:
        """Mean loss on the first sequences of `part`."""
        from hone.train.loop import validate

        return validate(
            model, part, batch_size=self.batch_size, seq_len=self.seq_len, num_sequences=self.eval_sequences
        )

    def _record(self, draft: Draft, watch: Watch, config: ModelConfig, num_tokens: int, window: Window) -> None:
        """Records the figures and the techniques of the model."""
        rows = read_jsonl(draft.folder / "steps.jsonl")
        losses = [row["loss"] for row in rows if "loss" in row]
        tail = losses[-10:]
        objective = "" if self.objective.kind == "next_token" else f", objective {self.objective.kind}"
        draft.record("num_params", config.num_params, "parameters")
        draft.record("model_bytes", weights_bytes(draft.folder), "B")
        tokens = [row["tokens"] for row in rows if "tokens" in row][-1]
        draft.record("train_tokens", tokens, "tokens", note=f"{tokens / max(num_tokens, 1):.2f} epochs")
        note = f"mean of the last {len(tail)} steps{objective}"
        draft.record("final_loss", sum(tail) / len(tail), "nats/token", n=len(tail), note=note)
        last = next((row for row in reversed(rows) if "val_loss" in row), None)
        where = f"first {self.eval_sequences} sequences of val" if self.eval_sequences else "all of val"
        where += f", {self.seq_len} tokens each, documents apart"
        draft.record("val_loss", last and last["val_loss"], "nats/token", note=where if last else "val is empty")
        note = f"{where}; tokens per byte of the whole split" if last else "val is empty"
        draft.record("val_bits_per_byte", last and last["val_bits_per_byte"], "bits/byte", note=note)
        rate = watch.tokens_per_s()
        mfu = watch.mfu(rate) if rate else None
        note = "6 a weight, head included, plus causal-halved attention; peak as calibrated"
        draft.record("tokens_per_s", rate, "tokens/s", n=max(len(watch.rates), 1), note="evaluation left out")
        draft.record("mfu", mfu, "fraction", note=note if mfu else "no calibrated peak")
        joules = window.energy_j and window.energy_j / max(sum(tokens for tokens, _ in watch.rates), 1)
        draft.record("joules_per_token", joules, "J/token", note="" if joules else window.energy_note)
        for slot, technique in (
            ("objective", self.objective),
            ("schedule", self.schedule),
            ("optimizer", self.optimizer),
            ("activation_checkpointing", self.activation_checkpointing),
        ):
            if technique.kind != "none":
                draft.did({"slot": slot, **technique.model_dump(mode="json")})


def _data(facts: Mapping[str, Facts]) -> list[DataFacts]:
    """The facts of the data, the first source's first. Raises SpecError when their tokenizers differ."""
    data = [need(facts, role, DataFacts) for role in facts if role.partition(".")[0] == "data"]
    for other in data[1:]:
        if any(getattr(other, mark) != getattr(data[0], mark) for mark in ("vocab_size", "eos_token_id", "tokenizer")):
            raise SpecError(
                f"{data[0].where} and {other.where} have different tokenizers",
                fix=f"tokenize the second with tokenizer: {{path: {data[0].where}}}",
            )
    return data


def _same_tokens(parent: CheckpointFacts, data: DataFacts, role: str) -> None:
    """Raises SpecError unless the parent model has the data's tokenizer and an embedding for each of its tokens."""
    if parent.config.vocab_size < data.vocab_size:
        said = f"{parent.where} knows {parent.config.vocab_size} tokens, the data use {data.vocab_size}"
    elif None not in (parent.tokenizer, data.tokenizer) and parent.tokenizer != data.tokenizer:
        said = f"the tokenizers of {parent.where} and {data.where} tokenize differently"
    else:
        return
    raise SpecError(said, fix=f"tokenize the data with the {role}'s tokenizer, or use another {role}")
