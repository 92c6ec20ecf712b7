"""The decoder of one rank: its layers with its heads, its rows of the vocabulary, and the sums that join the ranks.

Column-parallel linears (q, k, v, gate, up) have the rank's output rows, row-parallel ones (out, down) its input columns and
an all-reduce behind them: two a layer. A mixture of experts is summed once, behind its last sum over experts. Shoeybi et al. 2019, arXiv:1909.08053. Embedding and head have equal parts of the
vocabulary's rows, the last ones padded with zeros; embeddings are summed, logits put side by side, so every rank has all.
Of several pipeline stages the first embeds, the last makes logits, and each passes its hidden states on.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.base.errors import SpecError
from hone.model.config import ModelConfig
from hone.model.context import Context
from hone.model.decoder import Decoder
from hone.model.linear import MakeLinear, make_dense
from hone.model.linear_spec import LinearSpec, Tokens
from hone.parallel.group import Group, Pipe
from hone.parallel.place import Place, stages_of


class SummedLinear(nn.Module):
    """A row-parallel linear: `inner` has some input columns; the sum over the ranks is the whole product."""

    def __init__(self, inner: nn.Module, group: Group) -> None:
        super().__init__()
        self.inner = inner
        self.group = group

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        """x [..., in / ranks] -> [..., out]; `more` is what `inner` takes besides."""
        return self.group.all_reduce(self.inner(x, *more))


class SplitEmbedding(nn.Module):
    """Rows `first` ... of the embedding; those of tokens elsewhere come from other ranks."""

    def __init__(self, width: int, rows: int, group: Group) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.first = rows * group.rank
        self.group = group

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 [...] -> [..., D]."""
        place = tokens - self.first
        own = (place >= 0) & (place < len(self.weight))
        x = F.embedding(torch.where(own, place, 0), self.weight)
        return self.group.all_reduce(x.masked_fill_(~own.unsqueeze(-1), 0))


class LocalDecoder(Decoder):
    """The part of a decoder that one rank holds. `config` is the rank's own (`ModelConfig.local`).

    `layers` are those of its stage alone; each knows its index in the whole model, as the KV cache does.
    """

    def __init__(
        self,
        config: ModelConfig,
        place: Place,
        layers: range,
        group: Group,
        pipe: Pipe | None = None,
        make: MakeLinear = make_dense,
    ) -> None:
        super().__init__(config, _splitting(make, config, place, group))
        self.place, self.group, self.pipe = place, group, pipe
        self.stage_layers = layers
        self.layers = nn.ModuleList(self.layers[index] for index in layers)
        for layer in self.layers if place.tensor_size > 1 else ():
            if layer.feed_forward.spec.sums_once:
                layer.feed_forward.register_forward_hook(lambda _, __, made: group.all_reduce(made))
        if not place.first and not (place.last and config.tie_embeddings):
            self.embed_tokens = _Nothing(self.dtype)
        if not place.last:
            self.norm = self.lm_head = None

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings on the first stage; hidden states of the previous stage on the others: [T] -> [T, D]."""
        if self.place.first:
            return super().embed(tokens)
        assert self.pipe is not None, "a later stage has a pipe"
        return self.pipe.receive((*tokens.shape, self.config.hidden_size), self.like)

    def hidden(self, tokens: Tensor, context: Context) -> Tensor:
        """Hidden states after this stage's layers; all but the last stage send them on."""
        x = super().hidden(tokens, context)
        if not self.place.last:
            assert self.pipe is not None, "an earlier stage has a pipe"
            self.pipe.send(x)
        return x

    def head(self, x: Tensor) -> Tensor:
        """Logits [..., V] of all ranks, on the last stage."""
        assert self.place.last, "logits are made on the last stage"
        x = self.norm(x)
        own = self._tied(x) if self.lm_head is None else self.lm_head(x)
        logits, config = self.group.all_gather(own)[..., : self.config.vocab_size], self.config
        if config.logits_scaling != 1.0:
            logits = logits / config.logits_scaling
        if config.logits_softcap is not None:
            logits = torch.tanh(logits / config.logits_softcap) * config.logits_softcap
        return logits


class _Nothing(nn.Module):
    """In the place of an embedding that the stage does not need; its weight has a dtype and no rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, dtype=dtype))


def vocabulary_rows(vocab_size: int, num_ranks: int) -> int:
    """Rows of the embedding that each rank holds, the padding of the last ones included."""
    return -(-vocab_size // num_ranks)


def check_split(config: ModelConfig, num_ranks: int, *, whole_experts: bool = False) -> None:
    """Raises SpecError when the model cannot be divided among tensor-parallel ranks, naming what stands in the way.

    `whole_experts`: blocks of experts are divided by experts, which `place_experts` checks.
    """
    if config.adapters:
        raise SpecError(
            "a model with adapters cannot be divided among ranks",
            fix="merge the adapters into the weights first, or set tensor_parallel_size=1 and pipeline_parallel_size=1",
        )
    for index, layer in enumerate(config.layers):
        parts = (layer.mixer,) if whole_experts and layer.feed_forward.sums_once else (layer.mixer, layer.feed_forward)
        try:
            for part in parts:
                part.local(num_ranks)
                for linear in part.linears(config.hidden_size):
                    linear.local(0, num_ranks)
        except SpecError as error:
            raise SpecError(f"layer {index}: {error.what}", fix=error.fix) from None


def stage_layers(config: ModelConfig, num_stages: int, bytes_per_param: float = 2.0) -> list[range]:
    """The layers of each pipeline stage: as even in weights as whole layers allow."""
    if num_stages == 1:
        return [range(config.num_layers)]
    sizes = [
        bytes_per_param
        * sum(part.num_params for part in (*config.linears(index).values(), *config.parameters(index).values()))
        for index in range(config.num_layers)
    ]
    end = config.vocab_size * config.hidden_size * bytes_per_param
    return stages_of(sizes, num_stages, (end, end), joined_layers(config))


def joined_layers(config: ModelConfig) -> set[int]:
    """The layers at which no pipeline stage begins: they, or later ones, read the keys of an earlier layer."""
    joined: set[int] = set()
    for index in range(config.num_layers):
        source = config.kv_source(index)
        if source is not None:
            joined |= set(range(source + 1, index + 1))
    return joined


def _splitting(make: MakeLinear, config: ModelConfig, place: Place, group: Group) -> MakeLinear:
    """A maker of a rank's linears: those of `make` for a local spec, with the sums that row-parallel ones need."""

    def made(name: str, spec: LinearSpec) -> nn.Module:
        if place.tensor_size == 1:
            return make(name, spec)
        if spec.shard == "vocab":
            rows = vocabulary_rows(config.vocab_size, place.tensor_size)
            if isinstance(spec.reads, Tokens):
                return SplitEmbedding(spec.in_features, rows, group)
            return make(name, spec_of_rows(spec, rows))
        if spec.shard == "row" and _sums_once(config, name):
            return make(name, replace(spec, bias=spec.bias and place.tensor_rank == 0))
        if spec.shard == "row":
            # The other ranks' outputs are added to rank 0's, which alone has the bias.
            return SummedLinear(make(name, replace(spec, bias=spec.bias and place.tensor_rank == 0)), group)
        return make(name, spec)

    return made


def _sums_once(config: ModelConfig, name: str) -> bool:
    """Whether the linear called 'layers.3.feed_forward.down' is one of a block whose output is summed."""
    _, index, block, _ = name.split(".", 3)
    return getattr(config.layers[int(index)], block).sums_once


def spec_of_rows(spec: LinearSpec, rows: int) -> LinearSpec:
    """`spec`, whose only piece has this many rows."""
    (piece,) = spec.pieces
    return replace(spec, pieces=(replace(piece, out_features=rows),))
