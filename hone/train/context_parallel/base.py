"""The base of context-parallel techniques: how the ranks of an axis attend to sequences of which each holds a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from hone.base.errors import SpecError
from hone.base.lazy import resolve
from hone.base.table import Technique
from hone.cost.train.context import Sharing
from hone.parallel.context.chunks import chunk_size

if TYPE_CHECKING:
    from hone.model.config import ModelConfig

READ_BY_CONTEXT = frozenset({"k", "v", "latent"})
"""What mixers keep for later tokens, where these meet them in `Context.attend` alone."""


class ContextParallel(Technique):
    """Each rank computes its part of every sequence; only attention needs the others' keys and values.

    Losses and weights are those of one process, up to the rounding of sums in another order: a token's position and its
    document are those in the whole sequence.
    """

    sharing: ClassVar[type[Sharing]]
    """What it costs."""
    function: ClassVar[str]
    """'module:name' of the attention, with the signature of `hone.parallel.context.ring.ring`."""

    @property
    def zigzag(self) -> bool:
        """As `Sharing.zigzag`."""
        return self.sharing.zigzag

    @property
    def overlaps(self) -> bool:
        """As `Sharing.overlaps`."""
        return self.sharing.overlaps

    def cost(self) -> Sharing:
        """What it costs, for estimates."""
        return self.sharing(self.kind)

    def attention(self) -> Callable[..., Any]:
        """The attention over ranks."""
        return resolve(self.function)

    def check(self, config: ModelConfig, seq_len: int, num_ranks: int) -> None:
        """Raises SpecError when `num_ranks` ranks cannot share sequences of `seq_len` tokens, or the layers of `config`."""
        chunk_size(seq_len, num_ranks, self.zigzag)
        for layer, spec in enumerate(config.layers):
            mixer = spec.mixer
            kept = {one.name for one in mixer.cache()}
            if not (mixer.reuses_kv or (kept and kept <= READ_BY_CONTEXT)):
                raise SpecError(
                    f"mixer '{mixer.kind}' of layer {layer} does not run on parts of a sequence: context parallelism "
                    f"knows attention, sliding_window, shared_kv and mla",
                    fix="set context_parallel_degree to 1, or take one of these mixers",
                )
            self.check_heads(mixer, num_ranks)

    def check_heads(self, mixer: Any, num_ranks: int) -> None:
        """Raises SpecError when `num_ranks` ranks cannot share the heads of `mixer`; by default they need not."""
