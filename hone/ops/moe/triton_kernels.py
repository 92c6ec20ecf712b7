"""Mixture-of-experts dispatch: counting sort of tokens by expert, gather and scatter of their rows, few-token products.

The product reads each expert's weights once, as the rows of the tensor core's first operand; the expert's few tokens are
the columns. Experts without tokens cost nothing.
"""

import triton
import triton.language as tl


@triton.jit
def count_experts(ids, counts, num_ids, num_experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """counts [blocks, E] int32: occurrences of each expert in each block of ids."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(ids + at, mask=at < num_ids, other=0).to(tl.int32)
    experts = tl.arange(0, EXPERTS)
    histogram = tl.histogram(found, EXPERTS, mask=at < num_ids)
    tl.store(counts + block * num_experts + experts, histogram, mask=experts < num_experts)


@triton.jit
def place_by_expert(
    ids,  # integer [N]
    counts,  # int32 [blocks, E]
    place,  # int32 [N]: the place of entry i
    order,  # int32 [N]: the entry at each place
    ends,  # int32 [E]: the end of each expert's run
    num_ids,
    num_experts,
    blocks,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Stable counting sort: expert by expert, within an expert in the order of the entries."""
    block = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    known = experts < num_experts
    total = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, blocks, 16):
        others = first + tl.arange(0, 16)[:, None]
        seen = tl.load(
            counts + others * num_experts + experts[None, :], mask=(others < blocks) & known[None, :], other=0
        )
        total += tl.sum(seen, 0)
        before += tl.sum(tl.where(others < block, seen, 0), 0)
    last = tl.cumsum(total, 0)
    if block == 0:
        tl.store(ends + experts, last, mask=known)
    start = last - total + before
    for step in range(0, BLOCK, STEP):
        at = block * BLOCK + step + tl.arange(0, STEP)
        inside = at < num_ids
        found = tl.load(ids + at, mask=inside, other=-1).to(tl.int32)
        here = (found[:, None] == experts[None, :]).to(tl.int32)
        rank = tl.cumsum(here, 0) - here + start[None, :]
        to = tl.sum(rank * here, 1)
        tl.store(place + at, to, mask=inside)
        tl.store(order + to, at, mask=inside)
        start += tl.sum(here, 0)


@triton.jit
def place_few(ids, place, order, ends, num_ids, num_experts, IDS: tl.constexpr, MINE: tl.constexpr):
    """`place_by_expert` for few entries: each is compared with all. The last programs compute `ends`."""
    program = tl.program_id(0)
    all_at = tl.arange(0, IDS)
    real = all_at < num_ids
    others = tl.load(ids + all_at, mask=real, other=0).to(tl.int32)[None, :]
    programs = tl.cdiv(num_ids, MINE)
    if program < programs:
        at = program * MINE + tl.arange(0, MINE)
        mine = tl.load(ids + at, mask=at < num_ids, other=0).to(tl.int32)[:, None]
        earlier = (others < mine) | ((others == mine) & (all_at[None, :] < at[:, None]))
        to = tl.sum((earlier & real[None, :]).to(tl.int32), 1)
        tl.store(place + at, to, mask=at < num_ids)
        tl.store(order + to, at, mask=at < num_ids)
    else:
        experts = (program - programs) * MINE + tl.arange(0, MINE)
        until = tl.sum(((others <= experts[:, None]) & real[None, :]).to(tl.int32), 1)
        tl.store(ends + experts, until, mask=experts < num_experts)


@triton.jit
def list_few(ids, place, order, ends, num_ids, num_experts, IDS: tl.constexpr, EXPERTS: tl.constexpr):
    """`place_few` in one program, entries of an expert in any order."""
    at, experts = tl.arange(0, IDS), tl.arange(0, EXPERTS)
    known = experts < num_experts
    mine = tl.load(ids + at, mask=at < num_ids, other=0).to(tl.int32)
    tl.atomic_xchg(ends + experts, tl.zeros([EXPERTS], tl.int32), mask=known, sem="relaxed")
    tl.debug_barrier()
    rank = tl.atomic_add(ends + mine, tl.full([IDS], 1, tl.int32), mask=at < num_ids, sem="relaxed")
    tl.debug_barrier()
    until = tl.cumsum(tl.load(ends + experts, mask=known, other=0, volatile=True), 0)
    tl.debug_barrier()
    tl.store(ends + experts, until, mask=known)
    tl.debug_barrier()
    to = rank + tl.load(ends + mine - 1, mask=(at < num_ids) & (mine > 0), other=0, volatile=True)
    tl.store(place + at, to, mask=at < num_ids)
    tl.store(order + to, at, mask=at < num_ids)


@triton.jit
def count_visits(ids, counts, num_ids, BLOCK: tl.constexpr):
    """counts int32 [E], zeros before, grow by the entries of each expert."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(ids + at, mask=at < num_ids, other=0).to(tl.int32)
    tl.atomic_add(counts + mine, tl.full([BLOCK], 1, tl.int32), mask=at < num_ids, sem="relaxed")


@triton.jit
def list_visits(
    ids, counts, taken, place, order, ends, num_ids, num_experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr
):  # fmt: skip
    """`place_by_expert` with entries of an expert in any order; taken int32 [E], zeros before, are those that have a place."""
    at, experts = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, EXPERTS)
    own = tl.load(counts + experts, mask=experts < num_experts, other=0)
    until = tl.cumsum(own, 0)
    mine = tl.load(ids + at, mask=at < num_ids, other=0).to(tl.int32)
    begin = tl.sum(tl.where(mine[:, None] == experts[None, :], (until - own)[None, :], 0), 1)
    to = begin + tl.atomic_add(taken + mine, tl.full([BLOCK], 1, tl.int32), mask=at < num_ids, sem="relaxed")
    tl.store(place + at, to, mask=at < num_ids)
    tl.store(order + to, at, mask=at < num_ids)
    if tl.program_id(0) == 0:
        tl.store(ends + experts, until, mask=experts < num_experts)


@triton.jit
def spread_places(
    ids,  # integer [N]: the expert of each entry
    place,  # int32 [N]: its place without gaps
    ends,  # int32 [E]
    to,  # int32 [N]: its place in rooms
    order,  # int32 [n * C]: the entry at each place, 0 where there is none
    num_ids,
    num_places,
    room,
    each,
    BLOCK: tl.constexpr,
):
    """Rows of `each` neighbouring experts begin at a multiple of `room`; the last programs fill places that nobody asked for."""
    blocks = tl.cdiv(num_ids, BLOCK)
    program = tl.program_id(0)
    if program < blocks:
        at = program * BLOCK + tl.arange(0, BLOCK)
        inside = at < num_ids
        piece = tl.load(ids + at, mask=inside, other=0).to(tl.int32) // each
        start = tl.load(ends + piece * each - 1, mask=inside & (piece > 0), other=0)
        found = piece * room + tl.minimum(tl.load(place + at, mask=inside, other=0) - start, room - 1)
        tl.store(to + at, found, mask=inside)
        tl.store(order + found, at, mask=inside)
    else:
        at = (program - blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = at < num_places
        piece = at // room
        start = tl.load(ends + piece * each - 1, mask=inside & (piece > 0), other=0)
        count = tl.load(ends + piece * each + each - 1, mask=inside, other=0) - start
        tl.store(order + at, tl.zeros([BLOCK], tl.int32), mask=inside & (at - piece * room >= count))


@triton.jit
def piece_spans(
    counts,  # int64 [n, E]: rows of each rank for each expert of all
    ends,  # int32 [E / n, n]
    starts,  # int32 [E / n, n]
    first,
    room,
    own: tl.constexpr,
    num_pieces: tl.constexpr,
    EXPERTS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """The spans of `own` experts from `first` on in each rank's piece, which begins at a multiple of `room`; 0: where the one before ends."""
    pieces, experts = tl.arange(0, PIECES), tl.arange(0, EXPERTS)
    known = (pieces[:, None] < num_pieces) & (experts[None, :] < own)
    rows = tl.load(counts + pieces[:, None] * (own * num_pieces) + first + experts[None, :], mask=known, other=0).to(
        tl.int32
    )
    until = tl.cumsum(rows, 1)
    begin = until - rows
    totals = tl.sum(rows, 1)
    if room > 0:
        base = pieces * room
        until = tl.minimum(until, room)
        begin = tl.minimum(begin, room)
    else:
        base = tl.cumsum(totals, 0) - totals
    at = experts[None, :] * num_pieces + pieces[:, None]
    tl.store(ends + at, until + base[:, None], mask=known)
    tl.store(starts + at, begin + base[:, None], mask=known)


@triton.jit
def gather_rows(
    x, order, until, out, x_stride, num_rows, width, top_k, SOME: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out[i] = x[order[i] // top_k]; SOME: of rows before until[0] alone."""
    if SOME:
        num_rows = tl.load(until)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    source = tl.load(order + rows, mask=rows < num_rows, other=0) // top_k
    inside = (rows[:, None] < num_rows) & (columns < width)
    values = tl.load(x + source[:, None].to(tl.int64) * x_stride + columns, mask=inside)
    tl.store(out + rows[:, None].to(tl.int64) * width + columns, values, mask=inside)


@triton.jit
def combine_rows(
    y, place, weights, until, out, y_stride, width, top_k,
    WEIGHTED: tl.constexpr, SOME: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over j of weights[t, j] * y[place[t, j]], summed in float32 in the order of j. SOME: of rows before until[0] alone."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        if j < top_k:
            source = tl.load(place + token * top_k + j).to(tl.int64)
            given = inside
            if SOME:
                given = inside & (source < tl.load(until))
            values = tl.load(y + source * y_stride + columns, mask=given, other=0.0).to(tl.float32)
            if WEIGHTED:
                values *= tl.load(weights + token * top_k + j).to(tl.float32)
            total += values
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def combine_rows_backward(
    upstream,  # [T, D]
    y,  # [T * k, D]
    place,  # int32 [T * k]
    weights,  # [T, k]
    grad_y,  # [T * k, D]
    grad_weights,  # float32 [T, k]
    upstream_stride,
    y_stride,
    width,
    top_k,
    BLOCK: tl.constexpr,
):
    """Gradients of the weighted sum: one program per (token, expert) pair."""
    pair = tl.program_id(0).to(tl.int64)
    token = pair // top_k
    to = tl.load(place + pair).to(tl.int64)
    weight = tl.load(weights + pair).to(tl.float32)
    dot = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, width, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        inside = columns < width
        flow = tl.load(upstream + token * upstream_stride + columns, mask=inside, other=0.0).to(tl.float32)
        dot += flow * tl.load(y + to * y_stride + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_y + to * width + columns, (flow * weight).to(grad_y.dtype.element_ty), mask=inside)
    tl.store(grad_weights + pair, tl.sum(dot, 0))


@triton.jit
def few_tokens(
    x,  # [T, K], rows sorted by expert
    weight,  # [E, N, K]
    ends,  # int32 [E]: the end of each expert's rows
    out,  # [T, N]
    x_stride,
    weight_expert,
    weight_row,
    num_experts,
    num_out,
    num_in,
    EVEN_K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out[rows of expert e] = x[those rows] @ weight[e]^T, one program per expert and BLOCK_N output features."""
    tile = tl.program_id(0)
    tiles = tl.cdiv(num_out, BLOCK_N)
    expert = tile // tiles
    features = (tile % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    end = tl.load(ends + expert)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    rows_of = weight + expert.to(tl.int64) * weight_expert + features[:, None].to(tl.int64) * weight_row
    for first in range(begin, end, TOKENS):
        tokens = first + tl.arange(0, TOKENS)
        _few(
            x + tokens[None, :].to(tl.int64) * x_stride, rows_of, out, tokens, features, end, num_out, num_in,
            EVEN_K, TOKENS, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip


@triton.jit
def _few(
    columns_of, rows_of, out, tokens, features, end, num_out, num_in,
    EVEN_K: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([BLOCK_N, TOKENS], tl.float32)
    real = features[:, None] < num_out
    for begin in tl.range(0, num_in, BLOCK_K, num_stages=STAGES):
        k = begin + tl.arange(0, BLOCK_K)
        if EVEN_K:
            part = tl.load(rows_of + k[None, :], mask=real, other=0.0, eviction_policy="evict_first")
            given = tl.load(columns_of + k[:, None], mask=tokens[None, :] < end, other=0.0)
        else:
            part = tl.load(rows_of + k[None, :], mask=real & (k[None, :] < num_in), other=0.0)
            given = tl.load(columns_of + k[:, None], mask=(tokens[None, :] < end) & (k[:, None] < num_in), other=0.0)
        total = tl.dot(part, given, total)
    at = out + tokens[None, :].to(tl.int64) * num_out + features[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=real & (tokens[None, :] < end))
