"""The attention backward's main kernel on Hopper: dK, dV and a float32 sum of dQ, in specialized warpgroups.

Every program has a tile of 128 keys and loops over the query tiles that attend to it (FlashAttention-2, arXiv 2307.08691,
algorithm 2; FlashAttention-3, arXiv 2407.08608, for warp specialization). S and dP are computed transposed, keys along M,
so that P and dS stay in registers as operands of dV and dK. A third warpgroup reads dS from shared memory, multiplies it
with K and adds the product to dQ in global memory (TMA reduce-add): the two softmax warpgroups never wait for each other,
and dQ overlaps with both.

Legend: b, h a sequence and a query head; m, n a tile of queries and of keys; BM queries and 128 keys a tile; D head_dim.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hone.ops.attention.gluon_problem import (
    Problem,
    Shared,
    draw_tile,
    keep,
    next_tile,
    num_skipped,
    query_tile,
    span,
    tile,
)
from hone.ops.compat import tma_load, tma_reduce_add, tma_store, warpgroup_barrier


@gluon.jit
def _load(p, s):
    """The loading warp: Q, lse, d_out and delta of every query tile, with the first of a key tile its K and V."""
    STAGES: gl.constexpr = s.q.type.shape[0]
    BM: gl.constexpr = s.q.type.shape[1]
    D: gl.constexpr = s.q.type.shape[2]
    BN: gl.constexpr = 128
    dtype: gl.constexpr = s.q.dtype
    boxed: gl.constexpr = p.q.layout
    ROWS_OF_STATS: gl.constexpr = 3 if p.HAS_DATA[0] else 2
    Q_BYTES: gl.constexpr = p.q.block_type.nbytes + (ROWS_OF_STATS - 1) * BM * 4
    num_m = gl.cdiv(p.seq_q, BM)
    step = 0
    done = 0
    t = gl.program_id(0)
    while t < p.num_tiles:
        b, kv_head, n = tile(p, t, BN)
        fresh = t >= 0  # True, as a value that the loops can carry
        for g in range(p.GROUP):
            h = kv_head * p.GROUP + g
            first, _masked, count = span(p, b, h, n, BM, BN)
            rows = (b * p.num_kv_heads * p.GROUP + h) * num_m
            for j in range(count):
                m = query_tile(p, first, j)
                at = step % STAGES
                phase = ((step // STAGES) & 1) ^ 1
                stats = (rows + m) * (ROWS_OF_STATS * BM)
                bar = s.q_full.index(at)
                mbarrier.wait(s.q_empty.index(at), phase)
                mbarrier.expect(bar, Q_BYTES, pred=not fresh)
                mbarrier.expect(bar, Q_BYTES + 2 * p.k.block_type.nbytes, pred=fresh)
                tma_load(p.q, [b, m * BM, h, 0], bar, s.q.index(at)._reinterpret(dtype, [1, BM, 1, D], boxed))
                tma_load(p.stats, [stats], bar, s.lse.index(at))
                if p.HAS_DATA[0]:
                    tma_load(p.stats, [stats + 2 * BM], bar, s.q_data.index(at))
                mbarrier.wait(s.k_empty.index(0), (done & 1) ^ 1, pred=fresh)
                for w in gl.static_range(2):
                    k = s.k.index(w)._reinterpret(dtype, [1, 64, 1, D], boxed)
                    tma_load(p.k, [b, n * BN + w * 64, kv_head, 0], bar, k, pred=fresh)
                bar = s.d_out_full.index(at)
                mbarrier.wait(s.d_out_empty.index(at), phase)
                mbarrier.expect(bar, p.d_out.block_type.nbytes + BM * 4, pred=not fresh)
                mbarrier.expect(bar, p.d_out.block_type.nbytes + BM * 4 + 2 * p.v.block_type.nbytes, pred=fresh)
                tma_load(p.d_out, [b, m * BM, h, 0], bar, s.d_out.index(at)._reinterpret(dtype, [1, BM, 1, D], boxed))
                tma_load(p.stats, [stats + BM], bar, s.delta.index(at))
                mbarrier.wait(s.v_empty.index(0), (done & 1) ^ 1, pred=fresh)
                for w in gl.static_range(2):
                    v = s.v.index(w)._reinterpret(dtype, [1, 64, 1, D], boxed)
                    tma_load(p.v, [b, n * BN + w * 64, kv_head, 0], bar, v, pred=fresh)
                fresh = t < 0
                step += 1
        t = draw_tile(p, s, done, BM, BN)
        done += 1


@gluon.jit
def _round(x, dtype: gl.constexpr):
    # x in 16 bits, two per register: the compiler's conversion uses one register per value as long as both forms are live.
    if dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        y = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
        )
    return y


@gluon.jit
def _widen(x):
    # Not pure, so that the compiler does not move it up and hold the wide form in registers longer.
    if x.dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r", [x], dtype=gl.float32, is_pure=False, pack=2,
        )  # fmt: skip
    else:
        y = gl.inline_asm_elementwise(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }",
            "=f,=f,r", [x], dtype=gl.float32, is_pure=False, pack=2,
        )  # fmt: skip
    return y


@gluon.jit
def _compute_here(x):
    # Forces ptxas to compute x (16-bit, never negative) before this point: it would otherwise move the exponentials past
    # the next product, run out of registers and serialize every product of the kernel. The store never executes.
    gl.inline_asm_elementwise(
        "{ .reg .b32 x, a; .reg .pred p; "
        "lop3.b32 x, $8, $9, $10, 0xFE; lop3.b32 x, x, $11, $12, 0xFE; lop3.b32 x, x, $13, $14, 0xFE; "
        "lop3.b32 x, x, $15, $16, 0xFE; lop3.b32 x, x, $17, $18, 0xFE; lop3.b32 x, x, $19, $20, 0xFE; "
        "lop3.b32 x, x, $21, $22, 0xFE; or.b32 x, x, $23; setp.lt.s32 p, x, 0; mov.u32 a, 0; "
        "@p st.volatile.shared.b32 [a], x; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; "
        "mov.u32 $4, 0; mov.u32 $5, 0; mov.u32 $6, 0; mov.u32 $7, 0; }",
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [x], dtype=gl.int8, is_pure=False, pack=32,
    )  # fmt: skip


@gluon.jit
def _dq_half(s, at, PART: gl.constexpr, D: gl.constexpr):
    # Half of dQ = dS^T K, a 64 x 64 product over the tile's 128 keys: half of head_dim 128, or of the 128 rows.
    half: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    dq = gl.zeros([64, 64], gl.float32, half)
    for w in gl.static_range(2):
        ds = s.ds.index(at * 2 + w)
        k = s.k.index(w)
        if D == 128:
            k = k.slice(PART * 64, 64, 1)
        else:
            ds = ds.slice(PART * 64, 64, 1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=w > 0, is_async=True)
    return dq


@gluon.jit
def _add_dq(p, s, dq, row, PART: gl.constexpr, D: gl.constexpr):
    s.dq.index(PART).store(dq)
    fence_async_shared()
    warpgroup_barrier()
    if D == 128:
        tma_reduce_add(p.dq, [row, PART * 64], s.dq.index(PART))
    else:
        tma_reduce_add(p.dq, [row + PART * 64, 0], s.dq.index(PART))


@gluon.jit
def _step(p, s, dk, dv, step, m, b, h, n, WHICH: gl.constexpr, MASKED: gl.constexpr):
    """One query tile in a softmax warpgroup."""
    STAGES: gl.constexpr = s.q.type.shape[0]
    DS_STAGES: gl.constexpr = s.ds.type.shape[0] // 2
    BM: gl.constexpr = s.q.type.shape[1]
    D: gl.constexpr = s.q.type.shape[2]
    dtype: gl.constexpr = s.q.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    cols: gl.constexpr = gl.SliceLayout(0, scores)
    rows: gl.constexpr = gl.SliceLayout(1, scores)
    at = step % STAGES
    phase = (step // STAGES) & 1
    q = s.q.index(at)
    d_out = s.d_out.index(at)
    zero = gl.zeros([64, BM], gl.float32, scores)
    # WHICH as an opaque value, or the addresses of K and V would be computed before the loop and held in registers.
    keys = WHICH
    if p.DYNAMIC:
        keys = WHICH + (step >> 31)
    mbarrier.wait(s.q_full.index(at), phase)
    score = warpgroup_mma(s.k.index(keys), q.permute((1, 0)), zero, use_acc=False, is_async=True)
    lse = s.lse.index(at).load(cols)
    score = warpgroup_mma_wait(0, deps=[score])
    # lse is in units of log 2; +inf for rows without keys and rows past the end, so that their p is 0.
    if p.SOFTCAP is None:
        prob = gl.exp2(score * (p.scale * 1.4426950408889634) - lse[None, :])
    else:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), x = scale * score / softcap
        tanh = 1 - 2 / (gl.exp2(score * (p.scale * (2.8853900817779268 / p.SOFTCAP))) + 1)
        prob = gl.exp2(tanh * (p.SOFTCAP * 1.4426950408889634) - lse[None, :])
    if MASKED:
        q_at = m * BM + gl.arange(0, BM, cols)
        k_at = n * 128 + WHICH * 64 + gl.arange(0, 64, rows)
        q_data = q_at * 0
        if p.HAS_DATA[0]:
            q_data = s.q_data.index(at).load(cols).to(gl.int32, bitcast=True)
        prob = gl.where(keep(p, b, h, q_at, k_at, q_data), prob, 0.0)
    prob16 = _round(prob, dtype)
    _compute_here(prob16)
    mbarrier.wait(s.d_out_full.index(at), phase)
    dp = warpgroup_mma(s.v.index(keys), d_out.permute((1, 0)), zero, use_acc=False, is_async=True)
    dv = warpgroup_mma(gl.convert_layout(prob16, operand), d_out, dv, is_async=True)
    delta = s.delta.index(at).load(cols)
    if p.SOFTCAP is None:
        # The rounded p takes half the registers of the exact one.
        dp, prob16 = warpgroup_mma_wait(1, deps=[dp, prob16])
        weight = _widen(prob16)
    else:
        weight = prob * (1 - tanh * tanh)
        dp = warpgroup_mma_wait(1, deps=[dp])
    ds = _round(weight * (dp - delta[None, :]), dtype)
    ds_at = step % DS_STAGES
    mbarrier.wait(s.ds_empty.index(ds_at), ((step // DS_STAGES) & 1) ^ 1)
    s.ds.index(ds_at * 2 + WHICH).store(ds)
    fence_async_shared()
    dk = warpgroup_mma(gl.convert_layout(ds, operand), q, dk, is_async=True)
    warpgroup_barrier()
    mbarrier.arrive(s.ds_full.index(ds_at))
    dv = warpgroup_mma_wait(1, deps=[dv])
    mbarrier.arrive(s.d_out_empty.index(at))
    dk = warpgroup_mma_wait(0, deps=[dk])
    mbarrier.arrive(s.q_empty.index(at))
    return dk, dv


@gluon.jit
def _skip(s, step, WHICH: gl.constexpr):
    """A query tile without pairs among this softmax warpgroup's keys: dS is 0."""
    STAGES: gl.constexpr = s.q.type.shape[0]
    DS_STAGES: gl.constexpr = s.ds.type.shape[0] // 2
    BM: gl.constexpr = s.q.type.shape[1]
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    at = step % STAGES
    ds_at = step % DS_STAGES
    phase = (step // STAGES) & 1
    mbarrier.wait(s.ds_empty.index(ds_at), ((step // DS_STAGES) & 1) ^ 1)
    s.ds.index(ds_at * 2 + WHICH).store(gl.zeros([64, BM], s.q.dtype, scores))
    fence_async_shared()
    warpgroup_barrier()
    mbarrier.wait(s.q_full.index(at), phase)
    mbarrier.wait(s.d_out_full.index(at), phase)
    mbarrier.arrive(s.ds_full.index(ds_at))
    mbarrier.arrive(s.d_out_empty.index(at))
    mbarrier.arrive(s.q_empty.index(at))


@gluon.jit
def _softmax(p, s, WHICH: gl.constexpr):
    """A softmax warpgroup: dS, dK and dV of 64 of the tile's 128 keys."""
    BM: gl.constexpr = s.q.type.shape[1]
    D: gl.constexpr = s.q.type.shape[2]
    BN: gl.constexpr = 128
    dtype: gl.constexpr = s.q.dtype
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    boxed: gl.constexpr = p.k.layout
    step = 0
    done = 0
    t = gl.program_id(0)
    while t < p.num_tiles:
        b, kv_head, n = tile(p, t, BN)
        dk = gl.zeros([64, D], gl.float32, sums)
        dv = gl.zeros([64, D], gl.float32, sums)
        for g in range(p.GROUP):
            h = kv_head * p.GROUP + g
            first, masked, count = span(p, b, h, n, BM, BN)
            skipped = 0
            if WHICH == 1:
                skipped = num_skipped(p, first, masked, n, 64, BM, BN)
                for _ in range(skipped):
                    _skip(s, step, WHICH)
                    step += 1
            # Loaded one step ahead, to hide the latency of the list.
            m = query_tile(p, first, skipped)
            for j in range(skipped, masked):
                next_m = query_tile(p, first, gl.minimum(j + 1, masked - 1))
                dk, dv = _step(p, s, dk, dv, step, m, b, h, n, WHICH, True)
                m = next_m
                step += 1
            for _ in range(masked, count):
                dk, dv = _step(p, s, dk, dv, step, 0, b, h, n, WHICH, False)
                step += 1
        mbarrier.arrive(s.k_empty.index(0))
        # No other warpgroup reads this half of V: dv and dk are stored through it. Rows past the end are not stored.
        way_out = s.v.index(WHICH)
        boxed_out = way_out._reinterpret(dtype, [1, 64, 1, D], boxed)
        way_out.store(dv.to(dtype))
        fence_async_shared()
        warpgroup_barrier()
        tma_store(p.dv, [b, n * BN + WHICH * 64, kv_head, 0], boxed_out)
        tma.store_wait(0)
        warpgroup_barrier()
        way_out.store((dk * p.scale).to(dtype))
        fence_async_shared()
        warpgroup_barrier()
        tma_store(p.dk, [b, n * BN + WHICH * 64, kv_head, 0], boxed_out)
        tma.store_wait(0)
        warpgroup_barrier()
        mbarrier.arrive(s.v_empty.index(0))
        t = next_tile(p, s, done)
        done += 1


@gluon.jit
def _query_gradient(p, s):
    """The warpgroup of dQ = dS^T K, computed in two halves (of head_dim, or of the rows) to use few registers."""
    DS_STAGES: gl.constexpr = s.ds.type.shape[0] // 2
    BM: gl.constexpr = s.q.type.shape[1]
    D: gl.constexpr = s.q.type.shape[2]
    BN: gl.constexpr = 128
    num_m = gl.cdiv(p.seq_q, BM)
    step = 0
    done = 0
    t = gl.program_id(0)
    while t < p.num_tiles:
        b, kv_head, n = tile(p, t, BN)
        for g in range(p.GROUP):
            h = kv_head * p.GROUP + g
            first, _masked, count = span(p, b, h, n, BM, BN)
            rows = (b * p.num_kv_heads * p.GROUP + h) * num_m
            for j in range(count):
                row = (rows + query_tile(p, first, j)) * BM
                at = step % DS_STAGES
                mbarrier.wait(s.ds_full.index(at), (step // DS_STAGES) & 1)
                for part in gl.static_range(2):
                    dq = _dq_half(s, at, part, D)
                    tma.store_wait(1)
                    dq = warpgroup_mma_wait(0, deps=[dq])
                    if part == 1:
                        mbarrier.arrive(s.ds_empty.index(at))
                    _add_dq(p, s, dq, row, part, D)
                step += 1
        mbarrier.arrive(s.k_empty.index(0))
        t = next_tile(p, s, done)
        done += 1
    tma.store_wait(0)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


_PLAIN = ["list_b", "list_h", "k_data_b", "k_data_h"]
_PLAIN += ["scale", "num_tiles", "num_kv_heads", "seq_q", "seq_k"]
"""Arguments that Triton must not specialize: an argument 1 compiled in as a constant could not be a field of Problem."""


@gluon.jit(do_not_specialize=_PLAIN)
def flash_backward(
    q, k, v, d_out, stats, dq, dk, dv,
    q_count, q_index, q_partial, q_order, list_b, list_h,
    k_data, k_data_b, k_data_h,
    counter, scale, num_tiles, num_kv_heads, seq_q, seq_k,
    GROUP: gl.constexpr, MASK: gl.constexpr, RULE: gl.constexpr, QUERIES: gl.constexpr, PARAMS: gl.constexpr,
    HAS_DATA: gl.constexpr, SOFTCAP: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    DS_STAGES: gl.constexpr, SOFTMAX_REGS: gl.constexpr, DQ_REGS: gl.constexpr, DYNAMIC: gl.constexpr,
):  # fmt: skip
    """dk, dv [B, Sk, KV, D] and dq, the sum [B * H * tiles of queries * BM, D] in float32, which must be 0 at the start.

    `prepare` fills stats, q_order and counter. Grid: num_tiles programs of 4 warps and 9 specialized ones, or fewer if
    DYNAMIC: then each program fetches the next tile when it has finished one.
    """
    dtype: gl.constexpr = q.dtype
    tiled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    lists: gl.constexpr = stats.layout
    s = Shared(
        gl.allocate_shared_memory(dtype, [2, 64, D], tiled),
        gl.allocate_shared_memory(dtype, [2, 64, D], tiled),
        gl.allocate_shared_memory(dtype, [STAGES, BM, D], tiled),
        gl.allocate_shared_memory(dtype, [STAGES, BM, D], tiled),
        gl.allocate_shared_memory(gl.float32, [STAGES, BM], lists),
        gl.allocate_shared_memory(gl.float32, [STAGES, BM], lists),
        gl.allocate_shared_memory(gl.float32, [STAGES if HAS_DATA[0] else 1, BM], lists),
        gl.allocate_shared_memory(dtype, [2 * DS_STAGES, 64, BM], tiled),
        gl.allocate_shared_memory(gl.float32, [2, 64, 64], dq.layout),
        gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        _barriers(1, 3),
        _barriers(1, 2),
        (_barriers(STAGES, 1), _barriers(STAGES, 2)),
        (_barriers(STAGES, 1), _barriers(STAGES, 2)),
        (_barriers(DS_STAGES, 2), _barriers(DS_STAGES, 1)),
        (_barriers(2, 1), _barriers(2, 3)),
    )
    p = Problem(
        q, k, v, d_out, stats, dq, dk, dv, q_count, q_index, q_partial, q_order, list_b, list_h,
        k_data, k_data_b, k_data_h,
        counter, scale, num_tiles, num_kv_heads, seq_q, seq_k, GROUP, MASK, RULE, QUERIES, PARAMS, HAS_DATA, SOFTCAP,
        DYNAMIC,
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [(_softmax, (p, s, 0)), (_softmax, (p, s, 1)), (_query_gradient, (p, s)), (_load, (p, s))],
        [4, 4, 1],
        [SOFTMAX_REGS, DQ_REGS, 24],
    )
