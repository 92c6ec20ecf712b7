"""The training loop: a step is forward, backward, norm, update; `fit` repeats it, evaluates, logs and checkpoints.

A step is all in `Trainer.step`. Other rooms train with the same two names: a `Trainer` around a
decoder, and `fit` with packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.base.errors import HoneError
from hone.feed.load import Batch, Feed, PackedTokens
from hone.feed.mix.sources import Joined
from hone.measure.compilers import keep_kernels_apart
from hone.model.context import Context
from hone.model.decoder import Decoder
from hone.train.activation_checkpointing import ActivationCheckpointing, KeepAll, Segment
from hone.train.checkpoint import Checkpoints, SavedTensors
from hone.train.expert_parallel.passes import RoomyPasses
from hone.train.faults.checks import Checks
from hone.train.faults.rerun import Guard, Rerun
from hone.train.live.rank_times import RankTimes
from hone.train.live.samples import Sampler
from hone.train.noise.linears import linears_of
from hone.train.objectives.at_start import AtStart
from hone.train.objectives.base import Objective, Setting
from hone.train.objectives.next_token import NextToken
from hone.train.objectives.preference.measure import evaluated, held_out_loss
from hone.train.objectives.taps import tap, total
from hone.train.offload.techniques import Offload, Resident
from hone.train.optimizers.adamw import AdamW
from hone.train.optimizers.base import Optimizer
from hone.train.passes import Counts, Early, Step, Sums, Told, cut, run_layers, shrink, to_device
from hone.train.precision import TORCH_NAMES, LossScaler, Precision
from hone.train.quantization_aware.steps import with_steps
from hone.train.ranks import Ranks
from hone.train.routing.loads import Routing
from hone.train.schedules.base import Schedule
from hone.train.spikes.rewind import Rewinder, Rewound
from hone.train.spikes.skip_step import Spikes
from hone.train.update import Update
from hone.train.watch import Watch


class Trainer:
    """A decoder in training: its weights, its optimizer, the loss scale, and the number of `steps` done.

    The model is given in float32 and trained in place; afterwards its parameters have the dtype of `precision` (see
    precision.py). `gradient_accumulation_steps` divides a step's batch into that many micro-batches: less memory, the same result but
    for rounding. `compile` runs every layer through torch.compile. `zeros` are weights that stay zero (see `Weights`).
    With `ranks` every rank of a training has a Trainer, and its `step` gets the rank's part of the batch (`Ranks.data`). `setting` is for
    objectives that prepare their batches.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        steps: int,
        schedule: Schedule,
        optimizer: Optimizer | None = None,
        objective: Objective | None = None,
        activation_checkpointing: ActivationCheckpointing | tuple[Segment, ...] | None = None,
        precision: Precision = "fp32",
        max_grad_norm: float = 1.0,
        gradient_accumulation_steps: int = 1,
        teacher: Decoder | None = None,
        compile: bool = False,
        zeros: Mapping[str, Tensor] | None = None,
        ranks: Ranks | None = None,
        offload: Offload | None = None,
        setting: Setting | None = None,
    ) -> None:
        self.model = model.train()
        self.ranks = ranks or Ranks()
        self.steps = steps
        self.schedule = schedule
        self.optimizer = optimizer or AdamW()
        self.objective = objective or NextToken()
        how = activation_checkpointing or KeepAll()
        self.segments = how.segments(len(model.layers)) if isinstance(how, ActivationCheckpointing) else how
        self.max_grad_norm = max_grad_norm
        self.spikes = Spikes(self.optimizer.on_spike)
        self.rewound: Rewound | None = None
        """How often it went back from a spike; None: `optimizer.rewind` is not set, or it has not begun."""
        self.rerun: Rerun | None = None
        """Compares some steps with what another rank computes; None: none."""
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.tutor = self.objective.tutor(model, teacher)
        self.teacher = self.tutor.decoder
        self.update = Update(
            model,
            self.optimizer,
            getattr(torch, TORCH_NAMES[precision]),
            accumulate=gradient_accumulation_steps > 1 or self.objective.writes,
            zeros=zeros,
            grid=self.ranks.grid,
            sharded=self.ranks.sharded,
            offload=(offload or Resident()).ready(self.ranks.mesh.world_size, self.ranks.num_shards),
            summing=self.ranks.summing,
            moves=self.ranks.moves,
        )
        if self.teacher is None and self.objective.from_teacher:
            assert self.objective.reference_at_start, "this objective needs a teacher"
            self.teacher = AtStart(model)  # type: ignore[assignment]
        self.scaler = LossScaler(enabled=precision == "fp16")
        holds = gradient_accumulation_steps > 1 and "weights" not in self.ranks.sharded
        self.linears = linears_of(model, precision, self.objective, holds=holds)
        self.routing, self.rooms = Routing(model, compiles=compile), RoomyPasses(model, self.ranks.mesh)
        self.preparer = self.objective.preparer(setting)
        self.sampler: Sampler | None = None
        """What writes samples at evaluations."""
        self.done = 0
        self.tokens = 0
        self.asked: Callable[[], bool] = lambda: False
        """Whether this rank was asked to end."""
        self.stopping = False
        """Whether all ranks end after this step, because one was asked to."""
        self.early: Early | None = None
        """Decides whether the training is complete before its last step."""
        self.device = next(model.parameters()).device
        self.times = RankTimes(self.ranks.mesh, self.device)
        self.tutor = with_steps(self.tutor, self.linears)
        self.tutor.begin(self)
        if compile:
            keep_kernels_apart()
            for layer in model.layers:  # not its hooks, which wait for other ranks
                layer.forward = torch.compile(layer.forward, dynamic=False)

    @property
    def read(self) -> int:
        """Batches read for the steps done, with those that were left out after spikes."""
        return self.done + (self.rewound.left_out if self.rewound else 0)

    def step(self, batch: Batch) -> Step:
        """One optimizer step on `batch`. Raises HoneError when the loss or the gradients are not finite (unless such a step is
        skipped), MachineError when another rank is lost."""
        with self.ranks.mesh.transfers():
            return self._step(batch)

    def _step(self, batch: Batch) -> Step:
        sums, counts = self._passes(self.prepared(batch))
        means = self._means(sums, counts)
        told = Told(means)
        self.routing.summed = means[len(means) - self.routing.size :] if self.routing.size else None
        # A step whose numbers are not finite ends the training, unless it may be skipped: the update need not wait for them.
        ahead = not (self.scaler.enabled or self.spikes.spec or self.update.on_host)
        if ahead:
            self.update.apply(self.lr, shrink(means[1], self.max_grad_norm))
        step = self._judged(told, counts)
        if step.skipped:
            self.update.weights.drop_grads()
        elif not ahead:
            factor = shrink(step.grad_norm, self.max_grad_norm) / self.scaler.scale
            self.update.apply(self.lr, factor, last=step.step == self.steps)
        return self._ended(step)

    @property
    def lr(self) -> float:
        """The learning rate of the step that comes."""
        return self.optimizer.lr * self.schedule.share(self.done, self.steps)

    def prepared(self, batch: Batch) -> Batch:
        """`batch` with what the objective must know of the whole step before its passes."""
        return batch if self.preparer is None else self.preparer.prepare(self, batch)  # type: ignore[return-value]

    def _passes(self, batch: Batch) -> tuple[Sums, Counts]:
        """As `gradients`, compared with another rank's where that is due."""
        due = self.rerun is not None and self.rerun.due(self)
        return self.rerun.gradients(self, batch) if due else self.gradients(batch)

    def _judged(self, told: Told, counts: Counts) -> Step:
        """The numbers of the step, for which the host waits here, and whether it is skipped. Raises HoneError where it may not be."""
        loss, norm, *rest = told.numbers()
        extras, counted = rest[: len(rest) - self.routing.size], rest[len(rest) - self.routing.size :]
        self.times.ends()
        norm = norm / self.scaler.scale
        finite = math.isfinite(norm)
        overflowed = self.scaler.enabled and not finite
        why = "" if overflowed and math.isfinite(loss) else self.spikes.judge(loss, norm)
        if self.spikes.stuck or not (why or (math.isfinite(loss) and (finite or overflowed))):
            raise self._diverged(loss, norm)
        return Step(
            self.done + 1,
            loss,
            self.lr,
            norm if finite else None,
            self.tokens + int(counts.tokens),
            extras[0] if extras else None,
            skipped=overflowed or bool(why),
            why=why,
            loads=self.routing.read(counted, self.done + 1, self.steps),
        )

    def _ended(self, step: Step) -> Step:
        """Counts a step that was made or skipped."""
        self.tutor.stepped(self, step)
        if self.scaler.enabled and step.grad_norm is None:
            self.scaler.overflowed()
        else:
            self.scaler.passed()
        self.routing.stepped(None if step.skipped else step.loads)
        self.done, self.tokens = step.step, step.tokens
        return step

    def gradients(self, batch: Batch) -> tuple[Sums, Counts]:
        """Forward and backward passes over the micro-batches of `batch`: sets each weight's gradient, times the loss scale.

        The gradient is that of the sum over the whole step divided by the whole step's counts, so it does not depend on
        the division into micro-batches, however many targets each has.
        """
        batch, counts = self._divided(batch)
        self.times.passes()
        if self.linears is not None:
            self.linears.begin(self.update.weights, self.done)
        total, extras, routing = torch.zeros((), device=self.device), None, None
        written = self.preparer and self.preparer.parts
        parts = cut(batch, written or self.gradient_accumulation_steps)
        if self.ranks.pipeline is not None:
            self.update.weights.before_backward(last=False)
            shares = [(self.scaler.scale / counts.targets, self.scaler.scale / counts.positions)] * len(parts)
            how = parts, self.segments, self._objective, shares, self._begin
            found, routed = self.ranks.pipeline.train(self.model, *how)
            self.update.weights.before_backward(last=True)
            self.update.weights.after_backward()
            return Sums(*found, self.update.weights.squared_norm(), self.routing.counts(*routed)), counts
        for place, part in enumerate(parts, 1):
            loss, extra, context = self.rooms.forward(lambda part=part, place=place: self._loss(part, place))
            routing = self.routing.counts(context.routing, before=routing)
            objective = loss * (self.scaler.scale / counts.targets)
            if extra is not None:
                objective = objective + extra * (self.scaler.scale / counts.positions)
                extras = extra.detach() if extras is None else extras + extra.detach()
            self.update.weights.before_backward(last=place == len(parts))
            objective.backward()
            self.rooms.ended()
            self.update.weights.after_backward()
            total += loss.detach()
        self.tutor.learn(self, parts, counts)
        return Sums(total, extras, self.update.weights.squared_norm(), routing), counts

    def _divided(self, batch: Batch) -> tuple[Batch, Counts]:
        """This rank's part of the sequences of `batch`, and the counts of a whole step, known before its first backward pass."""
        read = int((batch.document_ids >= 0).sum()) // self.objective.views  # without padding
        if self.ranks.context is not None:
            batch = self.ranks.context.divide(batch)
            read *= self.ranks.context.axis.index == 0  # the others have parts of the same sequences
        own = [self.objective.count_in(batch), batch.tokens.size, read] if self.ranks.counts_tokens else [0, 0, 0]
        self.times.arrives()
        rows = self._of_ranks(torch.tensor([*own, self.asked(), *self.times.own], dtype=torch.float64))
        self.times.gathered(self.done, rows[:, 4:])
        targets, positions, tokens, asked = rows[:, :4].sum(0).tolist()  # whole numbers, so in any order
        self.stopping = asked > 0
        return batch, Counts(max(targets, 1.0), positions, tokens)

    def _means(self, sums: Sums, counts: Counts) -> Tensor:
        """Loss a target, gradient's norm times the loss scale, layers' own loss a token if any, counts of routers: float64 [n]."""
        parts = [
            part.detach().double().reshape(-1) for part in (sums.loss, sums.extra, sums.routing) if part is not None
        ]
        losses = torch.cat(parts) * self.ranks.counts_loss
        self.times.computed()
        whole = self._over_ranks(torch.cat([losses[:1], sums.squared_norm.double()[None], losses[1:]]))
        self.times.met()
        loss = whole[0].float() / counts.targets
        at = 2 + (sums.extra is not None)
        return torch.cat([loss.double()[None], whole[1:2].sqrt(), whole[2:at] / counts.positions, whole[at:]])

    def _over_ranks(self, sums: Tensor) -> Tensor:
        """Float64 sums [n] of this rank added up over all ranks: here and in `_of_ranks` alone a step's numbers cross them."""
        return self.ranks.mesh.sum(sums)

    def _of_ranks(self, numbers: Tensor) -> Tensor:
        """Float64 `numbers` [n] of every rank, [ranks, n]."""
        return self.ranks.mesh.every(numbers)

    def _loss(self, batch: Batch, place: int) -> tuple[Tensor, Tensor | None, Context]:
        """The objective summed over micro-batch `place`, the layers' own losses, summed over its tokens, and its context."""
        tokens, targets, context = to_device(batch, self.device, self.ranks.context)
        self.tutor.look_up(batch, context)
        self._begin(context, place)
        loss = self._objective(run_layers(self.model, tokens, context, self.segments), tokens, targets, context)
        extra = context.extra_loss  # a mean over the tokens of this pass
        return loss, None if extra is None else extra * tokens.numel(), context

    def _begin(self, context: Context, place: int) -> None:
        tap(self.objective, self.model, self.teacher, context)
        self.routing.begin(context, self.done, self.ranks.data[0] * self.gradient_accumulation_steps + place)

    def _objective(self, x: Tensor, tokens: Tensor, targets: Tensor, context: Context) -> Tensor:
        """The objective summed over the micro-batch whose last hidden states are x."""
        return total(self.objective, self.model, self.teacher, x, tokens, targets, context)

    def _diverged(self, loss: float, norm: float) -> HoneError:
        skipped = f" after {self.spikes.in_a_row - 1} skipped ones" if self.spikes.stuck else ""
        return HoneError(
            f"training diverged at step {self.done + 1}{skipped}: loss {loss:g}, gradient norm {norm:g}, learning rate {self.lr:g}",
            fix=f"lower optimizer.lr (it is {self.optimizer.lr:g}), lengthen schedule.warmup or lower max_grad_norm "
            f"(it is {self.max_grad_norm:g})",
        )

    def save(self, checkpoints: Checkpoints, **more: Any) -> None:
        """Writes all on which the next step depends, and `more` beside it. The order of the data follows from `done`. All ranks call it."""
        tensors = self.update.state()
        if self.ranks.mesh.leads:
            tensors |= self.tutor.state()  # alike on all ranks
            tensors["rng.cpu"] = torch.get_rng_state()
            if self.device.type == "cuda":
                tensors["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        else:
            tensors.pop("updates", None)
        if self.ranks.summing is not None:
            own = self.ranks.summing.state().items()
            tensors |= {f"sum-{self.ranks.mesh.rank}.{name}": tensor for name, tensor in own}
        if self.preparer is not None:
            head = f"prepared-{self.ranks.mesh.rank}."
            tensors |= {head + name: tensor for name, tensor in self.preparer.state().items()}
        states = {"scaler": self.scaler.state(), "spikes": self.spikes.state()}
        numbers = {"done": self.done, "tokens": self.tokens, **states}
        numbers |= {"rewound": self.rewound} if self.rewound else {}
        numbers |= {"router_bias": bias} if (bias := self.routing.state(self.ranks.mesh)) else {}
        numbers |= more
        checkpoints.save(self.done, tensors, numbers, self.update.pieces(), self.update.stored_cuts())

    def restore(self, stored: SavedTensors, numbers: dict[str, Any]) -> None:
        """Restores what `save` wrote, with any number of ranks; the next step is then the one that would have followed.

        Bit for bit on a CPU with the same number of threads and ranks; on a GPU attention's backward pass may add in another order.
        """
        with self.ranks.mesh.transfers():
            self.update.restore(stored)
        self.tutor.restore(stored)
        if self.ranks.summing is not None:
            head = f"sum-{self.ranks.mesh.rank}."
            names = [label for label in stored.labels if label.startswith(head)]
            own = {name.removeprefix(head): stored.whole(name).to(self.device) for name in names}
            self.ranks.summing.restore(own)
        if self.preparer is not None:
            head = f"prepared-{self.ranks.mesh.rank}."
            names = [label for label in stored.labels if label.startswith(head)]
            self.preparer.restore({name.removeprefix(head): stored.whole(name) for name in names})
        torch.set_rng_state(stored.whole("rng.cpu"))
        if self.device.type == "cuda" and "rng.cuda" in stored.labels:
            torch.cuda.set_rng_state(stored.whole("rng.cuda"), self.device)
        self.done, self.tokens = numbers["done"], numbers["tokens"]
        self.scaler.restore(numbers["scaler"])
        self.spikes.restore(numbers.get("spikes", {}))
        self.rewound = Rewound(*numbers["rewound"]) if "rewound" in numbers else None
        self.routing.restore(numbers.get("router_bias", {}))


def fit(
    trainer: Trainer,
    data: Feed,
    *,
    batch_size: int,
    seq_len: int,
    seed: int = 0,
    val: PackedTokens | Joined | None = None,
    eval_every: int = 0,
    eval_sequences: int = 0,
    watch: Watch | None = None,
    checkpoints: Checkpoints | None = None,
    checkpoint_every: int = 0,
    first_sequence: int = 0,
    after_step: Callable[[Trainer, float | None], None] | None = None,
    eval_also: Sequence[int] = (),
    checks: Checks | None = None,
) -> None:
    """Trains until `trainer.steps` are done, from its current step, or until it is `stopping` or ends `early`, which sets `steps`.

    A step is a batch of `batch_size` sequences of `seq_len` tokens, of which each data-parallel rank takes an
    equal part. With `val` the loss on its first `eval_sequences` sequences (0: all) is computed every `eval_every` steps, every
    so many steps of `eval_also` (0: not) and after the last one. `watch` logs every step; `checkpoints` saves the
    whole state every `checkpoint_every` steps and when it stops, after `watch` has synced its logs. Step n, from 0, reads
    from sequence `first_sequence` + n `batch_size` on. `after_step` is called on all ranks after every step, with that loss if it was computed.
    `checks` are those of the numbers themselves.
    """
    _, parts = trainer.ranks.data
    guard = Guard(checks or Checks(), trainer, checkpoints, watch)
    rewind = trainer.optimizer.rewind
    rewinder = None if rewind is None else Rewinder(rewind, trainer, checkpoints)
    while trainer.done < trainer.steps:
        first, each = first_sequence + trainer.read * batch_size, batch_size // parts
        trainer.times.begins()

        def read(index: int, first: int = first, each: int = each) -> Batch:
            wanted = np.arange(first + index * each, first + (index + 1) * each, dtype=np.int64)
            return data.sequences(wanted, seq_len, seed)

        step = trainer.step(guard.reading(read))
        if rewinder is not None and step.why:
            rewinder.back(step, watch)
            continue
        if watch is not None:
            more = {} if trainer.preparer is None else trainer.preparer.row
            watch.stepped(step.row() | more, trainer.times.last)
        early, val_loss = trainer.early, None
        if early is not None and trainer.done < trainer.steps and early.over(trainer.done):
            trainer.steps = trainer.done
        last = trainer.done == trainer.steps
        scored = any(every and trainer.done % every == 0 for every in (eval_every, *eval_also))
        if val is not None and (last or scored):
            sizes = {"batch_size": batch_size, "seq_len": seq_len, "num_sequences": eval_sequences}
            val_loss = held_out_loss(trainer, val, **sizes)
            row = evaluated(trainer, val, val_loss, **sizes)
            if watch is not None:
                watch.evaluated(row)
            if early is not None and not last and early.reached(trainer.done, val_loss):
                trainer.steps, last = trainer.done, True
        due = trainer.stopping or (checkpoint_every and trainer.done % checkpoint_every == 0)
        guard.stepped(saves=bool(due) or scored or last)  # `after_step` keeps models that were evaluated
        if after_step is not None:
            after_step(trainer, val_loss)
        if checkpoints is not None and due and not last:
            if watch is not None:
                watch.sync()
            trainer.save(checkpoints)
            if watch is not None:
                watch.restart_clock()
        if trainer.stopping:
            break
    if checkpoints is not None:
        checkpoints.finish()
