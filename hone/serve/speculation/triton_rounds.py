"""The bookkeeping of a round in a few small kernels, one program a sequence: in torch it would be forty launches.

Legend: S sequences, Q = WIDTH nodes of a sequence's tree, k = DEPTH its depth, P pages of a row of the table. All numbers are int64 unless said.
"""

import triton
import triton.language as tl


@triton.jit
def place_tokens(
    starts,  # [S]
    alive,  # [S] 1, or 0 for a pad
    nodes,  # [4, Q] parents, depths, ranks, bits
    table,  # int32 [S, P]
    stride,
    out,  # [4, S, Q]: positions, the positions after them, pages, offsets
    ends,  # int32 [2, S]: with all nodes, and with a path's
    num_seqs,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Where the Q tokens of each sequence stand: node n in the n-th slot, at the position of its depth; a pad's are filed in page 0."""
    seq = tl.program_id(0)
    start, lives = tl.load(starts + seq), tl.load(alive + seq)
    ahead = tl.arange(0, BLOCK)
    inside = ahead < WIDTH
    slot = start + ahead
    place = start + tl.load(nodes + WIDTH + ahead, mask=inside, other=0)
    page = tl.load(table + seq * stride + slot // PAGE_SIZE, mask=inside, other=0).to(tl.int64) * lives
    at = out + seq * WIDTH + ahead
    num_tokens = num_seqs * WIDTH
    tl.store(at, place, mask=inside)
    tl.store(at + num_tokens, place + 1, mask=inside)
    tl.store(at + 2 * num_tokens, page, mask=inside)
    tl.store(at + 3 * num_tokens, slot % PAGE_SIZE, mask=inside)
    tl.store(ends + seq, ((start + WIDTH) * lives).to(tl.int32))
    tl.store(ends + num_seqs + seq, ((start + DEPTH + 1) * lives).to(tl.int32))


@triton.jit
def settle_round(
    tokens,  # [S, Q]; the first column becomes the last token that is known
    chosen,  # [S, Q]
    peaks,  # float32 [S, Q]
    nodes,  # [4, Q]
    starts,  # [S], moved on
    limits,  # [S] guesses that count, Q - 1 afterwards
    alive,  # [S]
    table,  # int32 [S, P]
    stride,
    packed,  # [S, 1 + k + Q]: the first 2 + k columns are written
    path,  # [S, 1 + k] the row among S * Q of the node kept of each place, of the first choice where none was
    rows,  # [2, S] the row of the last guess that was kept, among S * Q and among S * (1 + k)
    after,  # [k, S] the places of the next guesses
    draft,  # [3, k, S] positions, pages and offsets of a drafter's passes: the last known token and the guesses but one
    draft_ends,  # int32 [k, S]
    num_seqs,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Keeps the path of guesses that the model's own tokens foretold, and moves the sequence on behind it."""
    seq = tl.program_id(0)
    start, limit, lives = tl.load(starts + seq), tl.load(limits + seq), tl.load(alive + seq)
    ahead = tl.arange(0, BLOCK)
    inside = ahead < WIDTH
    guess = tl.load(tokens + seq * WIDTH + ahead, mask=inside, other=-1)
    found = tl.load(chosen + seq * WIDTH + ahead, mask=inside, other=0)
    parent = tl.load(nodes + ahead, mask=inside, other=-1)
    counts = inside & (ahead <= limit)
    peak = tl.load(peaks + seq * WIDTH + ahead, mask=inside, other=0.0)
    told = tl.where(tl.abs(peak) < float("inf"), found, -1)
    own = packed + seq * (1 + DEPTH + WIDTH)
    steps = path + seq * (1 + DEPTH)
    node = (start * 0).to(tl.int32)
    kept = start * 0
    last = tl.sum(tl.where(ahead == node, found, 0), 0)
    tl.store(steps, kept + seq * WIDTH)
    tl.store(own + 1, tl.sum(tl.where(ahead == node, told, 0), 0))
    going = kept == 0
    for place in range(1, DEPTH + 1):
        child = tl.min(tl.where(counts & (parent == node) & (guess == last), ahead, BLOCK), 0)
        going = going & (child < BLOCK)
        node = tl.where(going, child, node)
        kept += going.to(tl.int64)
        last = tl.sum(tl.where(ahead == node, found, 0), 0)
        tl.store(steps + place, (seq * WIDTH + tl.where(going, node, place)).to(tl.int64))
        tl.store(own + 1 + place, tl.sum(tl.where(ahead == node, told, 0), 0))
    tl.store(own, kept)
    tl.store(rows + seq, (seq * WIDTH + node).to(tl.int64))
    tl.store(rows + num_seqs + seq, seq * (DEPTH + 1) + kept)
    tl.store(tokens + seq * WIDTH, last)
    moved = start + (kept + 1) * lives
    tl.store(starts + seq, moved)
    tl.store(limits + seq, kept * 0 + WIDTH - 1)
    guessed = ahead < DEPTH
    place = moved + ahead
    page = tl.load(table + seq * stride + place // PAGE_SIZE, mask=guessed, other=0).to(tl.int64) * lives
    at = ahead * num_seqs + seq
    size = DEPTH * num_seqs
    tl.store(after + at, place + 1, mask=guessed)
    tl.store(draft + at, place, mask=guessed)
    tl.store(draft + size + at, page, mask=guessed)
    tl.store(draft + 2 * size + at, place % PAGE_SIZE, mask=guessed)
    tl.store(draft_ends + at, ((place + 1) * lives).to(tl.int32), mask=guessed)


@triton.jit
def keep_path(
    store,  # [layers, pages, HEADS, PAGE_SIZE, DIM], contiguous
    path,  # [S, 1 + k]
    placed,  # [4, S, Q]
    layer_stride,
    num_tokens,  # S * Q
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Moves one layer's vectors of a sequence's path to the slots of their depths. Grid (layers, S).

    A node is never before its depth, and a later one of the path stands behind it: in order nothing is overwritten that is still to move.
    """
    seq = tl.program_id(1)
    own = store + tl.program_id(0).to(tl.int64) * layer_stride
    heads, dims = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    inside = (heads < HEADS)[:, None] & (dims < DIM)[None, :]
    within = heads[:, None] * (PAGE_SIZE * DIM) + dims[None, :]
    pages = placed + 2 * num_tokens + seq * WIDTH
    for place in range(1, DEPTH + 1):
        node = tl.load(path + seq * (DEPTH + 1) + place) - seq * WIDTH
        if node != place:
            come = tl.load(pages + node) * (HEADS * PAGE_SIZE) + tl.load(pages + num_tokens + node)
            go = tl.load(pages + place) * (HEADS * PAGE_SIZE) + tl.load(pages + num_tokens + place)
            tl.store(own + go * DIM + within, tl.load(own + come * DIM + within, mask=inside), mask=inside)


@triton.jit
def leave_guesses(
    guesses,  # [k, S, choices]
    nodes,  # [4, Q]
    tokens,  # [S, Q]: all but the first column are written
    packed,  # [S, 1 + k + Q]: the last Q - 1 columns are written
    num_seqs,
    choices,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Files the guesses where the next round verifies them, and where the host reads them."""
    seq = tl.program_id(0)
    node = tl.arange(0, BLOCK)
    guessed = (node > 0) & (node < WIDTH)
    depth = tl.load(nodes + WIDTH + node, mask=guessed, other=1)
    rank = tl.load(nodes + 2 * WIDTH + node, mask=guessed, other=0)
    guess = tl.load(guesses + ((depth - 1) * num_seqs + seq) * choices + rank, mask=guessed, other=0)
    tl.store(tokens + seq * WIDTH + node, guess, mask=guessed)
    tl.store(packed + seq * (1 + DEPTH + WIDTH) + 1 + DEPTH + node, guess, mask=guessed)
