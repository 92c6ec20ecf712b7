"""The train stage: packed tokens in, a Hugging Face folder with the trained model out, resumable at every checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, model_validator

from hone.base.artifact import Artifact, Draft
from hone.base.figure import Estimate
from hone.base.plan import Facts, facts_of, need
from hone.base.run import Run
from hone.base.spec import Circumstance
from hone.base.table import Choice, Technique
from hone.cost.energy import with_energy
from hone.cost.train.cut import cut
from hone.cost.train.figures import estimate
from hone.cost.train.offload import estimate_left
from hone.cost.train.training import CHECKPOINTS
from hone.feed import CURRICULA, MIXTURES
from hone.feed.epochs import check_batch, epoch_of, repeats, steps_for
from hone.feed.order.random import Random
from hone.measure.clocks.governed import governed
from hone.measure.machine import Machine, machine_of
from hone.measure.warm import warm_up
from hone.measure.window import Window, power_trace
from hone.model.adapters import ADAPTERS
from hone.model.facts import CheckpointFacts
from hone.model.shape import Shape
from hone.train import ACTIVATION_CHECKPOINTINGS, OBJECTIVES, OPTIMIZERS, SCHEDULES
from hone.train.activation_checkpointing import KeepAll
from hone.train.activation_checkpointing.sizes import fitted, reasons
from hone.train.adapters.fits import needs_teacher, with_adapter
from hone.train.adapters.saving import saved_facts, saver
from hone.train.checkpoint import Checkpoints
from hone.train.continuation.keep import Keeper
from hone.train.continuation.more import Prolonged
from hone.train.continuation.plan import TrainPlan
from hone.train.continuation.start import Start, start_of, trained_as
from hone.train.expert_parallel.fits import check_stacks, check_training
from hone.train.faults.memory import WAYS, on_ranks, out_of_memory, remedies
from hone.train.fp8.fits import check_passes, fp8_notes
from hone.train.growth import figures as growth
from hone.train.growth.init import Init, growths_of, kept_layers
from hone.train.inputs import config_of, data_of, same_vocabulary
from hone.train.intervals import Checkpointing, EarlyStopping, Stop, Validation
from hone.train.live.opening import check, shown, watch_of
from hone.train.live.profiling import Profiler
from hone.train.live.samples import Sampler, check_samples
from hone.train.mask import check_mask, zeros_of
from hone.train.noise.fits import check_noise
from hone.train.objectives.draft_heads.fits import check_heads
from hone.train.objectives.next_token import NextToken
from hone.train.objectives.preference.fits import check_pairs, with_score
from hone.train.objectives.r_drop import check_views
from hone.train.objectives.taps import check_taps
from hone.train.offload.choose import chosen, record_left
from hone.train.optimizers.adamw import AdamW
from hone.train.parallelism import Parallelism
from hone.train.pipeline.notes import drawing, notes
from hone.train.precision import Precision, saved_dtype
from hone.train.quantization_aware.fits import check_rounding, exported_note
from hone.train.rollouts.fits import NOTE, check_rollouts, known
from hone.train.routing.layouts import expert_params
from hone.train.routing.layouts import notes as expert_notes
from hone.train.schedules.cosine import Cosine
from hone.train.start import starting_models, trainer_of
from hone.train.teachers.fits import check_teacher, cost_notes
from hone.train.to_cost.training import training_of

if TYPE_CHECKING:
    from hone.feed.load import PackedTokens
    from hone.feed.mix.reading import Reading
    from hone.model.decoder import Decoder
    from hone.train.budget.control import Budget
    from hone.train.loop import Trainer
    from hone.train.watch import Watch


class Train(Prolonged):
    """Trains a decoder on packed tokens, from random weights, another model's, or as a student of a teacher.

    Weights of layers' linears that are zero in the input `mask` are zero and stay zero.
    """

    stage: ClassVar[str] = "train"
    remedies, on_ranks = remedies, on_ranks
    roles: ClassVar[dict[str, bool]] = {"data": True, "teacher": False, "model": False, "mask": False, "logits": False}
    several: ClassVar[frozenset[str]] = frozenset({"data"})
    every_rank: ClassVar[bool] = True
    model: Shape = Field(
        default_factory=Shape, description="Sizes of a new model; not used with a 'model' parent or init: teacher."
    )
    init: Init = Field(
        "random",
        description="Initial weights: random; teacher: copies of every init.keep_every-th layer of the teacher; or growths, in turn: "
        "a larger model made of the one that 'model' gives.",
    )
    adapter: Annotated[Technique, Choice(ADAPTERS)] | None = Field(
        None, description="Trains this adapter and nothing of 'model', and saves a PEFT folder; empty: all weights."
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
    precision: Precision = Field(
        "fp32",
        description="Dtype of the computation; fp8: of layers' linears, else as bf16. Master weights are float32.",
    )
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
    tokens: int | None = Field(None, gt=0, description="Training tokens without padding, instead of steps.")
    max_grad_norm: float = Field(1.0, ge=0, description="Gradients are clipped to this global norm; 0: no clipping.")
    seed: int = Field(0, ge=0, description="Seed of the initial weights and of the data order.")
    validation: Validation = Field(Validation(), description="Evaluations on the val split.")
    early_stopping: EarlyStopping = Field(EarlyStopping(), description="An end before the last step.")
    checkpoint: Annotated[Checkpointing, Circumstance()] = Field(
        Checkpointing(), description="Checkpoints, what stays of them, and what is read of the model."
    )
    parallelism: Annotated[Parallelism, Circumstance()] = Field(
        Parallelism(), description="How several ranks share the work."
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
        self.activation_checkpointing.check(compile=self.compile, stages=self.parallelism.pipeline_parallel_degree)
        intervals = {"validation": self.validation.interval, **self.checkpoint.intervals}
        intervals |= {"early_stopping": self.early_stopping.every, "energy": self.early_stopping.energy.every}
        self.parallelism.check_steps(self.precision, intervals, self.max_grad_norm, self.optimizer.on_spike)
        rerun = bool(self.checkpoint.check.rerun_interval)
        check_training(self.parallelism.expert_parallel_degree, self.optimizer, rerun=rerun)
        self.checkpoint.fits(self.optimizer.rewind, exact=self.parallelism.exact)
        ends_early = bool(self.early_stopping.every or self.early_stopping.energy.budget_j)
        told = {"ends_early": ends_early, "copies_state": self.checkpoint.async_mode == "async"}
        self.parallelism.offload.fits(precision=self.precision, **told)
        growth.check(growths_of(self.init), self.checkpoint.load)
        return self

    def files(self) -> dict[str, Path]:
        """The files from which the mixture is computed, whose content is part of the identity."""
        found = {} if self.mixture is None else self.mixture.files()
        return {name: path for name, path in found.items() if path.is_file()}

    def plan(self, facts: Mapping[str, Facts], machine: Machine) -> TrainPlan:
        """Time, memory and disk of the steps, and the facts of the trained model.

        Raises SpecError when data, model and teacher do not match, or the schedule does not fit the steps.
        """
        data = data_of(facts)
        given = {role: need(facts, role, CheckpointFacts) for role in ("teacher", "model", "mask") if role in facts}
        config = config_of(
            given,
            data[0],
            shape=self.model,
            keep_every=kept_layers(self.init),
            growths=growths_of(self.init),
            objective=self.objective.kind,
            wants_teacher=needs_teacher(self, given) or kept_layers(self.init) is not None,
            seq_len=self.seq_len,
            adapted=self.adapter is not None or self.objective.trains_heads,
        )
        config = with_score(self, with_adapter(self, config, given), given)
        check_heads(self, config, given, machine.num_ranks)
        marks = [one.same_as for one in data]
        start, epoch = start_of(self, marks, given.get("model")), epoch_of(data, self.seq_len)
        if all(one.exact for one in data) and not machine.planned:
            check_batch(epoch, self.batch_size, self.seq_len, " and ".join(one.where for one in data))
        steps = self.steps or steps_for(epoch, self.batch_size, self.tokens)
        if "mask" in given:
            check_mask(given["mask"], config)
        teacher = given["teacher"].config if needs_teacher(self, given) else None
        if teacher is not None:
            same_vocabulary(config, given["teacher"], data[0], self.parallelism.tensor_parallel_degree)
        divided = self.parallelism.divided(machine.num_ranks)
        self.parallelism.check(config, seq_len=self.seq_len, teacher=teacher)
        check_stacks(expert_params(config) > 0, self.parallelism, self.optimizer)
        check_passes(self, config, machine.num_ranks)
        check_noise(self, config)
        check_views(self, config)
        check_samples(self, machine.num_ranks)
        check_rounding(self, config)
        check_pairs(self.objective, data, self.parallelism, rerun=self.checkpoint.check.rerun_interval)
        check_rollouts(self, data, config)
        check_taps(self, config, teacher or (config if self.objective.reads_teacher else None))
        check_teacher(self, config, machine.num_ranks, data, facts)
        for one in (config, *([teacher] if teacher else [])):
            self.parallelism.check_sequences(one, self.seq_len)
        kept = self.activation_checkpointing
        work = training_of(self, config, data, epoch, given, start.left(steps), machine, divided)
        work = cut(fitted(work, kept, machine), machine, zeros="mask" in given)
        work, places = chosen(work, machine, self.precision)
        schedule = start.schedule(self.schedule, steps)
        schedule.share(0, steps)  # raises now when the warm-up is too long
        if self.checkpoint.keep.optimizer:
            self.parallelism.data_parallel.check_kept(schedule.kept_after(steps), steps)
        tokens = work.steps * work.step_tokens * work.filled
        grown = growth.planned(growths_of(self.init), given.get("model"), config, self.seq_len, tokens)
        made = CheckpointFacts(
            where=self.stage,
            **saved_facts(config, work.saved_dtype, given.get("model")),
            tokenizer=data[0].tokenizer,
            trained=grown.trained(trained_as(self, start, marks, schedule, steps, work.filled)),
        )
        if self.objective.trains_heads:
            made = self.objective.facts(config, self.stage, work.saved_dtype, data[0].tokenizer)
        estimates = (
            with_energy(estimate(work, machine), machine)
            | estimate_left(work.offload, work.load, machine)
            | grown.estimates
        )
        estimates = known(self, estimates)
        joules = estimates.get("energy_j")
        said = (*grown.notes, *reasons(work, kept, machine), *notes(work, machine))
        again = (*places, *repeats(epoch, self.batch_size, work.steps))
        again = (*again, *([NOTE] if self.objective.writes else ()))
        numbers = fp8_notes(self.precision, config, self.parallelism.tensor_parallel_degree)
        ends = (*self.early_stopping.notes(steps), *self.early_stopping.energy.notes(steps, joules and joules.value))
        numbers = (*numbers, *exported_note(self.objective), *cost_notes(self.objective))
        said = (*start.notes, *ends, *again, *expert_notes(config), *numbers, *said)
        segments = KeepAll().segments(config.num_layers) if self.objective.trains_heads else work.segments
        found = {"notes": said, "repeats": again, "steps": steps, "segments": segments}
        stages = work.pipeline and (work.pipeline.layers, drawing(work, machine))
        found |= {"offload": work.offload, "pipeline": stages, "grown": grown}
        return TrainPlan(estimates=estimates, facts=made, ways=WAYS, start=start, schedule=schedule, **found)

    def run(self, plan: TrainPlan, draft: Draft, parents: dict[str, Artifact], run: Run) -> None:
        """Trains (from the newest checkpoint if there is one), writes the folder and records the figures.

        Raises SpecError when mixture or curriculum do not fit the data, HoneError when the loss diverges.
        """
        from hone.feed.mix.reading import Reading, data_parents
        from hone.train.budget.control import Budget
        from hone.train.result import record, record_how, rounding_of

        mesh = run.mesh
        mesh.from_leader(lambda: check(run))
        first = next(iter(data_parents(parents).values()))
        reading = Reading(parents, self.mixture, self.curriculum)
        start = plan.start
        total = start.sequences(plan.steps + self.optimizer.spare_batches, self.batch_size)
        read = {"read": start.at.sources, "done": start.at.sequences}
        prepare = partial(reading.prepare, total, self.seq_len, self.seed, draft, run, **read)
        mesh.from_leader(prepare)
        if not mesh.leads:
            prepare()  # reads the mixture that rank 0 wrote
        for line in plan.repeats:
            run.say(line)
        draft.predict(reading.estimates(start.sequences(plan.steps, self.batch_size)))
        warm_up(run.device)
        with (
            governed(run.clock, run.device, run.say) as governor,
            draft.measuring(Window(run.device, power_trace(run, draft))) as window,
        ):
            zeros = zeros_of(parents["mask"].folder, run.device) if "mask" in parents else {}
            models = partial(starting_models, self, parents, reading.sources.train, run, state=draft.state)
            # No name has the whole models where a rank has parts of them.
            offload = plan.offload.within(draft.state / "offload")
            in_parts = mesh.world_size > 1 or offload.leaves
            trainer = trainer_of(self, *models(in_parts=in_parts), plan, zeros, run, offload, first.folder)
            for line in trainer.update.weights.notes:
                run.say(line)
            if self.validation.samples:
                trainer.sampler = Sampler(self.validation.samples, self.validation.sample_tokens, first.folder)
            stop = Stop(self.early_stopping, draft, run)
            trainer.early = early = Budget(self.early_stopping.energy, stop, trainer, plan.schedule, draft, run)
            early.governor = governor
            checkpoints = self.checkpoint.opened(draft.state / "checkpoints", mesh)
            at = plan.schedule.kept_after(plan.steps)
            saved = saved_dtype(
                self.precision, self.checkpoint.export_dtype, adapted=bool(trainer.model.config.adapters)
            )
            saves = saver(trainer, parents, first.folder, saved)
            place = partial(start.place_of, plan.schedule, plan.steps, self.batch_size, reading.position)
            growing, val = growth.Growing(plan.grown, draft, run), reading.sources.val
            score = partial(self._loss, trainer, val) if val.num_sequences(self.seq_len) else None
            growing.measure(trainer, parents, score)
            keeper = Keeper(self.checkpoint.keep, draft, mesh, at, place, saves)
            watch = self._train(draft, trainer, reading, checkpoints, start, keeper, window, early, run)
            reading.evaluate(partial(self._loss, trainer), self.validation.sequences, draft)
            config, rounding = saves(draft.folder), rounding_of(trainer, self.precision, saved)
            if watch is None:
                return
        sizes = {"step_positions": self.batch_size * self.seq_len, "seq_len": self.seq_len}
        sizes |= {"sequences": self.validation.sequences, "tokens_before": start.at.tokens}
        found: dict[str, Any] = {"rounding": rounding, "best_step": keeper.best_step, "paused_j": early.paused_j}
        found |= {"heads": self.objective.num_params(config)} if self.objective.trains_heads else {}
        record(draft, watch, config, window, objective=self.objective.kind, **sizes, **found)
        growing.record()
        early.record(draft)
        slots = ("objective", "schedule", "optimizer", "activation_checkpointing")
        record_how(
            draft,
            plan,
            {slot: getattr(self, slot) for slot in slots},
            steps=trainer.steps,
            said=early.said and f"of {plan.steps}: {early.said}",
            ranks=(mesh.world_size, self.parallelism.said(mesh.world_size)),
            zeros=zeros,
            largest_bytes=checkpoints.largest_bytes + keeper.largest_bytes,
        )
        read_at_end = start.sequences(trainer.read, self.batch_size)
        if trainer.steps < plan.steps:  # when a training ends early cannot be predicted, what its steps cost can
            none = Estimate(value=0.0, unit="B", formula="none was due")
            were = {CHECKPOINTS: none} if CHECKPOINTS in plan.estimates else {}
            were |= self._plan_of(trainer.steps - start.step, parents, run).estimates
            draft.predict(were | reading.estimates(read_at_end))
        reading.record(draft, read_at_end)
        keeper.record(draft)
        record_left(draft, trainer)
        self.parallelism.data_parallel.record(draft, trainer)

    def _plan_of(self, steps: int, parents: dict[str, Artifact], run: Run) -> TrainPlan:
        """The plan of `steps` alone, whose learning rates are nothing to its costs."""
        begun = self.checkpoint.model_copy(update={"load": "weights"})
        changes = {"steps": steps, "tokens": None, "schedule": Cosine(warmup=0), "checkpoint": begun}
        facts = {role: facts_of(parent) for role, parent in parents.items()}
        return self.model_copy(update=changes).plan(facts, machine_of(run))

    @property
    def evaluates_every(self) -> tuple[int, int]:
        """Steps between evaluations beside those of `validation`; 0: none."""
        return self.checkpoint.keep.evaluates_every, self.early_stopping.evaluates_every

    def _train(
        self,
        draft: Draft,
        trainer: Trainer,
        reading: Reading,
        checkpoints: Checkpoints,
        start: Start,
        keeper: Keeper,
        window: Window,
        budget: Budget,
        run: Run,
    ) -> Watch | None:
        """Runs the loop from the newest checkpoint's step, else from `start`. Rank 0 alone watches it."""
        from hone.train.loop import fit

        found = checkpoints.newest(run.say)
        if found is not None:
            trainer.restore(*found)
            run.say(f"resuming at step {trainer.done} of {trainer.steps}")
        else:
            for note in start.notes:
                run.say(note)
            start.restore(trainer)
        keeper.begun(trainer)
        profiler = Profiler(run, draft.target, trainer)
        with run.ending() as ending, shown(run, trainer.steps) as progress, profiler:
            trainer.asked = ending.asked
            progress.skip(trainer.done)
            val = reading.sources.val if reading.sources.val.num_sequences(self.seq_len) else None
            budget.begin(window.joules, window.energy_note, self._evaluation_steps(val))
            watch = watch_of(self, draft, trainer, progress, window.joules, budget.keep, run)
            train = partial(
                fit,
                trainer,
                reading.feed,
                batch_size=self.batch_size,
                seq_len=self.seq_len,
                seed=self.seed,
                val=val,
                eval_every=self.validation.interval,
                eval_sequences=self.validation.sequences,
                watch=watch,
                checkpoints=checkpoints,
                checkpoint_every=self.checkpoint.interval,
                first_sequence=start.at.sequences - start.step * self.batch_size,
                after_step=profiler.after(keeper.stepped),
                eval_also=self.evaluates_every,
                checks=self.checkpoint.check,
            )
            try:
                budget.through(train, watch)
            except (RuntimeError, MemoryError) as error:
                said = out_of_memory(error, run.device, trainer.done + 1, self)
                if said is None:
                    raise
                raise said from None
            finally:
                checkpoints.close()
                if watch is not None:
                    watch.close(whole=trainer.done == trainer.steps)
        if trainer.done < trainer.steps:
            raise ending.interrupted(f"ended after step {trainer.done} of {trainer.steps}, which is saved")
        keeper.ended(trainer)
        return watch

    def _evaluation_steps(self, val: Any) -> float:
        """What the last evaluation takes, in training steps: a forward pass is a third of one."""
        found = 0 if val is None else val.num_sequences(self.seq_len)
        return min(found, self.validation.sequences or found) / self.batch_size / 3

    def _loss(self, trainer: Trainer, part: PackedTokens, model: Decoder | None = None) -> float:
        """Mean loss on the first sequences of `part`, of another `model` than the trainer's if one is given."""
        from hone.train.objectives.preference.measure import held_out_loss

        sizes = {"batch_size": self.batch_size, "seq_len": self.seq_len, "num_sequences": self.validation.sequences}
        return held_out_loss(trainer, part, **sizes, model=model)
