"""Linears and a training step in fp8 against bf16 on one GPU, with the casts' kernels checked against their reference.

    python -m benchmarks.train_fp8                      # all three parts: kernels, linears of Llama-3 8B, steps
    python -m benchmarks.train_fp8 --parts kernels      # or some of them; this one checks all kernels and has the table of blocks
    python -m benchmarks.train_fp8 --layers 8 --compile # a step of so many layers of Llama-3 8B, layers compiled

Random numbers and tokens; needs one GPU of compute capability 8.9 or later. With the defaults under 150 s on an H100.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import itertools

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels import fp8_blocks
from benchmarks.train import SHAPES, random_batch
from hone.cost.catalogue.read import catalogue
from hone.cost.train.figures import growth_bytes
from hone.cost.train.training import Training
from hone.model.decoder import build
from hone.ops.fp8 import api, factors, reference, triton_kernels
from hone.ops.fp8.recipes import RECIPES
from hone.train.loop import Trainer
from hone.train.optimizers.adamw import AdamW
from hone.train.precision import FP8_RECIPES
from hone.train.schedules.cosine import Cosine

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LINEARS = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""(output, input) features of a layer of Llama-3 8B."""
VOCAB = 32768
"""Tokens of the cut model: the head of 128,256 would be most of a step of few layers."""


def say(text: str) -> None:
    print(text, flush=True)


def peaks() -> tuple[float, float, float]:
    """(bf16 FLOP/s, fp8 FLOP/s, bytes/s) of this GPU's data sheet."""
    name = torch.cuda.get_device_name()
    row = catalogue().of_processor(name)
    if row is None or row.bytes_per_s is None:
        raise SystemExit(f"{name} is not in hone/cost/catalogue/accelerators.json")
    return row.flops_per_s["bfloat16"], row.flops_per_s["float8"], row.bytes_per_s


def seconds(work: Callable[[], Any], *, budget_s: float = 0.12) -> float:
    """Median seconds of a call by CUDA events, of calls that do not wait for the host."""
    work()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    torch.cuda.synchronize()
    count = max(5, min(60, int(budget_s / max(time.perf_counter() - begun, 1e-5))))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda._sleep(2_000_000)  # the host gets ahead
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(one.elapsed_time(other) for one, other in itertools.pairwise(marks)) / 1e3


# Kernels against their reference.


def uneven(rows: int, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers whose rows and columns differ in size, with a row and a column of zeros."""
    draw = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, columns, generator=draw, device="cuda")
    x *= torch.exp2(torch.randint(-10, 10, (rows, 1), generator=draw, device="cuda").float())
    x *= torch.exp2(torch.randint(-5, 5, (1, columns), generator=draw, device="cuda").float())
    x[rows // 2], x[:, columns // 3] = 0, 0
    return (x * 2.0**-8 if dtype == torch.float16 else x).to(dtype)  # finite: codes of infinities may differ


def even(rows: int, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of one size, as a layer's are about."""
    draw = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, columns, generator=draw, device="cuda").to(dtype)


def same_codes(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def check_kernels() -> None:
    """Codes and scales of the kernels are the reference's, bit for bit; products agree with float64."""
    failed = 0
    for rows, columns in ((16, 16), (144, 4112), (1024, 4096), (8192, 1040), (4096, 14336)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32)[: 1 if rows * columns > 1 << 24 else 3]:
            x = uneven(rows, columns, dtype, rows + columns)
            for tensorwise in (False, True):
                found = triton_kernels.maxima(x, tensorwise)
                wanted = reference.maxima(x.cpu(), tensorwise)
                fine = all(torch.equal(one.cpu(), other) for one, other in zip(found, wanted, strict=True))
                for code in (E4M3, E5M2):
                    made = triton_kernels.cast(x, found, code, tensorwise, rows=True, columns=True)
                    for turned in (False, True):
                        exact, scales = reference.codes_of(x.cpu(), wanted[turned], code, columns=turned)
                        fine &= same_codes(made[2 * turned].cpu(), exact)
                        fine &= torch.equal(made[2 * turned + 1].cpu(), scales)
                failed += not fine
                if not fine:
                    say(f"DIFFERENT: {rows} x {columns} {dtype} tensorwise {tensorwise}")
    torch.full((1 << 24,), 7, dtype=torch.uint8, device="cuda")  # freed: what the next outputs leave unwritten is seen
    x = uneven(1024, 4096, torch.bfloat16, 1)
    one, other = (factors.weight_codes(x, "rowwise") for _ in range(2))
    failed += not all(same_codes(a, b) if a.element_size() == 1 else torch.equal(a, b) for a, b in zip(one, other))
    for recipe in RECIPES:
        x, weight = uneven(1024, 1536, torch.bfloat16, 2), uneven(2048, 1536, torch.bfloat16, 3)
        bias, up = torch.randn(2048, device="cuda").bfloat16(), uneven(1024, 2048, torch.bfloat16, 4)
        leaves = [one.detach().clone().requires_grad_() for one in (x, weight, bias)]
        y = api.fp8_trained_linear(*leaves, recipe=recipe)
        y.backward(up)
        on_cpu = [one.detach().cpu().requires_grad_() for one in (x, weight, bias)]
        exact = api.fp8_trained_linear(*on_cpu, recipe=recipe)
        exact.backward(up.cpu())
        pairs = {"y": (y, exact)} | {n: (a.grad, b.grad) for n, a, b in zip(("dx", "dW", "db"), leaves, on_cpu)}
        errors = {}
        for name, (found, wanted) in pairs.items():
            wide = wanted.detach().double()
            errors[name] = ((found.detach().cpu().double() - wide).norm() / wide.norm()).item()
        failed += max(errors.values()) > 1e-2
        say(f"  {recipe:<20} GPU against the CPU's definition: " + ", ".join(f"{n} {e:.1e}" for n, e in errors.items()))
        graph = torch.compile(partial(api.fp8_trained_linear, recipe=recipe), backend="aot_eager")
        failed += not torch.equal(graph(*leaves), y)
    failed += fp8_blocks.check(say, uneven)
    say(f"kernels: {'ALL THE SAME BITS AS THE REFERENCE' if not failed else f'{failed} FAILED'}")
    fp8_blocks.table(say, seconds, peaks(), even)
    if failed:
        raise RuntimeError(f"{failed} checks of kernels failed")


# Linears.


def time_linears(rows: int) -> None:
    """Each linear of a layer: products, casts and whole passes, beside bf16."""
    bf16_peak, fp8_peak, bandwidth = peaks()
    totals: dict[str, float] = {}
    say(
        f"linears, M = {rows}; shares of the peaks {bf16_peak / 1e12:.0f} (bf16), {fp8_peak / 1e12:.0f} TFLOP/s (fp8), "
        f"{bandwidth / 1e12:.2f} TB/s"
    )
    for name, (out, inner) in LINEARS.items():
        flops = 2.0 * rows * out * inner
        x = torch.randn(rows, inner, device="cuda").bfloat16()
        weight = (torch.randn(out, inner, device="cuda") / inner**0.5).bfloat16()
        up = torch.randn(rows, out, device="cuda").bfloat16()
        say(f" {name} [{out} x {inner}]")
        plain = [seconds(partial(torch.mm, *two)) for two in ((x, weight.t()), (up, weight), (up.t(), x))]
        say("  bf16 products          " + told(plain, flops, bf16_peak))
        for tensorwise in (False, True):
            how = RECIPES["tensorwise" if tensorwise else "rowwise"]
            largest = [factors.maxima(one, how) for one in (x, up, weight)]
            both = [
                factors.cast(one, how, E4M3, found, rows=True, columns=True)
                for one, found in zip((x, up, weight), largest, strict=True)
            ]
            (xr, xs, xc, xcs), (ur, us, uc, ucs), (wr, ws, wc, wcs) = both
            triples = ((xr, xs, wr, ws), (ur, us, wc, wcs), (uc, ucs, xc, xcs))
            for fast in (True, False):
                one_way = how._replace(fast=(fast, fast, fast))
                took = [seconds(partial(factors.product, *a, None, torch.bfloat16, one_way, 0)) for a in triples]
                said = f"{'tensorwise' if tensorwise else 'rowwise'}{', fast' if fast else ''}"
                say(f"  fp8 {said:<18} " + told(took, flops, fp8_peak))
            if not tensorwise:
                scaled_mm(triples[0], flops, fp8_peak)
            for label, given, found in (("x", x, largest[0]), ("dy", up, largest[1]), ("W", weight, largest[2])):
                first = seconds(partial(factors.maxima, given, how))
                second = seconds(partial(factors.cast, given, how, E4M3, found, rows=True, columns=True))
                size = given.numel()
                say(
                    f"  casts of {label:<3} {'tensorwise' if tensorwise else 'rowwise':<11} maxima {first * 1e6:6.1f} us "
                    f"({2 * size / first / bandwidth:.0%} of the bandwidth), codes {second * 1e6:6.1f} us "
                    f"({4 * size / second / bandwidth:.0%})"
                )
        whole(name, x, weight, up, flops, bf16_peak, totals)
    first = totals["bf16"]
    for name, took in totals.items():
        say(f" a layer's linears, forward + backward, {name:<26} {took * 1e3:7.3f} ms  {first / took:.2f} x bf16")


def told(took: list[float], flops: float, peak: float) -> str:
    return "  ".join(
        f"{name} {one * 1e6:7.1f} us {flops / one / 1e12:6.0f} TF {flops / one / peak:4.0%}"
        for name, one in zip(("y", "dx", "dW"), took, strict=True)
    )


def scaled_mm(given: tuple[Tensor, ...], flops: float, peak: float) -> None:
    """torch's public form of the same product, where this torch has it."""
    public = getattr(torch.nn.functional, "scaled_mm", None)
    if public is None:
        return
    from torch.nn.functional import ScalingType

    a, a_scales, b, b_scales = given
    row, dtype = ScalingType.RowWise, torch.bfloat16
    try:
        took = seconds(
            lambda: public(
                a, b.t(), scale_a=a_scales[:, None], scale_recipe_a=row, scale_b=b_scales[None, :], scale_recipe_b=row,
                output_dtype=dtype, use_fast_accum=True,
            )
        )  # fmt: skip
        say(f"  F.scaled_mm, rowwise, fast: y {took * 1e6:7.1f} us {flops / took / peak:4.0%}")
    except Exception as error:  # its interface is young: a refusal is a result
        say(f"  F.scaled_mm: {type(error).__name__}: {str(error).splitlines()[0][:150]}")


def whole(
    name: str, x: Tensor, weight: Tensor, up: Tensor, flops: float, peak: float, totals: dict[str, float]
) -> None:
    """Forward and backward of the whole linear, with all casts."""
    x, weight = x.requires_grad_(), weight.requires_grad_()

    def passes(call: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            x.grad = weight.grad = None
            call().backward(up)

        return run

    ways: dict[str, Callable[[], Tensor]] = {"bf16": lambda: torch.nn.functional.linear(x, weight)}
    for recipe in RECIPES:
        ways[recipe] = lambda r=recipe: api.fp8_trained_linear(x, weight, recipe=r)
        codes = factors.weight_codes(weight, recipe)
        ways[f"{recipe}, held weights"] = lambda r=recipe, c=codes: api.fp8_trained_linear(x, weight, recipe=r, held=c)
    calls = {way: passes(call) for way, call in ways.items()}
    took: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(2):  # in turn
        for way, call in calls.items():
            took[way].append(seconds(call))
    for way, each in took.items():
        best = min(each)
        totals[way] = totals.get(way, 0.0) + best
        say(
            f"  whole {way:<34} {best * 1e6:8.1f} us  {3 * flops / best / peak:4.0%} of the bf16 peak  "
            f"{min(took['bf16']) / best:.2f} x bf16"
        )


# A training step.


def time_steps(layers: int, rows: int, seq_len: int, *, accumulation: int, compiled: bool, repeats: int) -> None:
    """Steps of a Llama-3 8B cut to `layers`, in each precision in turn: one trainer at a time, each twice (ABAB)."""
    bf16_peak, *_ = peaks()
    shape = SHAPES["llama3-8b"][0].model_copy(update={"num_layers": layers})
    batch = random_batch(np.random.default_rng(0), VOCAB, rows * accumulation, seq_len)
    took: dict[str, list[float]] = {}
    peak: dict[str, int] = {}
    losses: dict[str, float] = {}
    config = shape.config(VOCAB)
    flops = 3 * config.flops_per_token(seq_len)
    tokens = rows * accumulation * seq_len
    say(
        f"steps: {layers} layers of Llama-3 8B, {config.num_params / 1e9:.2f} B weights, {accumulation} x {rows} x {seq_len}, "
        f"compile {compiled}"
    )
    for turn in range(2):
        for precision in ("bf16", *FP8_RECIPES):
            torch.cuda.reset_peak_memory_stats()
            trainer = Trainer(
                build(config, device="cuda", seed=0), steps=10**6, schedule=Cosine(warmup=0, floor=1.0),
                optimizer=AdamW(lr=1e-4), precision=precision, gradient_accumulation_steps=accumulation,
                compile=compiled,
            )  # fmt: skip
            for _ in range(2):
                trainer.step(batch)
            torch.cuda.reset_peak_memory_stats()
            for _ in range(repeats):
                torch.cuda.synchronize()
                begun = time.perf_counter()
                losses[precision] = trainer.step(batch).loss
                torch.cuda.synchronize()
                took.setdefault(precision, []).append(time.perf_counter() - begun)
            peak[precision] = max(peak.get(precision, 0), torch.cuda.max_memory_allocated())
            del trainer
            gc.collect()
            torch.cuda.empty_cache()
            torch._dynamo.reset()
            own = statistics.median(took[precision][-repeats:])
            say(f"  turn {turn + 1} {precision:<24} {tokens / own:9,.0f} tokens/s  loss {losses[precision]:.4f}")
    plain = statistics.median(took["bf16"])
    for precision, each in took.items():
        own = statistics.median(each)
        guess = predicted(config, precision, rows * accumulation, seq_len, accumulation)
        say(
            f" {precision:<24} {own * 1e3:8.1f} ms (+-{(max(each) - min(each)) / 2 * 1e3:.1f}) {tokens / own:9,.0f} tokens/s  "
            f"{plain / own:.3f} x bf16  MFU {flops * tokens / own / bf16_peak:.1%} of the bf16 peak  "
            f"peak memory {peak[precision] / 2**30:.2f} GiB (predicted {guess / 2**30:.2f})"
        )


def predicted(config: Any, precision: str, batch: int, seq_len: int, accumulation: int) -> float:
    """The peak that a plan predicts, with the model there."""
    from hone.cost.activations.segments import keep_all
    from hone.cost.train.update import adamw
    from hone.train.fp8.fits import fp8_products

    dims = config.dims()
    work = Training(
        model=dims, steps=1, batch_size=batch, seq_len=seq_len, dtype="bfloat16", segments=keep_all(dims.num_layers),
        update=adamw(dims), gradient_accumulation_steps=accumulation, packed=False, fp8=fp8_products(precision),
        fp8_recipe=FP8_RECIPES.get(precision, ""),
    )  # fmt: skip
    return growth_bytes(work, "cuda").value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--parts", nargs="+", default=["kernels", "linears", "steps"], choices=["kernels", "linears", "steps"]
    )
    parser.add_argument("--rows", type=int, default=8192, help="tokens of a pass of the linears")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=1, help="of a micro-batch")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    begun, failed = time.perf_counter(), 0
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    parts: dict[str, Callable[[], None]] = {
        "kernels": check_kernels,
        "linears": lambda: time_linears(given.rows),
        "steps": lambda: time_steps(
            given.layers, given.sequences, given.seq_len,
            accumulation=given.accumulation, compiled=given.compile, repeats=given.repeats,
        ),
    }  # fmt: skip
    for name in given.parts:
        try:
            parts[name]()
        except Exception:  # the other parts are worth their minutes on a rented GPU
            failed += 1
            traceback.print_exc()
            sys.stderr.flush()
        gc.collect()
        torch.cuda.empty_cache()
        say(f"{name}: {time.perf_counter() - begun:.0f} s so far")
    return failed


if __name__ == "__main__":
    sys.exit(main())
