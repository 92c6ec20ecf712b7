"""The train stage: packed tokens in, a Hugging Face folder with the trained model out, resumable at every checkpoint."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from hone.base.artifact import Artifact, Draft
from hone.base.durable import read_jsonl
from hone.base.errors import FitError, SpecError
from hone.base.run import Run
from hone.base.stage import Stage
from hone.base.table import Choice, Technique
from hone.data import CURRICULA, MIXTURES
from hone.data.order.random import Random
from hone.measure.machine import Machine, describe
from hone.measure.warm import warm_up
from hone.measure.window import Window
from hone.model.folder import weights_bytes
from hone.model.shape import Shape
from hone.train import ACTIVATION_CHECKPOINTINGS, OBJECTIVES, OPTIMIZERS, SCHEDULES
from hone.train.activation_checkpointing import KeepAll
from hone.train.objectives.next_token import NextToken
from hone.train.optimizers.adamw import AdamW
from hone.train.precision import TORCH_NAMES, Precision
from hone.train.schedules.cosine import Cosine

if TYPE_CHECKING:
    from hone.data.load import PackedTokens
    from hone.data.mix.reading import Reading
    from hone.model.config import ModelConfig
    from hone.model.decoder import Decoder
    from hone.train.loop import Trainer
    from hone.train.predict import Plan
    from hone.train.watch import Watch


class Train(Stage):
    """Trains a decoder on packed tokens, from random weights, from another model, or as a student of a teacher."""

    stage: ClassVar[str] = "train"
    roles: ClassVar[dict[str, bool]] = {"data": True, "teacher": False, "model": False}
    several: ClassVar[frozenset[str]] = frozenset({"data"})
    renamed: ClassVar[dict[str, str | None]] = {
        "accumulation": "gradient_accumulation_steps",
        "clip": "max_grad_norm",
        "eval_rows": "eval_sequences",
        "remat": "activation_checkpointing",
    }

    model: Shape = Field(
        default_factory=Shape, description="Sizes of a new model; not used with a 'model' parent or init: teacher."
    )
    init: Literal["random", "teacher"] = Field(
        "random", description="Where weights come from; teacher: every keep_every-th layer of the teacher, copied."
    )
    keep_every: int = Field(
        2, ge=2, description="With init: teacher, layers 0, n, 2n, ... are kept; 2 halves the depth."
    )
    optimizer: Annotated[Technique, Choice(OPTIMIZERS, default="adamw")] = Field(
        AdamW(kind="adamw"), description="How the weights follow their gradients."
    )
    schedule: Annotated[Technique, Choice(SCHEDULES)] = Field(
        Cosine(kind="cosine"), description="Learning rate over the steps."
    )
    objective: Annotated[Technique, Choice(OBJECTIVES)] = Field(
        NextToken(kind="next_token"), description="What is minimised."
    )
    activation_checkpointing: Annotated[Technique, Choice(ACTIVATION_CHECKPOINTINGS)] = Field(
        KeepAll(kind="none"), description="Which activations are computed twice instead of kept."
    )
    mixture: Annotated[Technique, Choice(MIXTURES)] | None = Field(
        None, description="Weights of the sources: of several data inputs, or of a column of one; empty: as they are."
    )
    curriculum: Annotated[Technique, Choice(CURRICULA)] = Field(
        Random(kind="random"), description="Order in which each source's sequences are learned."
    )
    precision: Precision = Field("fp32", description="Numbers of the computation; master weights are float32.")
    batch_size: int = Field(16, gt=0, description="Sequences of one optimizer step.")
    seq_len: int = Field(256, gt=1, description="Tokens of a sequence; documents packed into it do not see each other.")
    gradient_accumulation_steps: int = Field(
        1, gt=0, description="Micro-batches a step is cut into: less memory, the same result."
    )
    steps: int | None = Field(
        None, gt=0, description="Optimizer steps; empty: from tokens, else one pass over the data."
    )
    tokens: int | None = Field(None, gt=0, description="Training tokens, as another way to give the steps.")
    max_grad_norm: float = Field(1.0, ge=0, description="The gradient is scaled down to this norm; 0: never.")
    seed: int = Field(0, ge=0, description="Seed of the initial weights and of the data order.")
    eval_every: int = Field(0, ge=0, description="Steps between evaluations on the val split; 0: only at the end.")
    eval_sequences: int = Field(64, ge=0, description="Sequences of the val split that an evaluation takes; 0: all.")
    checkpoint_every: int = Field(100, ge=0, description="Steps between checkpoints; 0: none, a kill starts over.")
    checkpoint_keep: int = Field(2, gt=0, description="Checkpoints kept while the stage runs.")
    compile: bool = Field(False, description="Run every layer through torch.compile.")

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
        """The files that the mixture is computed from: other content is another artifact."""
        found = {} if self.mixture is None else self.mixture.files()
        return {name: path for name, path in found.items() if path.is_file()}

    def execute(self, draft: Draft, parents: dict[str, Artifact], run: Run) -> None:
        """Predicts, trains (from the newest checkpoint if there is one), writes the folder, records.

        Raises SpecError when data, model and teacher do not fit together, HoneError when the loss diverges.
        """
        from hone.data.mix.reading import Reading, data_parents
        from hone.model.hf import save
        from hone.train.predict import must_fit, predict

        first = next(iter(data_parents(parents).values()))
        reading = Reading(parents, self.mixture, self.curriculum)
        data = reading.sources.train
        steps = self.num_steps(reading.sources.num_tokens)
        self.schedule.share(0, steps)  # a warm-up that is too long is said before any work
        reading.prepare(steps * self.batch_size, self.seq_len, self.seed, draft, run)
        machine = Machine.model_validate(run.machine) if run.machine else describe(run.device)
        warm_up(run.device)
        with Window(run.device) as window:
            model, teacher = self._models(parents, first, data, run)
            plan = self._plan(model.config, teacher, reading, steps)
            estimates = predict(plan, machine, window.start_memory_bytes)
            must_fit(estimates["peak_memory_bytes"], machine)
            draft.predict({**estimates, **reading.estimates()})
            trainer = self._trainer(model, teacher, steps)
            watch = self._train(draft, trainer, reading, machine, run)
            reading.evaluate(partial(self._loss, trainer.model), self.eval_sequences, draft)
            save(model, draft.folder, tokenizer_from=first.folder)
        draft.record_window(window)
        self._record(draft, watch, model.config, reading.sources.num_tokens, window)
        reading.record(draft)

    def _models(
        self, parents: dict[str, Artifact], source: Artifact, data: PackedTokens, run: Run
    ) -> tuple[Decoder, Decoder | None]:
        """(model in float32, teacher in the compute dtype or None) on the run's device."""
        import torch

        from hone.model.decoder import build
        from hone.model.hf import load
        from hone.train.precision import compute_dtype
        from hone.train.student import from_teacher

        wants_teacher = self.objective.from_teacher or self.init == "teacher"
        if wants_teacher and "teacher" not in parents:
            raise SpecError(
                f"objective '{self.objective.kind}' with init '{self.init}' needs a teacher",
                fix="add teacher: NAME OR FOLDER, or use objective next_token and init random",
            )
        if "model" in parents and self.init == "teacher":
            raise SpecError("init: teacher and a 'model' parent both give the first weights", fix="drop one of them")
        if first := parents.get("teacher" if self.init == "teacher" else "model"):
            _must_be_dense(first)
        teacher = None
        if wants_teacher:
            teacher = load(parents["teacher"].folder, run.device, torch.float32)
            _same_tokens(parents["teacher"], teacher.config, source, data, "teacher")
        if "model" in parents:
            model = load(parents["model"].folder, run.device, torch.float32)
            _same_tokens(parents["model"], model.config, source, data, "model")
        elif self.init == "teacher":
            model = from_teacher(teacher, self.keep_every)
        else:
            config = self.model.config(data.vocab_size, eos=data.eos_token_id)
            model = build(config, device=run.device, seed=self.seed)
        model.config.must_be_causal("the next token would be read, not predicted")
        if self.seq_len > model.config.max_seq_len:
            raise SpecError(
                f"seq_len {self.seq_len} is longer than the model's max_seq_len {model.config.max_seq_len}",
                fix=f"give seq_len at most {model.config.max_seq_len}, or a longer model.max_seq_len",
            )
        keep = teacher is not None and self.objective.from_teacher
        return model, teacher.to(compute_dtype(self.precision)) if keep else None

    def _plan(self, config: ModelConfig, teacher: Decoder | None, reading: Reading, steps: int) -> Plan:
        from hone.train.predict import Plan

        val_rows = reading.sources.val.num_rows(self.seq_len)
        evaluations = 1 + ((steps - 1) // self.eval_every if self.eval_every else 0)
        return Plan(
            facts=config.facts(),
            steps=steps,
            batch_rows=self.batch_size,
            seq_len=self.seq_len,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            precision=self.precision,
            segments=self.activation_checkpointing.segments(config.num_layers),
            eval_sequences=evaluations * min(val_rows, self.eval_sequences or val_rows)
            + reading.eval_sequences(self.eval_sequences),
            teacher=None if teacher is None else teacher.config.facts(),
        )

    def _trainer(self, model: Decoder, teacher: Decoder | None, steps: int) -> Trainer:
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
        )

    def _train(self, draft: Draft, trainer: Trainer, reading: Reading, machine: Machine, run: Run) -> Watch:
        """Runs the loop from where the newest checkpoint stands."""
        from hone.train.checkpoint import Checkpoints
        from hone.train.loop import fit
        from hone.train.watch import Watch

        checkpoints = Checkpoints(draft.state / "checkpoints", keep=self.checkpoint_keep)
        found = checkpoints.newest()
        if found is not None:
            trainer.restore(*found)
            run.say(f"resuming at step {trainer.done} of {trainer.steps}")
        calibration = machine.calibration
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
                    val=reading.sources.val if reading.sources.val.num_rows(self.seq_len) else None,
                    eval_every=self.eval_every,
                    eval_sequences=self.eval_sequences,
                    watch=watch,
                    checkpoints=checkpoints,
                    checkpoint_every=self.checkpoint_every,
                )
            except (RuntimeError, MemoryError) as error:  # torch says a full memory in several ways
                if "out of memory" not in str(error) and "can't allocate memory" not in str(error):
                    raise
                raise FitError(
                    f"{run.device} is out of memory at step {trainer.done + 1}: {str(error).splitlines()[0]}",
                    fix="raise gradient_accumulation_steps, set activation_checkpointing: every_nth, or take a smaller model or seq_len",
                ) from None
            finally:
                watch.close()
        return watch

    def _loss(self, model: Decoder, part: PackedTokens) -> float:
        """Mean loss on the first rows of `part`."""
        from hone.train.loop import validate

        return validate(
            model, part, batch_size=self.batch_size, seq_len=self.seq_len, num_sequences=self.eval_sequences
        )

    def _record(self, draft: Draft, watch: Watch, config: ModelConfig, num_tokens: int, window: Window) -> None:
        """Figures and the techniques that made the model."""
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
            ("activation_checkpointing", self.activation_checkpointing),
        ):
            if technique.kind != "none":
                draft.did({"slot": slot, **technique.model_dump(mode="json")})


def _must_be_dense(parent: Artifact) -> None:
    """Raises SpecError when the weights that training would start from are quantized."""
    parent.need("config.json")
    config = json.loads((parent.folder / "config.json").read_text(encoding="utf8"))
    if config.get("quantization_config"):
        raise SpecError(
            f"{parent.folder} holds quantized weights, which cannot be trained",
            fix="start from the model it was compressed from",
        )


def _same_tokens(parent: Artifact, config: ModelConfig, source: Artifact, data: PackedTokens, role: str) -> None:
    """Raises SpecError unless the parent model has the data's tokenizer and an embedding for each of its tokens."""
    from hone.model.tokenizer import tokenizers_differ

    if config.vocab_size < data.vocab_size:
        raise SpecError(
            f"{parent.folder} knows {config.vocab_size} tokens, the data use {data.vocab_size}",
            fix=f"make the data with the {role}'s tokenizer, or take another {role}",
        )
    if tokenizers_differ(parent.folder, source.folder):
        raise SpecError(
            f"the tokenizers of {parent.folder} and {source.folder} cut texts differently",
            fix=f"make the data with the {role}'s tokenizer, or take another {role}",
        )
