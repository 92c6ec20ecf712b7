"""Cost of tensor parallelism in training: what of a model one rank holds, and the seconds of its transfers inside layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hone.cost.cache import BYTES
from hone.cost.dims import ModelDims
from hone.cost.ranks import MESSAGE_S, Transfers, link_bytes_per_s


@dataclass(frozen=True)
class Messages:
    """What tensor-parallel ranks send each other in a step: numbers of `dtype`, `hidden_size` for each of `tokens` tokens of a micro-batch.

    `recomputed` layers run forward twice.
    """

    hidden_size: int
    tokens: int
    dtype: str
    device: str
    micro_batches: int = 1
    recomputed: int = 0
    processor: str = ""
    """The GPU of a device 'cuda'."""

    @property
    def num_bytes(self) -> float:
        """Of one sum of all tokens."""
        return float(BYTES[self.dtype] * self.tokens * self.hidden_size)


@dataclass(frozen=True)
class Tensor:
    """`degree` ranks that compute each layer together; with `sequence` they share the tokens between its regions.

    `dims` are those of one rank's part (`part_of`), None with one rank. Korthikanti et al. 2022, arXiv:2205.05198, section 4.
    """

    degree: int = 1
    sequence: bool = True
    dims: ModelDims | None = None
    overlap: bool = False
    """Whether transfers of a layer are made in parts beside its products."""

    def step_s(self, sent: Messages, times: Transfers | None = None) -> float:
        """Seconds of the transfers of a step.

        A layer has two sums of its tokens forward and two backward, embedding and head one each in both directions.
        """
        if self.degree == 1 or self.dims is None:
            return 0.0
        ends = 2  # the embedding forward, the head backward
        return self._layers_s(sent, times) + sent.micro_batches * ends * self._sum_s(sent, times)

    def _layers_s(self, sent: Messages, times: Transfers | None) -> float:
        """Of `step_s` those inside layers. With `overlap` a CPU, which hides none, also gathers two inputs again."""
        assert self.dims is not None, "one rank has no transfers"
        again = 1 if self.overlap and _kind(sent.device) == "cpu" else 0
        sums = (4 + again) * self.dims.num_layers + 2 * sent.recomputed
        return sent.micro_batches * sums * self._sum_s(sent, times)

    def forward_s(self, num_layers: int, sent: Messages) -> float:
        """Seconds of the transfers of a forward pass alone, a teacher's of `num_layers` layers, of all micro-batches."""
        each = 0.0 if self.degree == 1 else (2 * num_layers + 1) * self._sum_s(sent)
        return sent.micro_batches * each

    def _sum_s(self, sent: Messages, times: Transfers | None = None) -> float:
        """A ring moves 2 (n - 1) / n of a message to sum it, or half to sum it in parts and half to gather it.

        At the rates of `times` where collectives of so many ranks were measured."""
        ops = ("reduce_scatter", "all_gather") if self.sequence else ("all_reduce",)
        if times is not None and times.knows(ops, self.degree):
            return sum(times.seconds(op, self.degree, sent.num_bytes) for op in ops)
        if times is not None:
            times.assumed.update(f"{op} on {self.degree} ranks" for op in ops)
        moved = 2 * (self.degree - 1) / self.degree * sent.num_bytes
        starts = 2 if self.sequence else 1
        return (
            moved / link_bytes_per_s(sent.device, self.degree, sent.processor) + starts * MESSAGE_S[_kind(sent.device)]
        )

    def hidden_s(self, sent: Messages, products_s: float, times: Transfers | None = None) -> float:
        """Seconds of `step_s` that a step does not wait for; `products_s` are those of all layers forward, of one micro-batch.

        Each of a layer's four borders has n products of a rank's tokens and n - 1 messages, each beside one of them, at the rate of
        a link and not of a collective: copy engines carry them. The gradients of the weights, which come after, are not counted. On
        a CPU nothing is hidden: gloo takes the cores that would multiply.
        """
        if not self.overlap or self.degree == 1 or self.dims is None or _kind(sent.device) == "cpu":
            return 0.0
        borders = 2 * (2 * 2 * self.dims.num_layers + 2 * sent.recomputed)
        product = products_s / (4 * max(self.dims.num_layers, 1)) / self.degree
        message = sent.num_bytes / self.degree / link_bytes_per_s(sent.device, self.degree, sent.processor)
        waits = sent.micro_batches * borders * (self.degree - 1) * max(message - product, 0.0)
        return max(self._layers_s(sent, times) - waits, 0.0)

    def added_bytes(self, sent: Messages) -> float:
        """Bytes that a rank reads and writes in a step to add up what comes for its tokens, and to lay its own beside others'.

        A layer has four sums, for each of which n - 1 parts are added, and backward two gathers to which it copies its own part.
        """
        if not self.overlap or self.degree == 1 or self.dims is None:
            return 0.0
        part = sent.num_bytes / self.degree
        sums, copies = 4 * self.dims.num_layers + 2 * sent.recomputed, 2 * self.dims.num_layers
        return sent.micro_batches * part * (3 * (self.degree - 1) * sums + 2 * copies)

    def saved_bytes(self, hidden_size: int, tokens: int, kept_layers: int, dtype: str) -> float:
        """Bytes of activations that a rank saves less because it has only its tokens of them: residuals and norms' results.

        Of the four of a layer (two residuals, two normed) the normed ones are saved whole, as inputs of products, unless they are
        gathered again (`overlap`).
        """
        if self.degree == 1 or not self.sequence:
            return 0.0
        return (1 - 1 / self.degree) * (4 if self.overlap else 2) * BYTES[dtype] * tokens * hidden_size * kept_layers

    def room_bytes(self, hidden_size: int, tokens: int, dtype: str, device: str) -> float:
        """Bytes of a GPU into which other ranks copy: the parts of two gathers and of two sums (`hone.parallel.peer_copies`)."""
        rooms = 4 if self.overlap and self.degree > 1 and _kind(device) == "cuda" else 0
        return rooms * BYTES[dtype] * tokens * hidden_size


def part_of(local: ModelDims, degree: int) -> ModelDims:
    """The dimensions of one of `degree` ranks; `local` has its layers (`ModelConfig.local`), and a whole embedding and head."""
    rows = -(-local.vocab_size // degree)
    less = (local.vocab_size - rows) * local.hidden_size * (1 if local.tie_embeddings else 2)
    return replace(local, vocab_size=rows, num_params=local.num_params - less, active_params=local.active_params - less)


def _kind(device: str) -> str:
    return "cuda" if device.startswith("cuda") else "cpu"
