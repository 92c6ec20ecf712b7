"""The bookkeeping of a round in three small kernels, one program a sequence: in torch it would be forty launches.

Legend: S sequences, k guesses, Q = k + 1 tokens of a sequence in a round, P pages of a row of the table. All numbers are int64 unless said.
"""

import triton
import triton.language as tl


@triton.jit
def place_tokens(
    starts,  # [S]
    alive,  # [S] 1, or 0 for a pad
    table,  # int32 [S, P]
    stride,
    out,  # [4, S, Q]: positions, the positions after them, pages, offsets
    ends,  # int32 [S]
    num_tokens,  # S * Q
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Where the Q tokens of each sequence stand; a pad's are filed in page 0."""
    seq = tl.program_id(0)
    start, lives = tl.load(starts + seq), tl.load(alive + seq)
    ahead = tl.arange(0, BLOCK)
    inside = ahead < WIDTH
    place = start + ahead
    page = tl.load(table + seq * stride + place // PAGE_SIZE, mask=inside, other=0).to(tl.int64) * lives
    at = out + seq * WIDTH + ahead
    tl.store(at, place, mask=inside)
    tl.store(at + num_tokens, place + 1, mask=inside)
    tl.store(at + 2 * num_tokens, page, mask=inside)
    tl.store(at + 3 * num_tokens, place % PAGE_SIZE, mask=inside)
    tl.store(ends + seq, ((start + WIDTH) * lives).to(tl.int32))


@triton.jit
def settle_round(
    tokens,  # [S, Q]; the first column becomes the last token that is known
    chosen,  # [S, Q]
    peaks,  # float32 [S, Q]
    starts,  # [S], moved on
    limits,  # [S] guesses that count, k afterwards
    alive,  # [S]
    table,  # int32 [S, P]
    stride,
    packed,  # [S, 1 + Q + k]: the first 1 + Q columns are written
    rows,  # [S] the row among S * Q of the last guess that was kept
    after,  # [k, S] the places of the next guesses
    draft,  # [3, k, S] positions, pages and offsets of a drafter's passes: the last known token and the guesses but one
    draft_ends,  # int32 [k, S]
    num_seqs,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Keeps the guesses that the model's own tokens foretold, and moves the sequence on behind them."""
    seq = tl.program_id(0)
    start, limit, lives = tl.load(starts + seq), tl.load(limits + seq), tl.load(alive + seq)
    ahead = tl.arange(0, BLOCK)
    inside, guessed = ahead < WIDTH, ahead < WIDTH - 1
    guess = tl.load(tokens + seq * WIDTH + 1 + ahead, mask=guessed, other=-1)
    found = tl.load(chosen + seq * WIDTH + ahead, mask=inside, other=0)
    wrong = (guess != found) | (ahead >= limit) | (ahead >= WIDTH - 1)
    kept = tl.min(tl.where(wrong, ahead, BLOCK), 0).to(tl.int64)
    peak = tl.load(peaks + seq * WIDTH + ahead, mask=inside, other=0.0)
    finite = tl.abs(peak) < float("inf")
    own = packed + seq * (2 * WIDTH)
    tl.store(own, kept)
    tl.store(own + 1 + ahead, tl.where(finite, found, -1), mask=inside)
    tl.store(rows + seq, seq * WIDTH + kept)
    last = tl.sum(tl.where(ahead == kept, found, 0), 0)
    tl.store(tokens + seq * WIDTH, last)
    moved = start + (kept + 1) * lives
    tl.store(starts + seq, moved)
    tl.store(limits + seq, kept * 0 + WIDTH - 1)
    place = moved + ahead
    page = tl.load(table + seq * stride + place // PAGE_SIZE, mask=guessed, other=0).to(tl.int64) * lives
    at = ahead * num_seqs + seq
    size = (WIDTH - 1) * num_seqs
    tl.store(after + at, place + 1, mask=guessed)
    tl.store(draft + at, place, mask=guessed)
    tl.store(draft + size + at, page, mask=guessed)
    tl.store(draft + 2 * size + at, place % PAGE_SIZE, mask=guessed)
    tl.store(draft_ends + at, ((place + 1) * lives).to(tl.int32), mask=guessed)


@triton.jit
def leave_guesses(
    guesses,  # [k, S]
    tokens,  # [S, Q]: all but the first column are written
    packed,  # [S, 1 + Q + k]: the last k columns are written
    num_seqs,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Files the guesses where the next round verifies them, and where the host reads them."""
    seq = tl.program_id(0)
    ahead = tl.arange(0, BLOCK)
    guessed = ahead < WIDTH - 1
    guess = tl.load(guesses + ahead * num_seqs + seq, mask=guessed, other=0)
    tl.store(tokens + seq * WIDTH + 1 + ahead, guess, mask=guessed)
    tl.store(packed + seq * (2 * WIDTH) + 1 + WIDTH + ahead, guess, mask=guessed)
