"""Reformer: a token attends to the tokens that random rotations hash into its bucket, in a few rounds of hashing.

Legend: B batch, R rounds of hashing, S sequence, H heads, Dh head width, N buckets, C tokens of a chunk.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from hone.cost.dims import Widths
from hone.model.block import Block, Placement
from hone.model.context import Context
from hone.model.linear_spec import LinearSpec, Output, Piece, projection_in, projection_out
from hone.model.mixer import Mixer
from hone.model.rope import Rope
from hone.ops import attend, merge, rope
from hone.ops.attention.masks import Mask


class Reformer(Mixer):
    """Attention within buckets of a locality-sensitive hash, shared queries and keys. Kitaev et al. 2020, arXiv:2001.04451.

    Tokens are sorted by bucket; a bucket is cut into chunks, and a token attends to earlier tokens of its chunk and of
    the chunk before. Rounds are joined by their softmax denominators: a pair found by two rounds counts twice. Keys are
    normalised to length 1, queries are not, and a token attends to itself only where there is no other. Chunks are
    counted from the start of a bucket, not of the sequence: a token's keys then never depend on later tokens, and
    decoding keeps the last two chunks of every bucket.
    """

    paper: ClassVar[str] = "arXiv:2001.04451"
    by_layer: ClassVar[bool] = True
    complexity: ClassVar[str] = "O(S (log S + rounds chunk))"

    num_heads: int = Field(gt=0, description="Heads.")
    head_dim: int = Field(gt=0, description="Width of a head.")
    num_buckets: int = Field(32, ge=2, description="Buckets of a hash, an even number.")
    chunk: int = Field(64, gt=0, description="Tokens per chunk of a bucket.")
    num_rounds: int = Field(2, gt=0, description="Rounds of hashing, each with rotations of its own.")
    seed: int = Field(0, ge=0, description="Seed of the rotations, with the layer's index.")
    rope: Rope = Field(default_factory=Rope, description="Rotary positions; the hash is computed before them.")

    @model_validator(mode="after")
    def _sizes_fit(self) -> Reformer:
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions rotate pairs of channels")
        if self.num_buckets % 2:
            raise ValueError(f"num_buckets {self.num_buckets} is odd; a direction and its opposite are two buckets")
        return self

    def linears(self, hidden_size: int) -> tuple[LinearSpec, ...]:
        """One projection for queries and keys, fused with the values'; out."""
        inner = self.num_heads * self.head_dim
        return (
            projection_in("qk_v", hidden_size, *(Piece(name, inner, self.num_heads) for name in ("qk", "v"))),
            projection_out(hidden_size, self.num_heads, self.head_dim, reads=Output("mixer.qk_v", "v")),
        )

    def mixing_flops(self, seq_len: int) -> float:
        """Hashing, and attention to a chunk and a half (less in buckets that are not full)."""
        seen = min(1.5 * self.chunk, seq_len / self.num_buckets / 2)
        return self.num_heads * self.head_dim * self.num_rounds * (self.num_buckets + 4.0 * seen)

    def state_values(self, seq_len: int) -> float:
        """Two chunks of keys and values of every bucket in every round, in a table allocated at the start."""
        return 2.0 * self.num_heads * self.num_rounds * self.num_buckets * 2 * self.chunk * self.head_dim

    def widths(self, hidden_size: int) -> Widths:
        """Sorted queries, keys and values of each round, and its result."""
        inner = self.num_heads * self.head_dim
        return Widths(projected=2 * inner, turned=2 * inner, mixed=inner, extra=4 * inner * self.num_rounds)

    def build(self, place: Placement) -> ReformerLayer:
        return ReformerLayer(self, place)


class Buckets(NamedTuple):
    """Decoding state: the last 2 C tokens of every bucket, k and v [B, R, H, N, 2 C, Dh], the r-th token of a bucket in
    slot r mod 2 C; and the tokens of each bucket so far, int64 [B, R, H, N]."""

    k: Tensor
    v: Tensor
    count: Tensor


class ReformerLayer(Block):
    """The module behind `Reformer`. `forward(x [B, S, D], context) -> [B, S, D]`."""

    def __init__(self, spec: Reformer, place: Placement) -> None:
        super().__init__(spec, place)
        self.scale = spec.head_dim**-0.5
        self._turns: Tensor | None = None

    def draw(self, context: Context | None, x: Tensor) -> Tensor:
        """The rotations [R, H, Dh, N / 2] on x's device, kept for the next pass."""
        spec, kept = self.spec, self._turns
        wide = torch.promote_types(x.dtype, torch.float32)
        if kept is None or kept.device != x.device or kept.dtype != wide:
            with torch.inference_mode(False):  # scored first, a model may be trained later
                made = rotations(
                    spec.num_rounds, spec.num_heads, spec.head_dim, spec.num_buckets, spec.seed, self.layer
                )
                kept = self._turns = made.to(x.device, wide)
        return kept

    def forward(self, x: Tensor, context: Context) -> Tensor:
        spec = self.spec
        shared, v = self.qk_v(x).unflatten(-1, (2, spec.num_heads, spec.head_dim)).unbind(-3)
        buckets = self._hash(shared)
        q = rope(shared, *context.rotary(spec.rope, spec.head_dim, x.dtype))
        k = q / q.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        known = None if context.carry is None else context.carry.get(self.layer)
        if known is None:
            mixed, places = self._whole(q, k, v, buckets, context.document_ids)
            if context.carry is not None:
                context.carry[self.layer] = self._filed(k, v, buckets, places)
        else:
            mixed = self._decode(q, k, v, buckets, known)
        return self.out(mixed.flatten(-2))

    def _hash(self, x: Tensor) -> Tensor:
        """The bucket of every token in every round and head: x [B, S, H, Dh] -> int64 [B, R, H, S]. No gradient."""
        with torch.no_grad():
            directions = self.draw(None, x)
            projected = torch.einsum("bshd,rhdn->brhsn", x.to(directions.dtype), directions)
            return torch.cat((projected, -projected), -1).argmax(-1)

    def _whole(
        self, q: Tensor, k: Tensor, v: Tensor, buckets: Tensor, ids: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Whole sequences: mixed [B, S, H, Dh]; and (order, rank): each round's sorting order, and each token's rank in its bucket."""
        spec = self.spec
        groups = buckets if ids is None else buckets + spec.num_buckets * ids[:, None, None, :]
        order = groups.argsort(dim=-1, stable=True)
        codes, rank = self._chunks(groups.gather(-1, order))
        back = order.argsort(-1)
        parts = []
        for turn in range(spec.num_rounds):
            index = order[:, turn].transpose(1, 2)[..., None].expand_as(q)
            data = codes[:, turn].to(torch.int32)
            sorted_ = [part.gather(1, index) for part in (q, k, v)]
            out, lse = attend(*sorted_, Mask(_before, (), data, data), scale=self.scale, return_lse=True)
            parts.append(
                (out.gather(1, back[:, turn].transpose(1, 2)[..., None].expand_as(q)), lse.gather(2, back[:, turn]))
            )
        mixed, lse = merge(parts)
        alone = (lse == float("-inf")).transpose(1, 2)[..., None]
        return torch.where(alone, v, mixed), (order, rank)

    def _chunks(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """For sorted bucket numbers [..., S]: a code that rises by 1 between chunks of a bucket and by 2 or more
        between buckets, and each token's rank in its bucket."""
        line = torch.arange(groups.shape[-1], device=groups.device).expand(groups.shape)
        new = F.pad(groups[..., 1:] != groups[..., :-1], (1, 0), value=False)
        rank = line - torch.where(new, line, 0).cummax(-1).values
        steps = 2 * new.long() + ((rank > 0) & (rank % self.spec.chunk == 0)).long()
        return steps.cumsum(-1), rank

    def _filed(self, k: Tensor, v: Tensor, buckets: Tensor, places: tuple[Tensor, Tensor]) -> Buckets:
        """The table after a first pass over whole sequences."""
        spec, (order, rank) = self.spec, places
        batch, _, heads, head_dim = k.shape
        shape = (batch, spec.num_rounds, heads, spec.num_buckets)
        count = torch.zeros(shape, dtype=torch.int64, device=k.device)
        count.scatter_add_(-1, buckets, torch.ones_like(buckets))
        chosen = buckets.gather(-1, order)
        slots = 2 * spec.chunk
        late = rank >= count.gather(-1, chosen) - slots
        # Tokens that are too old are written to an extra slot, which is cut off.
        slot = torch.where(late, chosen * slots + rank % slots, spec.num_buckets * slots)
        tables = []
        for part in (k, v):
            rows = part.transpose(1, 2)[:, None].expand(-1, spec.num_rounds, -1, -1, -1)
            rows = rows.gather(3, order[..., None].expand(*order.shape, head_dim))
            table = part.new_zeros(*shape[:3], spec.num_buckets * slots + 1, head_dim)
            table.scatter_(3, slot[..., None].expand(*slot.shape, head_dim), rows)
            tables.append(table[..., :-1, :].unflatten(3, (spec.num_buckets, slots)).contiguous())
        return Buckets(tables[0], tables[1], count)

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, buckets: Tensor, known: Buckets) -> Tensor:
        """Attention of new tokens, one by one; updates the table in place: [B, n, H, Dh]."""
        spec = self.spec
        slots, rows = 2 * spec.chunk, []
        line = torch.arange(slots, device=q.device)
        for place in range(q.shape[1]):
            bucket = buckets[..., place, None]  # [B, R, H, 1]
            rank = known.count.gather(-1, bucket)
            index = bucket[..., None, None].expand(*bucket.shape, slots, spec.head_dim)
            keys, values = (table.gather(3, index).squeeze(3) for table in (known.k, known.v))
            standing = rank - 1 - (rank - 1 - line) % slots  # the rank of the token in each slot
            seen = (standing >= 0) & (standing >= (rank // spec.chunk - 1) * spec.chunk)
            scores = torch.einsum("bhd,brhcd->bhrc", q[:, place], keys) * self.scale
            scores = scores.masked_fill(~seen.transpose(1, 2), float("-inf")).flatten(2)
            alone = (scores == float("-inf")).all(-1, keepdim=True)
            wide = torch.promote_types(scores.dtype, torch.float32)
            weights = scores.masked_fill(alone, 0.0).softmax(-1, dtype=wide).to(v.dtype).unflatten(-1, (-1, slots))
            mixed = torch.einsum("bhrc,brhcd->bhd", weights, values)
            rows.append(torch.where(alone, v[:, place], mixed))
            at = (bucket * slots + rank % slots)[..., None].expand(*bucket.shape, spec.head_dim)
            for table, part in ((known.k, k), (known.v, v)):
                new = part[:, place][:, None, :, None].expand(-1, spec.num_rounds, -1, -1, -1)
                table.flatten(3, 4).scatter_(3, at, new)
            known.count.scatter_add_(-1, bucket, torch.ones_like(bucket))
        return torch.stack(rows, 1)


def rotations(num_rounds: int, num_heads: int, head_dim: int, num_buckets: int, seed: int, layer: int) -> Tensor:
    """Random directions [R, H, Dh, N / 2] float32, from `seed` and `layer` alone."""
    generator = torch.Generator().manual_seed(seed + 1_000_003 * layer)
    return torch.randn(num_rounds, num_heads, head_dim, num_buckets // 2, generator=generator)


def _before(q, k, q_data, k_data, params):  # type: ignore[no-untyped-def]
    """Mask rule among sorted tokens: strictly before, in the same chunk of a bucket or the one before it."""
    return (q > k) & (q_data - k_data <= 1)
