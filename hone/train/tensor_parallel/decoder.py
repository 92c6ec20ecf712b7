"""The decoder of one tensor-parallel rank in training: its heads, columns and rows of the vocabulary, cut from whole weights.

The modules are those of the whole model, built from the rank's own config; hooks around mixers, feed-forwards and head join the
ranks (Megatron's f and g). Shoeybi et al. 2019, arXiv:1909.08053; with `sequence`, Korthikanti et al. 2022, arXiv:2205.05198:
between these regions a rank has a part of each sequence's tokens, and its norms and residuals are of that part alone. With an `exchange` the
transfers are made beside the products at the regions' borders (`hone.parallel.overlap`). Each expert is divided as a feed-forward is; with
`experts` a rank has its part of some of the experts alone (`hone.train.expert_parallel`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.base.errors import SpecError
from hone.model.config import ModelConfig
from hone.model.decoder import Decoder
from hone.model.linear import Dense, make_dense
from hone.model.linear_spec import LinearSpec, NormSpec, Tokens
from hone.model.parallel.local import check_split
from hone.parallel.axis import Axis
from hone.parallel.cut import Cut
from hone.parallel.overlap import Exchange, gathered_linear, scattered_linear
from hone.parallel.regions import copied, gathered, scattered, summed
from hone.train.tensor_parallel.parts import PartDecoder
from hone.train.tensor_parallel.stacks import expert_cuts, stacks


class TensorParallelDecoder(PartDecoder):
    """Rank `axis.index` of a decoder whose weights `whole` has (float32, a teacher's in any dtype); they are copied, and trained in parts.

    `cuts` are the parts by parameter; parameters without one are held by all ranks, with the gradient that sums to the whole
    over them. Losses read `vocabulary` (the axis and the first row) and call `head_input`, which has all tokens of a sequence.
    """

    def __init__(
        self,
        whole: Decoder,
        axis: Axis,
        *,
        sequence: bool = True,
        exchange: Exchange | None = None,
        experts: Axis | None = None,
    ) -> None:
        check_tensor_parallel(whole.config, axis.size, overlap=exchange is not None)
        sharers = 1 if experts is None else experts.size
        super().__init__(whole, whole.config.local(axis.size), axis, _maker(axis, exchange, sharers))
        self.sequence, self.experts = sequence, experts
        self._parts: dict[str, Part] = {}
        cuts = cuts_of(whole.config, axis.index, axis.size, sharers)
        self.take(whole, cuts if experts is None else cuts | expert_cuts(whole.config, experts.index, sharers, cuts))
        (first, _), *_ = self.cuts["embed_tokens.weight"].ranges
        self.vocabulary = (axis, first)
        self.embed_tokens.first = first
        enter, leave = self._enter, self._leave
        self.embed_tokens.register_forward_hook(lambda _, __, x: leave(x))
        for layer in self.layers:
            if getattr(layer.feed_forward, "routed", False):
                layer.feed_forward.loss_copies = axis.size
            for block in () if exchange is not None else (layer.mixer, layer.feed_forward):
                block.register_forward_pre_hook(lambda _, given: (enter(given[0]), *given[1:]))
                block.register_forward_hook(lambda _, __, x: leave(x))

    def adopted(self, name: str, parameter: nn.Parameter) -> None:
        """As `PartDecoder.adopted`."""
        inside = name in self.cuts or ".mixer." in name or ".feed_forward." in name
        if not self.sequence and not inside and not parameter.is_meta and parameter.requires_grad:
            # Outside the regions every rank computes the whole gradient: each keeps a share of it, which sum to the whole.
            parameter.register_hook(lambda gradient: gradient * (1 / self.axis.size))

    def _enter(self, x: Tensor) -> Tensor:
        """Into a region in which each rank computes a part of every token."""
        return (gathered if self.sequence else copied)(x, self.axis)

    def _leave(self, x: Tensor) -> Tensor:
        """Out of it: x is the rank's part of a sum."""
        return (scattered if self.sequence else summed)(x, self.axis)

    def head_input(self, x: Tensor) -> Tensor:
        """As `Decoder.head_input`, of all tokens: x [B, S or S / n, D] -> [B, S, D]."""
        return self._enter(super().head_input(x))

    def head(self, x: Tensor) -> Tensor:
        """There are no logits of the whole vocabulary on one rank."""
        raise AssertionError("a tensor-parallel decoder has no logits: compute a loss from head_input")

    def axes_of(self, name: str) -> tuple[Axis, ...]:
        """As `PartDecoder.axes_of`."""
        stack = self.experts is not None and name.rpartition(".")[0] in stacks(self.whole_config)
        return (self.axis, self.experts) if stack and self.experts is not None else (self.axis,)

    def part_of(self, name: str) -> Part | None:
        """For optimizers that need the whole of weight `name`, of a stack that of the experts that this rank has; None where this rank has all of it."""
        if not self._parts:
            sharers = 1 if self.experts is None else self.experts.size
            every = [cuts_of(self.whole_config, rank, self.axis.size, sharers) for rank in range(self.axis.size)]
            for one in set.intersection(*(set(cuts) for cuts in every)):
                self._parts[one] = Part(tuple(cuts[one] for cuts in every), self.axis)
        return self._parts.get(name)


class Part(NamedTuple):
    """The parts of a weight that the ranks of `axis` hold: see `hone.train.optimizers.base.Part`; those to be joined have one size."""

    cuts: tuple[Cut, ...]
    axis: Axis

    @property
    def cut(self) -> Cut:
        """This rank's."""
        return self.cuts[self.axis.index]

    def add(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, in its place."""
        transfer = self.axis.all_reduce(x)
        if transfer is not None:
            transfer.wait()
        return x

    def join(self, part: Tensor) -> Tensor:
        """The whole matrix."""
        every = part.new_empty(self.axis.size, *part.shape)
        transfer = self.axis.all_gather(every.view(-1), part.contiguous().view(-1))
        if transfer is not None:
            transfer.wait()
        whole = part.new_empty(self.cuts[0].shape)
        for cut, one in zip(self.cuts, every, strict=True):
            cut.put(one, whole)
        return whole

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part."""
        return self.cut.take(whole)


class _Embedding(nn.Module):
    """Rows `first` ... of the embedding; the tokens elsewhere are zero, as the sum over the ranks needs."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.first = 0

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 [B, S] -> [B, S, D]."""
        place = tokens - self.first
        own = (place >= 0) & (place < len(self.weight))
        return F.embedding(torch.where(own, place, 0), self.weight).masked_fill(~own.unsqueeze(-1), 0)


class _Gathered(Dense):
    """A column-parallel linear of every rank's tokens, which come while it multiplies: x [B, S / n, D] -> [B, S, N]."""

    exchange: Exchange

    def forward(self, x: Tensor) -> Tensor:
        return gathered_linear(x, self.weight, self.bias, self.exchange)


class _Scattered(Dense):
    """A row-parallel linear, whose sums over ranks travel while it multiplies: x [B, S, D] -> this rank's tokens [B, S / n, N]."""

    exchange: Exchange

    def forward(self, x: Tensor) -> Tensor:
        return scattered_linear(x, self.weight, self.bias, self.exchange)


def check_tensor_parallel(config: ModelConfig, degree: int, whose: str = "", *, overlap: bool = False) -> None:
    """Raises SpecError when the model cannot be trained by `degree` tensor-parallel ranks, naming what stands in the way; `whose` it is."""
    if degree == 1:
        return
    for index, layer in enumerate(config.layers if overlap else ()):
        for block in (layer.mixer, layer.feed_forward):
            if not block.reads_once:
                raise SpecError(
                    f"{whose}layers.{index} is {block.kind}, which uses its input beside one product: no transfer can be hidden there",
                    fix="set parallelism.enable_async_tensor_parallel: false",
                )
    try:
        check_split(config.model_copy(update={"adapters": ()}), degree)  # of adapters `train.adapters.fits` says it
    except SpecError as error:
        fix = "set parallelism.tensor_parallel_degree to a number that divides all of them, or to 1"
        raise SpecError(f"{whose}{error.what}", fix=fix) from None
    for index in range(config.num_layers):
        for path, linear in config.linears(index).items():
            where = f"{whose}layers.{index}.{path}"
            own = linear.local(0, degree)
            for piece, local in zip(linear.pieces, own.pieces, strict=True):
                if linear.shard == "column" and local.out_features * degree != piece.out_features:
                    raise SpecError(
                        f"{where}.{piece.name} has {piece.heads or 1} heads, fewer than {degree} tensor-parallel ranks",
                        fix=f"set parallelism.tensor_parallel_degree to {piece.heads or 1} or a divisor of it",
                    )
    if (degree - 1) * -(-config.vocab_size // degree) >= config.vocab_size:
        raise SpecError(
            f"{config.vocab_size} tokens cannot be divided among {degree} tensor-parallel ranks",
            fix="lower parallelism.tensor_parallel_degree",
        )


def cuts_of(config: ModelConfig, rank: int, num_ranks: int, sharers: int = 1) -> dict[str, Cut]:
    """The parts of the model's parameters that `rank` of `num_ranks` holds; those that are not named here are whole.

    Of experts [E, N, K] it holds the same part of each; `sharers` ranks have E / n of them each, of which the cut is then.
    """
    found: dict[str, Cut] = {}
    if num_ranks == 1:
        return found
    for name in config.ends():
        shape = (config.vocab_size, config.hidden_size)
        found[f"{name}.weight"] = Cut(shape, 0, (_vocabulary_rows(config.vocab_size, rank, num_ranks),))
    for index in range(config.num_layers):
        for path, linear in config.linears(index).items():
            depth = len(config.wrappers(index, path, linear))
            stack = () if linear.experts is None else (linear.experts // sharers,)
            name, axis = f"layers.{index}.{path}{'.inner' * depth}", len(stack)
            shape = (*stack, linear.out_features, linear.in_features)
            found |= _adapters_cuts(config, index, path, linear, rank, num_ranks) if depth else {}
            if linear.shard == "row":
                columns = linear.columns(rank, num_ranks)
                found[f"{name}.weight"] = Cut(shape, axis + 1, ((columns.start, columns.stop),))
                if linear.bias and rank == 0:  # added once
                    found[f"{name}.bias"] = Cut(shape[:-1], axis, ((0, linear.out_features),))
            elif linear.shard == "column":
                ranges = _row_ranges(linear, rank, num_ranks)
                found[f"{name}.weight"] = Cut(shape, axis, ranges)
                if linear.bias:
                    found[f"{name}.bias"] = Cut(shape[:-1], axis, ranges)
        for path, parameter in config.parameters(index).items():
            if not isinstance(parameter, NormSpec) and parameter.heads is not None:
                own_rows = parameter.local(rank, num_ranks)
                cut = Cut(tuple(parameter.shape), 0, ((own_rows.start, own_rows.stop),))
                found[f"layers.{index}.{path}"] = cut
    return found


def _row_ranges(linear: LinearSpec, rank: int, num_ranks: int) -> tuple[tuple[int, int], ...]:
    """The rows of a column-parallel linear that `rank` holds: a range of each piece."""
    own, begin, ranges = linear.rows(rank, num_ranks), 0, []
    for piece in linear.pieces:
        ranges.append((begin + own[piece.name].start, begin + own[piece.name].stop))
        begin += piece.out_features
    return tuple(ranges)


def _adapters_cuts(
    config: ModelConfig, index: int, path: str, linear: LinearSpec, rank: int, num_ranks: int
) -> dict[str, Cut]:
    """The parts of LoRA's factors around a linear: rows of B of a column-parallel one, columns of A of a row-parallel one.

    The other factor every rank has: its gradient is a sum over the ranks, as the product is.
    """
    found, own, columns = {}, linear.rows(rank, num_ranks), linear.columns(rank, num_ranks)
    around = config.wrappers(index, path, linear)
    for depth, (adapter, pieces) in enumerate(reversed(around)):
        for piece in pieces:
            inside = own.get(piece.name)  # of one of its pieces, or of all rows as one
            rows = _row_ranges(linear, rank, num_ranks) if inside is None else ((inside.start, inside.stop),)
            for one in adapter.parameters(linear, (piece,)):
                name, down = f"layers.{index}.{path}{'.inner' * depth}.{one.path}", "_A_" in one.name
                if linear.shard == "row" and down:
                    found[name] = Cut(one.shape, 1, ((columns.start, columns.stop),))
                elif linear.shard == "column" and not down:
                    found[name] = Cut(one.shape, 0, rows)
    return found


def _vocabulary_rows(vocab_size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    rows = -(-vocab_size // num_ranks)
    return min(vocab_size, rows * rank), min(vocab_size, rows * (rank + 1))


def _maker(axis: Axis, exchange: Exchange | None = None, sharers: int = 1) -> Callable[[str, LinearSpec], Any]:
    def made(name: str, spec: LinearSpec) -> nn.Module:
        if spec.experts is not None:
            spec = replace(spec, experts=spec.experts // sharers)
        if spec.shard == "vocab" and axis.size > 1:
            start, stop = _vocabulary_rows(spec.out_features, axis.index, axis.size)
            if isinstance(spec.reads, Tokens):
                return _Embedding(stop - start, spec.in_features)
            return make_dense(name, replace(spec, pieces=(replace(spec.pieces[0], out_features=stop - start),)))
        bias = spec.bias and (spec.shard != "row" or axis.index == 0)
        if exchange is not None and spec.shard in ("column", "row"):
            linear = {"column": _Gathered, "row": _Scattered}[spec.shard](spec.in_features, spec.out_features, bias)
            linear.exchange = exchange
            return linear
        return make_dense(name, replace(spec, bias=bias))

    return made
