"""A training in numbers: the sizes that its seconds, memory and disk are computed from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from hone.cost.activations.segments import Segment, recomputed_layers
from hone.cost.chunks import loss_chunk
from hone.cost.dims import ModelDims
from hone.cost.memory import BYTES
from hone.cost.steps import code_bytes
from hone.cost.train.adapted import AdaptedLinear, code_width
from hone.cost.train.context import Sharing, Sizes
from hone.cost.train.experts import ExpertRows
from hone.cost.train.offload import Load, Offload, OnDevice
from hone.cost.train.pipeline import Pipelined
from hone.cost.train.replicas import Divided, Message
from hone.cost.train.tensor import Tensor
from hone.cost.train.update import UpdateCost
from hone.measure.calibration import Layout

CHECKPOINTS = "checkpoint_bytes"
"""The figure of the bytes that checkpoints have on disk at most, while the stage runs."""

STATE_BYTES = "training_state_bytes"
"""The figure of the bytes of the kept state."""

LOG_BYTES = 750
"""Bytes that a step adds to steps.jsonl, timing.jsonl and TensorBoard's events."""

RANK_BYTES, MOST_RANKS = 20, 16
"""Bytes that the times of a rank add to timing.jsonl, and of how many ranks a step adds them at most, as in watch.py."""


class Epoch(Protocol):
    """One pass over packed data: `num_sequences` of `positions` positions together, `padding` of which hold no token."""

    num_sequences: int
    positions: int
    padding: int

    @property
    def tokens(self) -> int:
        """Positions that are not padding."""
        ...


@dataclass(frozen=True)
class Training:
    """A training whose steps are batches of `batch_size` sequences of `seq_len`, in `gradient_accumulation_steps` micro-batches."""

    model: ModelDims
    steps: int
    batch_size: int
    seq_len: int
    dtype: str
    segments: tuple[Segment, ...]
    update: UpdateCost
    gradient_accumulation_steps: int = 1
    views: int = 1
    """Passes over each sequence of a step at once, which are one larger pass."""
    eval_sequences: int = 0
    """Sequences of all evaluations together."""
    sample_passes: int = 0
    """Passes over one token that write samples at evaluations."""
    teacher: ModelDims | None = None
    teaches_itself: bool = False
    """Whether the teacher is the trained model with other adapters, which takes a pass and no weights."""
    remembered: float = 0.0
    """Bytes of what a teacher keeps of the data, on the host and in each checkpoint."""
    packed: bool = True
    """Whether sequences hold several documents, which requires attention masks."""
    saved_dtype: str = ""
    """Dtype of the saved weights; '': `dtype`."""
    epoch: Epoch | None = None
    """One pass over the data, with its padding; None: as much as the steps read, without padding."""
    num_checkpoints: int = 0
    """Checkpoints on disk at once."""
    snapshot: bool = False
    """Whether checkpoints are copied to the host's memory and written from there."""
    divided: Divided = field(default_factory=Divided)
    """Its ranks, and what each holds of the training's state."""
    local_ranks: int | None = None
    """Those of them on this host; None: all."""
    context_degree: int = 1
    """Ranks that share each sequence, as `context` says."""
    context: Sharing | None = None
    offload: Offload = field(default_factory=OnDevice)
    tensor: Tensor = field(default_factory=Tensor)
    """The ranks that compute each layer together; then `update` is of one rank's part."""
    experts: ExpertRows = field(default_factory=ExpertRows)
    """The ranks that each hold a part of the experts; then `update` is of one rank's part."""
    pipeline: Pipelined | None = None
    """The ranks that compute some of the layers each; then `update` is of the rank with the most weights."""
    keeps_state: bool = False
    """Whether a checkpoint stays in the finished folder."""
    num_models: int = 1
    """Models that stay in it."""
    fp8: frozenset[Layout] = frozenset()
    """The products of the layers' linears that are of fp8 codes."""
    fp8_recipe: str = "rowwise"
    """How they are coded."""
    trained: ModelDims | None = None
    """The weights of adapters, where these alone are trained and in checkpoints; None: all are."""
    trained_part: ModelDims | None = None
    """Those of one tensor-parallel rank; None: `trained`."""
    lean: bool = False
    """Whether all adapters are LoRA, whose products keep their inputs alone."""
    frozen_bytes: float | None = None
    """Bytes of the frozen weights of one rank's part where they stay codes; None: they are in `dtype`."""
    adapted: tuple[tuple[AdaptedLinear, ...], ...] = ()
    """The linears of each layer of one rank's part under LoRA or DoRA, where all adapters are; empty: they are not."""
    exported: int = 0
    """Weights of the finished folder where an adapter is saved as another one; 0: those that are trained."""

    @property
    def holds_codes(self) -> bool:
        """Whether the codes of the layers' weights are computed once a step."""
        return bool(self.fp8) and self.gradient_accumulation_steps > 1 and self.divided.of("weights") == 1

    @property
    def passes_widened(self) -> int:
        """Passes of a step whose gradients are added up in float32: those of several, or of weights that ranks share."""
        shares = self.divided.num_ranks > 1 or self.tensor.degree > 1 or self.pipeline is not None
        return self.gradient_accumulation_steps if shares or self.gradient_accumulation_steps > 1 else 0

    @property
    def senders(self) -> int:
        """Ranks whose gradients of one pass a rank adds up as they come, in 16 bits; 1: gradients are float32 before they travel."""
        divided, passes = self.divided, self.gradient_accumulation_steps
        at_once = divided.of("gradients") > 1 or (divided.of("optimizer") > 1 and passes == 1)
        return divided.num_shards if at_once and not divided.gradient_bits and BYTES[self.dtype] == 2 else 1

    @property
    def part(self) -> ModelDims:
        """What of the model one rank computes: with pipeline stages the one with the most weights."""
        if self.pipeline is not None:
            return self.pipeline.parts[self.pipeline.largest]
        return self.tensor.dims or self.model

    @property
    def trained_here(self) -> ModelDims | None:
        """Of `part` the weights of adapters, where these alone are trained."""
        return self.trained_part or self.trained

    @property
    def saved_params(self) -> int:
        """Weights that checkpoints have: those that are trained."""
        return (self.trained or self.model).num_params

    @property
    def written_params(self) -> int:
        """Weights in the finished folder."""
        return self.exported or self.saved_params

    @property
    def load(self) -> Load:
        """The sizes of what may leave the device."""
        shards, ranks = int(self.divided.of("optimizer")), self.local_ranks or self.divided.num_ranks
        return Load(self.part, self.update, self.dtype, self.gradient_accumulation_steps, shards, ranks)

    @property
    def step_tokens(self) -> int:
        """Positions that a step reads, padding included."""
        return self.batch_size * self.seq_len

    @property
    def log_bytes(self) -> int:
        """Bytes of the logs of all steps."""
        ranks = self.divided.num_ranks
        return self.steps * (LOG_BYTES + (RANK_BYTES * min(ranks, MOST_RANKS) if ranks > 1 else 0))

    @property
    def saved_width(self) -> int:
        """Bytes of a saved weight."""
        return BYTES[self.saved_dtype or self.dtype]

    @property
    def filled(self) -> float:
        """The fraction of positions that are not padding."""
        return self.epoch.tokens / self.epoch.positions if self.epoch and self.epoch.positions else 1.0

    @property
    def micro_batch_tokens(self) -> int:
        """Positions of one pass of one rank."""
        return self.views * self.step_tokens // self.gradient_accumulation_steps // self.divided.num_ranks

    @property
    def context_sizes(self) -> Sizes:
        """The sizes of a pass, for the costs of sharing sequences."""
        return Sizes.of(self.part, self.micro_batch_tokens, self.seq_len, self.context_degree, BYTES[self.dtype])

    @property
    def piece_len(self) -> int:
        """Tokens of a sequence that attention computes with at once: those of one rank where keys travel from rank to rank."""
        around = self.context is not None and self.context.overlaps
        return self.seq_len // self.context_degree if around else self.seq_len

    def loss_chunk(self, device: str) -> int:
        """Tokens whose logits exist at once."""
        divided = self.tensor.degree > 1
        return loss_chunk(self.micro_batch_tokens, self.part.vocab_size, device, divided=divided)

    def pass_options(self, device: str) -> dict[str, Any]:
        """How the layers of a pass are computed, as `pass_seconds` takes it."""
        return {
            "seq_len": self.seq_len,
            "dtype": self.dtype,
            "fp8": self.fp8,
            "recipe": self.fp8_recipe,
            "held": self.holds_codes,
            "loss_chunk": self.loss_chunk(device),
            "piece_len": self.piece_len,
            "sequence_ranks": self.tensor.degree if self.tensor.sequence else 1,
            "trained": self.trained_here,
            "adapted": self.adapted,
            "code_width": self.code_width,
        }

    @property
    def code_width(self) -> float | None:
        """Bytes of a frozen weight of the layers' linears that stays a code; None: they are dense."""
        if self.trained_here is None or self.frozen_bytes is None:
            return None
        return code_width(self.part, self.trained_here, self.frozen_bytes, self.dtype)

    @property
    def frozen_gathers(self) -> list[Message]:
        """A step's gathers of frozen weights, layer by layer, where ranks divide these beside adapters."""
        if self.trained_here is None:
            return []
        width = BYTES[self.dtype]
        dense = float(width * (self.part.num_params - self.trained_here.num_params))
        size = dense if self.frozen_bytes is None else self.frozen_bytes
        return self.divided.frozen_messages(self.part, width, size, self.gradient_accumulation_steps)

    @property
    def updates(self) -> int:
        """Updates of a step, each with an exchange of gradients: one, but in an asynchronous pipeline."""
        return 1 if self.pipeline is None else max(self.pipeline.table.steps, 1)

    @property
    def keeps_codes(self) -> float:
        """Bytes a number, with its scale's, of the fp8 codes that linears keep of their input for the backward pass; 0: none."""
        return ("weight_gradient" in self.fp8) * code_bytes(self.fp8_recipe)

    @property
    def recomputed(self) -> list[int]:
        """The layers that run forward once more, each as often as it does."""
        return recomputed_layers(self.segments)
