"""Seconds of a serving run: its steps as scheduled by the engine, and the time of each on the device and in Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from hone.base.figure import Estimate
from hone.cost.dims import ModelDims
from hone.cost.memory import BYTES
from hone.cost.ranks import Split
from hone.cost.roofline import attention_seconds, copy_rate, linear_seconds, seconds
from hone.cost.serve.adapters import AdapterWork
from hone.cost.serve.captured import most_mixed, padded_tokens
from hone.cost.serve.decode import decode_step_seconds, decode_step_starts
from hone.cost.serve.offload import ExpertCopies, Offload
from hone.cost.serve.schedule import Batching, StepKind, Traffic, schedule
from hone.cost.steps import FP8_BLOCK_GAIN, FP8_GAIN, Product, forward_seconds, product_seconds, traffic_seconds
from hone.measure.machine import Machine

# On a CPU, in starts of an operation (2.7 us on the machine where they were measured: a model 32 wide, so that only Python
# and starts were left; 2 and 6 layers, 1 to 32 sequences).
STEP_OPS = 65
"""Scheduling, the step's arrays, and the choice of tokens."""
LAYER_OPS = 40
"""Modules, pages and masks of a layer, beside the operation starts of a forward pass."""
GROUP_OPS = 45
"""The same for each further group of sequences in a layer's attention: prompts beside decoding ones."""
SEQ_OPS = 20
"""One sequence of a step: its sampling, its text, its pages."""

COMPILED_OPS = 12
"""Starts of a compiled decode step: embedding, the call, head."""
COMPILED_ROWS = 24
"""Rows by which a compiled product's time grows by that of reading its weight: 8 rows take 1.3, 32 rows 2.3 times one row's."""
PACKED_RATE = 0.8
"""Of the rate at which weights of 16 bits are read, codes of 4 and 8 bits are read at this one."""
MOST_COMPILED = 32
"""Sequences up to which decode steps on a CPU are one compiled call."""

# Where a GPU's kernels read pages in place (benchmarks/ledger/serve.jsonl, Llama-3-8B's shape, one H200).
REPLAY_STEP_S = 3e-4
"""What a step takes beside the work of its kernels: Python that the device waits for, gaps."""
REPLAY_SEQ_S = 5e-6
"""The same for a sequence. Results are read while the next step runs; with both, steps of 1 to 480 sequences of two models
are within 15 % of what the load "throughput" of benchmarks/serve_load.py took."""
LAUNCHED_PER_LAYER = 160
"""Time of a layer in operation starts when Python launches its kernels one by one: 31 to 34 ms per step of 32 layers were
measured where a start takes about 5 us, 17 ms of 16 layers where it takes 7.5 us."""

_MANY_ROWS = 8192
"""Rows at which products of codes are compared with those of a dtype: both are bound by arithmetic."""

CODED_ROWS = 64
"""Rows from which products of 8-bit codes are bound by arithmetic, as those of 16 bits are; with fewer, reading weights decides."""

SHARING_SEQS = 8
"""Fewest sequences whose shared pages are read once."""

MOST_CAPTURED = 512
"""Sequences up to which decode steps are captured as CUDA graphs: with more, kernels take longer than their launches."""


@dataclass(frozen=True)
class Serving:
    """A model on a machine, with the engine's settings."""

    dims: ModelDims
    machine: Machine
    dtype: str
    threads: int = 1
    """CPU threads of a step; the calibrated rates are of `calibration.threads`."""
    in_place: bool = False
    """Whether a GPU's kernels read pages in place."""
    captured: bool = True
    """Whether decode steps of a GPU are replayed as CUDA graphs (False with a draft model)."""
    read_bytes: float | None = None
    """Bytes of weights read by a step when they are smaller than in `dtype`."""
    compiled: bool = False
    """Whether decode steps on a CPU are one compiled call."""

    split: Split = field(default_factory=Split)
    """How many ranks share the model; `dims` and `read_bytes` are then one rank's."""
    vocab_size: int = 0
    """With several ranks: tokens of the whole vocabulary."""
    cache_width: float | None = None
    """Bytes of a cached number, its part of a scale included; None: those of `dtype`."""
    codes: str = ""
    """How a GPU multiplies weights of 8 bits by inputs of 8 bits, as `forward_seconds` takes it; "": it does not."""
    offload: Offload | ExpertCopies | None = None
    """Layers whose weights every step copies from host memory."""
    adapters: AdapterWork | None = None
    """LoRA adapters that the sequences have."""

    @property
    def cached_width(self) -> float:
        return BYTES[self.dtype] if self.cache_width is None else self.cache_width

    def step_seconds(self, step: StepKind, *, again: bool = False) -> Estimate:
        """Seconds of one step of that kind, the copies of streamed layers included.

        `again`: a step of as many tokens came before, so that one with prompts has a graph, too, where launches cost it time.
        """
        computed = self.computed_seconds(step, again=again)
        return computed if self.offload is None else self.offload.beside(computed, self.machine, step.num_tokens)

    def computed_seconds(self, step: StepKind, *, again: bool = False) -> Estimate:
        """Seconds in which a step of that kind computes; `again` as in `step_seconds`.

        Pipeline stages work on as many parts of the decoding sequences in turn; chunks of prompts follow one another.
        """
        stages = self.split.stages
        if stages > 1 and step.decoding:
            step = step._replace(decoding=-(-step.decoding // stages), samples=-(-step.samples // stages))
        if self.in_place:
            alone = self._on_gpu(step, again=again)
        elif self.compiled and not step.chunks and step.decoding <= MOST_COMPILED and not self._adapted:
            alone = self._compiled(step)
        else:
            alone = self._gathered(step)
        if self.adapters is not None and self._adapted:
            seqs = step.decoding + len(step.chunks)
            added = self.adapters.step_seconds(self.machine, self.dtype, seqs, captured=self.in_place)
            formula = f"{alone.formula} + {added.formula}"
            alone = alone.model_copy(update={"value": alone.value + added.value, "formula": formula})
        if self.split.tensor * stages == 1:
            return alone
        more = self.split.step(self.dims, step.num_tokens, step.samples, self.vocab_size, self.dtype)
        times = stages if not step.chunks else 1
        formula = f"{times} x ({alone.formula} + {more.formula})" if times > 1 else f"{alone.formula} + {more.formula}"
        return Estimate(value=times * (alone.value + more.value), unit="s", formula=formula, bound=alone.bound)

    @property
    def _adapted(self) -> bool:
        return self.adapters is not None and self.adapters.distinct > 0

    @property
    def launched_s(self) -> float:
        """Seconds of launching a step's kernels one by one from Python, which overlap the GPU's work."""
        return seconds(self.machine, num_ops=LAUNCHED_PER_LAYER * self.dims.num_layers, dtype=self.dtype).value

    @cached_property
    def coded_gain(self) -> float:
        """How many times as fast as in `dtype` the products of layers with many rows are as codes: as calibrated, else assumed."""
        shapes = [(_MANY_ROWS, *matmul) for layer in self.dims.layers for matmul in layer.matmuls]
        if not self.codes or not shapes:
            return 1.0
        took = [linear_seconds(self.machine, shape, self.codes, held=True, trained=False) for shape in shapes]
        known = [one for one in took if one is not None]
        if len(known) < len(took):
            return FP8_BLOCK_GAIN if self.codes == "blockwise" else FP8_GAIN
        return product_seconds(self.machine, [(shape, "forward") for shape in shapes], self.dtype) / sum(known)

    def _on_gpu(self, step: StepKind, *, again: bool) -> Estimate:
        if step.chunks:
            captured = again and step.num_tokens <= most_mixed(self.dims.num_layers, max(self.dims.matmul_params, 1))
        else:
            captured = step.decoding <= MOST_CAPTURED
        captured = captured and self.captured
        work = self._mixed(step, captured) if step.chunks else self._decoding(step, captured)
        device_s = work.value if captured else max(work.value, self.launched_s)
        host_s = REPLAY_STEP_S + REPLAY_SEQ_S * (step.decoding + len(step.chunks))
        formula = f"device {device_s * 1e3:.2f} ms + around it {host_s * 1e3:.2f} ms"
        return Estimate(value=device_s + host_s, unit="s", formula=formula, bound=work.bound)

    def _decoding(self, step: StepKind, captured: bool) -> Estimate:
        """Seconds of a GPU where every sequence has one new token."""
        return decode_step_seconds(
            self.dims,
            self.machine,
            num_seqs=step.decoding,
            context=int(step.context),
            dtype=self.dtype,
            weights_bytes=self.read_bytes,
            cache_width=self.cache_width,
            in_place=True,
            captured=captured,
            coded_gain=self.coded_gain if step.decoding > CODED_ROWS else 1.0,
            shared=step.shared if captured and self._reads_once(step) else 0,
        )

    def _reads_once(self, step: StepKind) -> bool:
        """Whether the kernels read shared pages once for all sequences (`hone.serve.device.graphs`, `hone.serve.paging.sharing`)."""
        left_out = 2 * (step.decoding - 1) * step.shared
        return step.decoding >= SHARING_SEQS and left_out >= step.decoding * step.context

    def _mixed(self, step: StepKind, captured: bool) -> Estimate:
        """Seconds of a GPU where prompts' chunks and decoding sequences share one pass, which reads each weight once.

        A captured pass computes the padded tokens of its graph.
        """
        tokens = padded_tokens(step.num_tokens) if captured else step.num_tokens
        whole = forward_seconds(
            self.dims,
            self.machine,
            tokens=tokens,
            seq_len=1,
            dtype=self.dtype,
            logit_tokens=max(step.samples, 1),
            launched=not captured,
            fused=True,
            codes=self.codes if step.num_tokens > CODED_ROWS else "",
        )
        # The products of experts' tokens are counted for one token's experts; together they visit more.
        read = BYTES[self.dtype] * self.dims.read_params(step.num_tokens)
        least = seconds(self.machine, num_bytes=read, op_bytes=read, dtype=self.dtype).value
        whole = whole.model_copy(update={"value": max(whole.value, least)})
        cached = self.cached_width * step.decoding * self.dims.state_values(int(step.context))
        pages = seconds(self.machine, num_bytes=cached, op_bytes=max(cached, 1.0), dtype=self.dtype).value
        return whole.model_copy(update={"value": whole.value + self._attention(step) + pages})

    def _compiled(self, step: StepKind) -> Estimate:
        """Seconds of a decode step that is one call on a CPU: weights and pages once, and Python around it."""
        dims, machine, dtype = self.dims, self.machine, self.dtype
        embedding = 0 if dims.tie_embeddings else dims.vocab_size * dims.hidden_size
        dense = BYTES[dtype] * float(dims.num_params - embedding)
        read = dense if self.read_bytes is None else self.read_bytes / PACKED_RATE
        host = STEP_OPS + COMPILED_OPS + SEQ_OPS * step.decoding
        weights_s = seconds(machine, num_bytes=read, op_bytes=max(read, 1.0), dtype=dtype).value
        weights_s *= 1 + (step.decoding - 1) / COMPILED_ROWS
        cached = BYTES[dtype] * self._cached_values(step)
        pages_s = seconds(machine, num_bytes=cached, op_bytes=max(cached, 1.0), dtype=dtype).value
        started_s = seconds(machine, num_ops=host, dtype=dtype).value
        calibration = machine.calibration
        shared = 1.0 if calibration is None else max(calibration.threads / self.threads, 1.0)
        return Estimate(
            value=(weights_s + pages_s) * shared + started_s,
            unit="s",
            formula=f"weights {weights_s * shared * 1e3:.2f} ms + pages {pages_s * shared * 1e3:.2f} ms + {host} starts",
            bound=calibration is None or dtype not in calibration.dtypes,
        )

    def _gathered(self, step: StepKind) -> Estimate:
        """Seconds of a step that gathers pages before attention and starts every operation from Python, one after another."""
        dims, machine, dtype = self.dims, self.machine, self.dtype
        tokens, width = step.num_tokens, max(self.cached_width, BYTES[dtype])  # gathered pages are in `dtype`
        products: list[Product] = [((tokens, *matmul), "forward") for layer in dims.layers for matmul in layer.matmuls]
        products.append(((step.samples, dims.vocab_size, dims.hidden_size), "forward"))
        weights_s = seconds(machine, num_bytes=self.read_bytes, dtype=dtype).value if self.read_bytes else 0.0
        groups = bool(step.decoding) + bool(step.chunks)
        parts = {
            "matmuls": max(product_seconds(machine, products, dtype), weights_s),
            "pages": gather_seconds(machine, width * self._cached_values(step)),
            "attention": self._attention(step),
            "element-wise": traffic_seconds(machine, dims, tokens, dtype, backward=False),
        }
        starts = decode_step_starts(dims) + GROUP_OPS * max(groups - 1, 0) * dims.num_layers
        host = STEP_OPS + LAYER_OPS * dims.num_layers + SEQ_OPS * (step.decoding + len(step.chunks))
        calibration = machine.calibration
        bound = calibration is None or dtype not in calibration.dtypes
        shared = 1.0 if calibration is None else max(calibration.threads / self.threads, 1.0)
        started_s = seconds(machine, num_ops=starts + host, dtype=dtype).value
        mapped_s = mapping_seconds(machine, width * self._cached_values(step) / max(dims.num_layers, 1))
        value = sum(parts.values()) * shared + mapped_s + started_s
        formula = " + ".join(f"{name} {part * shared * 1e3:.2f} ms" for name, part in parts.items())
        return Estimate(
            value=value,
            unit="s",
            formula=f"{formula} + new memory {mapped_s * 1e3:.2f} ms + {starts + host:,.0f} starts {started_s * 1e3:.2f} ms",
            bound=bound,
        )

    def _cached_values(self, step: StepKind) -> float:
        """Numbers that the step's sequences read from pages."""
        decoding = step.decoding * self.dims.state_values(int(step.context))
        return decoding + sum(self.dims.state_values(before + count) for before, count in step.chunks)

    def _attention(self, step: StepKind) -> float:
        """Seconds of the chunks' attention (of decoding sequences: the time of their pages). Later chunks compute all slots."""
        flops = 0.0
        for before, count in step.chunks:
            end = before + count
            visible = count * (before + (count + 1) / 2)
            done = count * end if before else visible
            for layer in self.dims.layers:
                inside = layer.mixing.mixing_flops(end) * end - (
                    layer.mixing.mixing_flops(before) * before if before else 0
                )
                flops += inside * done / visible
        return attention_seconds(self.machine, flops, self.dtype)


def gather_seconds(machine: Machine, num_bytes: float) -> float:
    """Seconds of attention over gathered pages: they are read and written, and the copy is read.

    Between two uses of a layer's pages those of all layers are used, so they stay in a cache only if all fit.
    """
    return seconds(machine, num_bytes=3.0 * num_bytes, op_bytes=3.0 * num_bytes).value


_MAPPED_BYTES = 1 << 20
"""Size from which the memory of a tensor is mapped anew when it is made, and given back when it is gone."""


def mapping_seconds(machine: Machine, num_bytes: float) -> float:
    """What writing `num_bytes` of keys and values into new tensors takes more than into known memory: once per step, since
    its layers share them. 0 where that is not calibrated."""
    calibration = machine.calibration
    if calibration is None or not calibration.gathers or num_bytes / 2 < _MAPPED_BYTES:
        return 0.0
    new, known = calibration.gathers[-1].bytes_per_s, copy_rate(calibration, 2.0 * num_bytes)
    return max(2.0 * num_bytes / new - 2.0 * num_bytes / known, 0.0)


def serving_seconds(serving: Serving, traffic: Traffic, batching: Batching) -> Estimate:
    """The whole run, from the first request to the last token."""
    total, counts, bound = 0.0, {"decode": 0, "mixed": 0}, False
    spent = {"decode": 0.0, "mixed": 0.0}
    known: dict[tuple[StepKind, bool], Estimate] = {}
    sizes: set[int] = set()  # of graphs with prompts, which are captured when they come a second time
    for step in schedule(traffic, batching):
        kind, size = step._replace(repeats=1, context=round(step.context)), padded_tokens(step.num_tokens)
        again = bool(step.chunks) and (traffic.repeated or size in sizes)
        if (kind, again) not in known:
            known[kind, again] = serving.step_seconds(kind, again=again)
        took = known[kind, again]
        name = "mixed" if step.chunks else "decode"
        sizes |= {size} if step.chunks else set()
        spent[name] += step.repeats * took.value
        counts[name] += step.repeats
        total, bound = total + step.repeats * took.value, bound or took.bound
    each = " + ".join(
        f"{counts[name]} {name} steps x {1e3 * spent[name] / counts[name]:.2f} ms" for name in counts if counts[name]
    )
    return Estimate(value=total, unit="s", formula=each, bound=bound)


def touched_pages(traffic: Traffic, batching: Batching) -> int:
    """Number of pages that the run uses: all full ones with a prefix cache (shared ones once), else those used at one time.

    Static batches compute a shared prefix in each of the first requests, so each of these has its own pages of it.
    """
    size, most = batching.block_size, min(traffic.concurrency, batching.max_num_seqs)
    totals = [prompt + output for prompt, output in zip(traffic.prompts, traffic.outputs)]
    if not batching.enable_prefix_caching:
        return sum(sorted((-(-total // size) for total in totals), reverse=True)[:most])
    shared = traffic.shared_prefix // size
    return (
        shared * (min(most, len(totals)) if batching.static else 1)
        + sum(total // size - shared for total in totals)
        + most
    )
