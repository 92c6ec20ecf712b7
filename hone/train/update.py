"""The update: applies the rule of each group to its weights, bucket by bucket, and holds the optimizer's state."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from hone.base.errors import ArtifactError
from hone.cost.memory import BUCKET
from hone.model.decoder import Decoder
from hone.parallel.cut import Cut
from hone.parallel.grid import Grid
from hone.train.adapters.rates import adapter_groups
from hone.train.checkpoint import SavedTensors
from hone.train.data_parallel.moves import Moves
from hone.train.data_parallel.sums import Sum
from hone.train.data_parallel.weights import DividedWeights
from hone.train.offload.host import HostWeights
from hone.train.offload.ranks import DividedHostWeights
from hone.train.offload.techniques import Host, Offload
from hone.train.optimizers.base import Entry, Group, Optimizer, Part
from hone.train.weights import Weights, describe_parameters

_DELAYED = "delayed"


class Update:
    """One optimizer over all trained weights of `model`, which compute in `dtype`; see `Weights` for `accumulate` and `zeros`.

    With `grid` it updates this rank's part of them, as a data-parallel technique divides them (`DividedWeights`); then
    `states` has the part's states. Half-precision gradients are converted to float32 one bucket at a time, to save memory.
    `offload`: where masters and states are; on the host those of `HostSteps`.
    """

    def __init__(
        self,
        model: Decoder,
        optimizer: Optimizer,
        dtype: torch.dtype,
        *,
        accumulate: bool,
        zeros: Mapping[str, Tensor] | None = None,
        grid: Grid | None = None,
        sharded: Collection[str] = (),
        offload: Offload | None = None,
        summing: Sum | None = None,
        moves: Moves | None = None,
    ) -> None:
        self.parameters = describe_parameters(model)
        self.on_host = isinstance(offload, Host)
        self.groups = adapter_groups(optimizer.groups(self.parameters), model.config)
        self._rules = {name: group.rule for group in self.groups for name in group.names}
        assert optimizer.divides_stacks or grid is None or grid.ep.size == 1, (
            f"{optimizer.kind} divides no stacks of experts"
        )
        grouped = [name for group in self.groups for name in group.names]
        assert sorted(grouped) == sorted(self.parameters), "every parameter must belong to exactly one group"
        self.cuts: dict[str, Cut] = getattr(model, "cuts", {})
        """The parts of the model's weights that a tensor-parallel rank has; those that are not named it has whole."""
        self.cut_index = 0 if grid is None else grid.tp.index
        self._part_of: Callable[[str], Part | None] = getattr(model, "part_of", lambda _: None)
        self.weights: Weights
        zeros = {
            name: self.cuts[name].take(mask) if name in self.cuts else mask
            for name, mask in (zeros or {}).items()
            if name in self.parameters  # others are of another stage
        }
        if grid is None:
            if isinstance(offload, Host):
                told = {"offload": offload, "rules": self._rules, "parameters": self.parameters}
                self.weights = HostWeights(model, dtype, accumulate=accumulate, zeros=zeros, **told)
            else:
                self.weights = Weights(model, dtype, accumulate=accumulate, zeros=zeros)
        else:
            whole = {name for name, rule in self._rules.items() if rule.reads_whole}
            copied = set(self.parameters) - set(self.cuts) if grid.tp.size > 1 else ()
            alone = {name for name in self.cuts if self._part_of(name) is None}
            kept = DividedWeights
            if isinstance(offload, Host):
                kept = partial(DividedHostWeights, offload=offload, rules=self._rules, described=self.parameters)
            self.weights = kept(
                model,
                dtype,
                grid=grid,
                sharded=sharded,
                whole=whole,
                copied=copied,
                alone=alone,
                zeros=zeros,
                summing=summing,
                moves=moves,
            )
        self.states: dict[str, dict[str, Tensor]] = {}
        """Optimizer state by parameter; empty before the first step."""
        self.count = 0
        """Steps applied; skipped ones are not counted."""

    def apply(self, lr: float, factor: float | Tensor, *, last: bool = True) -> None:
        """One step with learning rate `lr` on the gradients times `factor`, as `Weights.take_grads` has it; drops the gradients.

        Where updates are delayed it goes on beside the passes of the next step, unless this is the `last` one.
        """
        self.weights.run(partial(self._apply, lr, factor), count=self.count, last=last)

    @torch.no_grad()
    def _apply(self, lr: float, factor: float | Tensor) -> None:
        self.count += 1
        # Vectors, which stand in a group of their own, come first: with its matrices all of a layer is then there.
        groups = sorted(
            self.groups, key=lambda group: sum(math.prod(self.parameters[one].shape) for one in group.names)
        )
        buckets = [(group, names) for group in groups for names in self._buckets(group)]
        for group, names in buckets if self.on_host else ():  # before what is in files starts to come
            for name in names:
                self._state(name, group)
        self.weights.begin([names for _, names in buckets], factor)
        for group, names in buckets:
            fused = group.rule.fuses(self.weights.masters[names[0]])
            if fused and not isinstance(factor, Tensor):
                factor = torch.full((), factor, device=self.weights.masters[names[0]].device)
            grads = self.weights.take_grads(names, None if fused else factor)
            entries = [self._entry(name, grad, group) for name, grad in zip(names, grads, strict=True)]
            for entry, name in zip(entries, names, strict=True) if fused else ():
                entry.factor, entry.rounded = factor, self.weights.rounded(name)  # type: ignore[assignment]
            numbers = {"count": self.count, "lr": lr * group.lr_factor, "weight_decay": group.weight_decay}
            self.weights.step(group.rule, entries, names, **numbers)
            self.weights.publish([name for name, one in zip(names, entries, strict=True) if one.rounded is None])
            self.weights.stepped(names)
        self.weights.published()

    def _entry(self, name: str, grad: Tensor, group: Group) -> Entry:
        part = self._part_of(name) if group.rule.reads_whole else None
        return Entry(self.weights.masters[name], grad, self._state(name, group), self.parameters[name], part)

    def _state(self, name: str, group: Group) -> dict[str, Tensor]:
        if name not in self.states:
            self.states[name] = self.weights.start(group.rule, name, self.parameters[name])
        return self.states[name]

    def _buckets(self, group: Group) -> Iterator[list[str]]:
        """Names of the group in buckets of about BUCKET numbers; one bucket when no gradient must be converted."""
        names: list[str] = []
        numbers = 0
        for name in group.names:
            if name not in self.weights.masters:  # other ranks hold all of it
                continue
            size = self.weights.masters[name].numel()
            if names and self.weights.split and numbers + size > BUCKET:
                yield names
                names, numbers = [], 0
            names.append(name)
            numbers += size
        if names:
            yield names

    def state(self) -> dict[str, Tensor]:
        """'weight.NAME' the float32 weights, 'KEY.NAME' the optimizer state, 'updates' the steps applied; with delayed updates
        'delayed.NAME' the weights of the next step.

        Of weights that several ranks have, the first one's only; so with states that all tensor-parallel ranks have whole.
        """
        self.weights.settle()
        masters = {name: master for name, master in self.weights.masters.items() if self.weights.holds(name)}
        tensors = {f"weight.{name}": master.detach() for name, master in masters.items()}
        for name, state in self.states.items():
            if name not in masters:
                continue
            copies = self.copies(name) if self.cut_index else frozenset()
            tensors |= {f"{key}.{name}": tensor for key, tensor in state.items() if key not in copies}
        tensors |= {f"{_DELAYED}.{name}": tensor for name, tensor in self.weights.delayed().items()}
        tensors["updates"] = torch.tensor(float(self.count))
        return tensors

    def pieces(self) -> dict[str, tuple[int, int]]:
        """The tensors of `state` that are a part of their weight's: the elements of it, start to stop."""
        found = {}
        for name, (start, stop) in self.weights.pieces.items():
            found[f"weight.{name}"] = (start, stop)
            for key, held in self.states.get(name, {}).items():
                each = self._rules[name].elements_per_entry.get(key, 1)
                part = (0, held.numel()) if self._rules[name].reads_whole else (start // each, -(-stop // each))
                found[f"{key}.{name}"] = part
        return found

    def copies(self, name: str) -> frozenset[str]:
        """The states of `name` that every tensor-parallel rank has whole, though it has a part of the weight."""
        return self._rules[name].whole_states if name in self.cuts else frozenset()

    def stored_cuts(self) -> dict[str, Cut]:
        """The tensors of `state` that are of a tensor-parallel rank's part of their weight, with that part."""
        return {
            f"{key}.{name}": cut
            for name, cut in self.cuts.items()
            if name in self.weights.masters
            for key in ("weight", *(key for key in self.states.get(name, ()) if key not in self.copies(name)))
        }

    @torch.no_grad()
    def restore(self, stored: SavedTensors) -> None:
        """Restores the result of `state`, of a training divided in any way.

        Raises ArtifactError, before anything is changed, when it is the state of other weights or of another optimizer.
        """
        keys: dict[str, list[str]] = {}
        for label in stored.labels:
            key, _, name = label.partition(".")
            if name in self.weights.masters:
                keys.setdefault(name, []).append(key)
        self.weights.settle()
        late = [name for name in keys if self.weights.delays and _DELAYED in keys[name]]
        for name in late:
            keys[name].remove(_DELAYED)
        self._must_be_of_these(stored, keys)
        self.count, self.states = int(stored.whole("updates").item()), {}
        for name, found in keys.items():
            master, rule = self.weights.masters[name], self._rules[name]
            start, _ = self.weights.pieces.get(name, (0, 0))
            cut, targets = self.cuts.get(name), {"weight": master}
            if len(found) > 1:
                targets |= self.weights.start(rule, name, self.parameters[name])
                self.states[name] = {key: targets[key] for key in found if key != "weight"}
            again = self._encoded_again(stored, name, found)
            for key in found:
                each, label = rule.elements_per_entry.get(key, 1), f"{key}.{name}"
                start_of_key, count = start // each, targets[key].numel()
                if key in again:
                    part = again[key][start_of_key : start_of_key + count]
                else:
                    part = stored.part(label, start_of_key, count, None if key in self.copies(name) else cut)
                targets[key].view(-1).copy_(part)
        self.weights.publish(list(self.weights.masters))
        self.weights.published()
        self.weights.delay({name: stored.whole(f"{_DELAYED}.{name}") for name in late})

    def _encoded_again(self, stored: SavedTensors, name: str, found: Collection[str]) -> dict[str, Tensor]:
        """The states of `name` whose blocks of elements begin elsewhere than in `stored`, because other parts of the weight were
        divided into blocks there: decoded, put together and encoded, for this rank's part; {} where they begin alike."""
        rule, keys = self._rules[name], [key for key in found if key != "weight"]
        cut, there = self.cuts.get(name), stored.cuts(f"{keys[0]}.{name}") if keys else []
        if not rule.elements_per_entry or there == [None] == [cut] or cut in there or not keys:
            return {}
        shape = self.parameters[name].shape
        whole: dict[str, Tensor] = {}
        for one in there:
            local = shape if one is None else one.local_shape
            sizes = {key: -(-math.prod(local) // rule.elements_per_entry.get(key, 1)) for key in keys}
            state = {key: stored.part(f"{key}.{name}", 0, size, one) for key, size in sizes.items()}
            for key, values in rule.decode(state).items():
                if one is None:
                    whole[key] = values.view(shape)
                else:
                    one.put(values.view(local), whole.setdefault(key, torch.empty(shape)))
        return rule.encode(
            {key: (values if cut is None else cut.take(values)).reshape(-1) for key, values in whole.items()}
        )

    def _must_be_of_these(self, stored: SavedTensors, keys: Mapping[str, list[str]]) -> None:
        """Raises ArtifactError unless `stored` has every weight in its size, with the state of its rule or none; `keys` by weight."""
        fix = "give the checkpoint of this model and optimizer, or start without it"
        for name, master in self.weights.masters.items():
            found = set(keys.get(name, ())) - {"weight"}
            if "weight" not in keys.get(name, ()):
                raise ArtifactError(f"a checkpoint has no weight {name}: it is of another model", fix=fix)
            shape = self.parameters[name].shape
            if stored.numel(f"weight.{name}") != math.prod(shape):
                said = f"{stored.numel(f'weight.{name}')} elements in a checkpoint, {math.prod(shape)} in the model"
                raise ArtifactError(f"{name} has {said}: it is of another model", fix=fix)
            empty = master[:0] if master.ndim else master
            wanted = set(self._rules[name].start(empty, self.parameters[name])) if found else found
            if found != wanted:
                raise ArtifactError(
                    f"a checkpoint has {', '.join(sorted(found))} of {name}, its optimizer needs {', '.join(sorted(wanted))}: "
                    "it is the state of another optimizer or of one with other options",
                    fix=fix,
                )
