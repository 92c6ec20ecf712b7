"""Rounds of speculation on the device: verify, accept, guess on; one CUDA graph, replayed several times before the host reads a token.

A round runs the model on each sequence's last token and its guesses, draws the model's own token at each of these places, keeps those up to
the first that no guess foretold, moves the sequence on, and guesses again. A guess is kept exactly when it is what the model's draw gives, whose
noise depends on (seed, position, token) alone: text is what it would be without guesses, greedy or sampled. A drafter that draws its guesses
uses the noise of the same places, so that they agree as often as two coupled draws do (Daliri et al. 2024, arXiv:2408.07978).

Guesses are a tree (`tree`) where the drafter has several choices of a place: the path of the model's own tokens is kept, so that text is still
the same, greedy or sampled. Few sequences have many nodes, because a pass of few tokens is as fast as one of a single token.

Legend: S sequences (padded), Q nodes of a sequence's tree, k its depth, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.cost.serve.captured import rounds_ahead
from hone.model.decoder import Decoder
from hone.ops.dispatch import say_once
from hone.serve.device.graphs import padded
from hone.serve.device.placing import FixedInputs
from hone.serve.kv_policies.policy import KeptTokens
from hone.serve.paging.cache import KVCache
from hone.serve.sampler import SampledToken
from hone.serve.speculation.drafter import Drafter, HiddenGuesser
from hone.serve.speculation.passes import DevicePass, Draws, Verified
from hone.serve.speculation.round_state import RoundState
from hone.serve.speculation.tree import MOST_NODES, Tree
from hone.serve.step import ForwardBatch, StepInput

_MOST = 32
"""Most rounds before the host reads."""

ROUND_TOKENS = 64
"""Tokens that a round verifies in about the time of one: up to here the nodes of the trees of all its sequences go."""

_CHANCES = [[0.5 * 0.8**place / (rank + 1) ** 1.5 for rank in range(8)] for place in range(32)]
"""Of each choice of a place to be right, roughly, as heads of minutes of training have them: they decide the shape of a tree alone."""


class RoundKey(NamedTuple):
    """A captured round: its sequences, and whether top-k, top-p and min-p are read."""

    seqs: int
    filtered: bool


@dataclass
class RoundsOutput:
    """Rounds on their way to the host."""

    told: Tensor
    """int64 [R, S, 1 + k + Q]: guesses kept, the model's tokens (-1 where logits are not finite), the guesses that follow."""
    num_guesses: list[int]
    """Of the first round, by sequence."""
    tree: Tree
    guesses_on: bool
    event: torch.cuda.Event | None = None

    @property
    def count(self) -> int:
        """The rounds."""
        return len(self.told)

    def read(self) -> list[tuple[list[SampledToken], int, int, list[int]]]:
        """For each sequence: its tokens, the guesses verified, the rounds that verified some, the guesses that follow."""
        if self.event is not None:
            self.event.synchronize()
        rounds = self.told.tolist()
        found = []
        for place, first in enumerate(self.num_guesses):
            chosen = []
            for one in rounds:
                kept, *rest = one[place]
                chosen += [SampledToken(token, token >= 0) for token in rest[: kept + 1]]
            later = len(rounds) - 1
            guesses = rounds[-1][place][2 + self.tree.depth :] if self.guesses_on else []
            found.append((chosen, first + later * (len(self.tree) - 1), (first > 0) + later, guesses))
        return found


@dataclass
class _Round:
    """The buffers of one key, and its graph where rounds are captured."""

    inputs: FixedInputs
    state: RoundState
    graph: torch.cuda.CUDAGraph | None = None
    tables: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # the rotary tables that it reads


class Rounds:
    """Rounds of one model over one cache, and of its drafter's heads if these guess on the device."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        table: Tensor,
        longest: int,
        drafter: Drafter,
        guesser: HiddenGuesser | None = None,
    ) -> None:
        """`table` [places, pages]: the pages of every place of a step. Positions stay below `longest`.

        Without a `guesser` a round verifies what the host gives it. Rounds are captured on a GPU, and run as they are elsewhere.
        """
        self._model, self._cache, self._table, self._device = model, cache, table, table.device
        self._longest, self._most_seqs = longest, drafter.max_num_seqs
        self._guesser = guesser
        self.tree = tree_of(drafter, model, cache, guesser)
        """Of few sequences; with more it has fewer nodes, the first ones."""
        self._k = self.tree.depth
        self._caches = [one for one in (cache, guesser and guesser.cache) if one is not None]
        asked = getattr(drafter, "num_rounds", None)
        self.ahead = 0 if guesser is None else asked or rounds_ahead(len(model.layers), model.config.active_params)
        """Rounds that may follow one another before the host reads; 0 where each needs guesses of the host's."""
        self._made: dict[RoundKey, _Round] = {}
        self._told = torch.empty(0, dtype=torch.int64)
        self._pool = torch.cuda.graph_pool_handle() if table.is_cuda else None
        self._broken = False
        self._pending = sorted({self._key(count, False) for count in range(1, self._most + 1)}, reverse=True)

    @property
    def _most(self) -> int:
        return min(self._most_seqs, len(self._table))

    @property
    def guesses_on(self) -> bool:
        """Whether rounds guess, so that one may follow another at once."""
        return self._guesser is not None and not self._broken

    def _tree(self, num_seqs: int) -> Tree:
        """That of a round of `num_seqs` sequences, padded."""
        return self.tree.first(max(self._k + 1, ROUND_TOKENS // num_seqs))

    def _key(self, num_seqs: int, filtered: bool) -> RoundKey:
        return RoundKey(min(padded(num_seqs), self._most), filtered)

    def takes(self, step: StepInput) -> bool:
        """Whether rounds compute and draw as a step's sequences ask."""
        asked = step.sampling.any_touched or step.sampling.any_logprobs or step.batch.any_adapters
        return not (self._broken or asked)

    def count(self, step: StepInput) -> int:
        """The rounds that a step may run at once: each sequence decodes, with pages for all their tokens; 0: it must run otherwise."""
        batch, most = step.batch, int(step.room.min())
        if batch.num_seqs > self._most or len(step.sampled) < batch.num_seqs:
            return 0
        behind = len(self._tree(self._key(batch.num_seqs, False).seqs)) - 1
        if most < behind:
            return 0
        if not self.takes(step) or step.scored or step.pooling.any():
            return 0
        starts = batch.ends - batch.lengths
        if (batch.lengths != 1 + step.num_guesses).any() or (batch.positions[_firsts(batch)] != starts).any():
            return 0
        if self._guesser is None:
            # `settle` looks up the pages of k places behind the last that may be kept.
            return int(starts.max() + 2 * self._k < self._longest)
        tokens = min(most, self._longest - 1 - int(starts.max())) - behind
        return max(0, min(_MOST, tokens // (self._k + 1)))

    @torch.inference_mode()
    def launch(self, step: StepInput, batch: ForwardBatch, count: int) -> RoundsOutput | None:
        """Starts `count` rounds of a step, whose `batch` has the guesses; None: they cannot be captured here."""
        key = self._key(batch.num_seqs, step.sampling.any_filters)
        one = self._made.get(key) or self._make(key)
        if one is None:
            return None
        tree = one.state.tree
        self._fill(one.inputs, tree, step, batch.tokens)
        shape = (count, *one.state.packed.shape)
        if self._told.numel() < np.prod(shape):
            self._told = torch.empty(int(np.prod(shape)), dtype=torch.int64, pin_memory=self._device.type == "cuda")
        told = self._told[: int(np.prod(shape))].view(shape)
        for number in range(count):
            if one.graph is None:
                told[number] = self._round(one, key)
            else:
                one.graph.replay()
                told[number].copy_(one.state.packed, non_blocking=True)
        event = None
        if one.graph is not None:
            event = torch.cuda.Event()
            event.record()
        verified = np.minimum(step.num_guesses, len(tree) - 1).tolist()
        return RoundsOutput(told, verified, tree, self._guesser is not None, event)

    def capture_next(self) -> bool:
        """Captures one more number of sequences, for an engine that has nothing else to do; False when all are there."""
        while self._pending and not self._broken and self._pool is not None:
            key = self._pending.pop(0)
            if key not in self._made:
                with torch.inference_mode():
                    return self._make(key) is not None
        return False

    def _fill(self, inputs: FixedInputs, tree: Tree, step: StepInput, tokens: np.ndarray) -> None:
        """Brings a step to the buffers, in one copy."""
        batch, sampling, width = step.batch, step.sampling, len(tree)
        count, host = batch.num_seqs, inputs.next()
        firsts = _firsts(batch)
        ahead = np.minimum(np.arange(width), step.num_guesses[:, None])
        host["tokens"][:count], host["tokens"][count:] = tokens[firsts[:, None] + ahead], 0
        seqs = host["seqs"]
        seqs[:, count:] = 0
        seqs[0, :count], seqs[1, :count], seqs[2, :count] = batch.ends - batch.lengths, step.num_guesses, 1
        host["lengths"][:, count:] = 0
        host["lengths"][:, :count] = [[width], [self._k + 1], [1]]
        numbers = {
            "seeds": sampling.seed,
            "temperature": sampling.temperature,
            "top_k": np.minimum(sampling.top_k, 2**31 - 1),
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
        }
        for what, values in numbers.items():  # what pads draws as the sequences before it in the buffer did
            host[f"verify_{what}"].reshape(-1, width)[:count] = values[:, None]
            host[f"guess_{what}"].reshape(self._k, -1)[:, :count] = values
        inputs.send()

    def _inputs(self, key: RoundKey) -> FixedInputs:
        count, width = key.seqs, len(self._tree(key.seqs))
        sizes: dict[str, tuple[tuple[int, ...], type]] = {
            "tokens": ((count, width), np.int64),
            "seqs": ((3, count), np.int64),
            "lengths": ((3, count), np.int32),  # of the model's pass, of a drafter's over the path, and of its others
        }
        for name, number in (("verify", width * count), ("guess", self._k * count)):
            sizes |= {f"{name}_seeds": ((number,), np.int64), f"{name}_top_k": ((number,), np.int32)}
            sizes |= {f"{name}_{what}": ((number,), np.float32) for what in ("temperature", "top_p", "min_p")}
        return FixedInputs(sizes, self._device)

    def _make(self, key: RoundKey) -> _Round | None:
        """The round of a key, captured on a GPU; None where that fails."""
        inputs = self._inputs(key)
        on, size = inputs.on, self._cache.block_size
        one = _Round(
            inputs, RoundState.of(on["tokens"], on["seqs"], self._table[: key.seqs], size, self._tree(key.seqs))
        )
        if self._pool is None:
            self._made[key] = one
            return one
        if self._broken:
            return None
        graph = torch.cuda.CUDAGraph()
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # compiles kernels and sets libraries up before the capture
                self._round(one, key)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._round(one, key)
        except RuntimeError as error:
            self._broken = True
            say_once(f"guesses are verified without CUDA graphs: {str(error).splitlines()[0]}")
            return None
        one.graph = graph
        one.tables = [table for cache in self._caches for table in cache.tables.values()]
        self._made[key] = one
        return one

    def _round(self, one: _Round, key: RoundKey) -> Tensor:
        """One round: int64 [S, 1 + k + Q] as `RoundsOutput.told`. Leaves the next one's tokens and places in the buffers."""
        on, state, guesser = one.inputs.on, one.state, self._guesser
        names = ("temperature", "seeds", "top_k", "top_p", "min_p")
        state.place()
        positions, after, pages, offsets = state.placed.flatten(1)
        lengths, path_lengths, ones = on["lengths"]
        seen = None if state.tree.is_chain else state.nodes[3]
        context = DevicePass(
            self._cache,
            state.table,
            (positions, pages, offsets),
            state.ends[0],
            lengths,
            len(state.tree),
            self._longest,
            tree=seen,
        )
        context.taps = dict.fromkeys(guesser.taps if guesser is not None else ())
        x = self._model.hidden(state.tokens.view(-1), context)
        draws = Draws(*(on[f"verify_{name}"] for name in names), key.filtered)
        chosen, peaks = draws.draw(self._model.head(x), after)
        state.settle(chosen, peaks)
        state.keep(self._cache.stores)
        if guesser is not None:
            draws = Draws(*(on[f"guess_{name}"] for name in names), key.filtered)
            state.leave(guesser.guess_in_round(Verified(x, chosen, state, context, path_lengths, ones, draws)))
        return state.packed


def tree_of(drafter: Drafter, model: Decoder, cache: KVCache, guesser: HiddenGuesser | None) -> Tree:
    """The tree of guesses of a drafter: a chain where it has one choice of a place, or a layer's attention takes no tree.

    Raises SpecError where the drafter asks for a tree that cannot be.
    """
    asked, k = getattr(drafter, "tree_size", None), drafter.num_tokens
    if guesser is None or asked is None or asked == k:
        return Tree.chain(k)
    mixers = [layer.mixer for layer in model.config.layers]
    group = max(getattr(one, "num_heads", 64) // getattr(one, "num_kv_heads", 1) for one in mixers)
    plain = all(set(one) == {"k", "v"} for one in cache.layers) and not any(cache.scales) and cache.kept == KeptTokens()
    most = min(MOST_NODES, 64 // group) if plain and all(getattr(one, "window", None) is None for one in mixers) else 0
    if asked + 1 > most:
        raise SpecError(
            f"engine.drafter.tree_size is {asked}, and this model's attention verifies "
            + (f"at most {most - 1} guesses at once" if most > k else "guesses that follow one another only"),
            fix=f"set engine.drafter.tree_size={max(k, most - 1)}, or leave it out",
        )
    return Tree.grown(_CHANCES[:k], asked + 1, branches=guesser.branches)


def _firsts(batch: ForwardBatch) -> np.ndarray:
    """[S] Index of each sequence's first token among the T."""
    return batch.last_indices() + 1 - batch.lengths
