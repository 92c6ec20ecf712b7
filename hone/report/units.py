"""Numbers for readers: three significant digits, SI or binary prefixes, exact values for tooltips."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

ABSENT = "not measured"
NAMES = {
    "time_s": "time",
    "peak_memory_bytes": "peak memory",
    "memory_growth_bytes": "memory growth",
    "energy_j": "energy",
    "joules_per_token": "joules per token",
    "energy_above_idle_j": "energy above rest",
    "joules_per_request": "joules per request",
    "joules_per_gb": "joules per GB of text",
    "joules_per_billion_params": "joules per billion parameters",
    "clock_saving": "energy saved by the clock",
    "clock_slowdown": "times slower by the clock",
    "budget_j": "energy budget",
    "budget_spent_j": "energy spent of it",
    "input_bytes": "text read",
    "input_documents": "documents read",
    "kept_bytes": "text kept",
    "kept_documents": "documents kept",
    "train_tokens": "training tokens",
    "val_tokens": "validation tokens",
    "bytes_per_token": "bytes per token",
    "num_params": "parameters",
    "model_bytes": "model size",
    "final_loss": "last training loss",
    "val_loss": "validation loss",
    "val_bits_per_byte": "validation bits per byte",
    "tokens_per_s": "tokens per second",
    "requests_per_s": "requests per second",
    "mfu": "share of the matmul rate (MFU)",
    "bits_per_weight": "bits per weight",
    "compression_ratio": "times smaller",
    "relative_output_error": "relative output error",
    "kl_to_reference": "KL to the reference",
    "loss_over_reference": "loss above the reference's",
    "bigram_perplexity": "perplexity of a bigram model",
    "top1_agreement": "same top token as the reference",
    "bits_per_byte": "bits per byte",
    "tokens_evaluated": "tokens evaluated",
    "ttft_p50_s": "first token, median",
    "ttft_p99_s": "first token, 99th percentile",
    "tpot_p50_s": "time per token, median",
    "prefix_hit_rate": "prefix cache hits",
    "acceptance_rate": "drafted tokens accepted",
    "kv_cache_bytes": "KV cache",
    "page_waste": "page slots without a token",
}
PERCENT = {
    "mfu",
    "sparsity",
    "top1_agreement",
    "prefix_hit_rate",
    "acceptance_rate",
    "page_waste",
    "relative_output_error",
    "clock_saving",
}
_COUNTS = {"tokens", "documents", "parameters", "requests", "params"}
_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ((1024.0**4, "TiB"), (1024.0**3, "GiB"), (1024.0**2, "MiB"), (1024.0, "KiB"))


def label(name: str) -> str:
    """The words for figure `name`; its own name with spaces when it has no entry."""
    return NAMES.get(name, name.replace("_", " "))


def heading(name: str) -> str:
    """`label` with a capital first letter."""
    return first_upper(label(name))


def first_upper(words: str) -> str:
    """`words` with a capital first letter, otherwise unchanged."""
    return words[:1].upper() + words[1:]


def three(value: float, digits: int = 3) -> str:
    """`value` with three significant digits (or `digits`), whole from 1,000 up, without an exponent from 1e-4 to 1e6."""
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else ("infinite" if value > 0 else "-infinite")
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits}g}")
    size = abs(rounded)
    if size < 1e-4 or size >= 1e6:
        return f"{value:.{digits - 1}e}"
    if size >= 1000:
        return f"{value:,.{max(0, digits - 4)}f}"
    return f"{rounded:.{max(0, digits - 1 - math.floor(math.log10(size)))}f}"


def show(value: float | None, unit: str = "", name: str = "", digits: int = 3) -> str:
    """`value` in `unit` for readers: '1.25 MiB', '4 min 12 s', '12.3 k tokens/s', '41.3 %'; ABSENT for None."""
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return three(value)
    if name in PERCENT or unit in ("fraction", "%"):
        return f"{three(value * (1 if unit == '%' else 100), digits)} %"
    if unit in ("B", "bytes"):
        return show_bytes(value, digits)
    if unit in ("s", "seconds"):
        return seconds(value, digits)
    if unit in ("J", "J/token", "W"):
        return _small_prefix(value, unit, digits)
    if unit in ("x", "times"):
        return f"{three(value, digits)}x"
    if unit in _COUNTS and float(value).is_integer() and abs(value) < 10_000:
        return f"{value:,.0f} {unit.removesuffix('s') if value == 1 else unit}"
    return f"{prefixed(value, digits)} {unit}".strip()


def ticks(values: Sequence[float], unit: str = "") -> list[str]:
    """Texts of an axis' ticks: no trailing zeros, and digits enough that no two are equal."""
    for digits in range(3, 9):
        words = [_bare(show(value, unit, digits=digits)) for value in values]
        if len(set(words)) == len(set(values)):
            break
    return words


def _bare(text: str) -> str:
    return re.sub(r"\.(\d*?)0+(?!\d)", lambda found: f".{found.group(1)}" if found.group(1) else "", text)


def exact(value: float | None, unit: str = "") -> str:
    """The unrounded value with its unit, for a tooltip."""
    if value is None:
        return ABSENT
    text = f"{value:,.0f}" if math.isfinite(value) and float(value).is_integer() else repr(value)
    return f"{text} {unit}".strip()


def prefixed(value: float, digits: int = 3) -> str:
    """`value` with an SI prefix from 10,000 up: '12.3 k'; plain below."""
    if math.isfinite(value) and abs(value) >= 9999.5:
        for size, prefix in _SI:
            if abs(value) >= size * 0.9995:
                return f"{three(value / size, digits)} {prefix}"
    return three(value, digits)


def show_bytes(value: float, digits: int = 3) -> str:
    """Bytes in binary units: '1.25 MiB'."""
    for size, unit in _BINARY:
        if abs(value) >= size * 0.9995:
            return f"{three(value / size, digits)} {unit}"
    return f"{value:.0f} B" if float(value).is_integer() else f"{three(value, digits)} B"


def seconds(value: float, digits: int = 3) -> str:
    """A duration: '31.2 s', '4 min 12 s', '2 h 05 min', '840 µs'."""
    size = abs(value)
    if size >= 3600:
        minutes = round(value / 60)
        return f"{minutes // 60} h {minutes % 60:02d} min"
    if size >= 119.5:
        whole = round(value)
        return f"{whole // 60} min {whole % 60:02d} s"
    return _small_prefix(value, "s", digits)


def _small_prefix(value: float, unit: str, digits: int) -> str:
    size = abs(value)
    if size == 0 or 0.9995 <= size < 1000:
        return f"{three(value, digits)} {unit}"
    for scale, prefix in ((1e6, "M"), (1e3, "k"), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n")):
        if size >= scale * 0.9995:
            return f"{three(value / scale, digits)} {prefix}{unit}"
    return f"{three(value, digits)} {unit}"


def decimals(step: float) -> int:
    """Decimals at which `step` has three significant digits: 0.138 -> 3, 12.4 -> 1; none for 0."""
    return min(max(0, 2 - math.floor(math.log10(step * (1 + 1e-9)))), 9) if step > 0 and math.isfinite(step) else 0


def fixed(value: float, places: int, *, signed: bool = False) -> str:
    """`value` with `places` decimals: '-0.144', '14,008'."""
    text = f"{value:+,.{places}f}" if signed else f"{value:,.{places}f}"
    return text.lstrip("+-") if float(text.replace(",", "")) == 0 else text


def signed_percent(ratio: float) -> str:
    """A relative change with two digits: 0.0092 -> '+0.92 %', 1.4 -> '+140 %'."""
    percent = 100 * ratio
    if not math.isfinite(percent):
        return three(percent)
    if abs(percent) < 0.005:
        return "0.00 %"
    places = max(0, 1 - math.floor(math.log10(abs(percent))))
    return f"{percent:+.{min(places, 0 if abs(percent) >= 99.5 else 1) if abs(percent) >= 0.95 else places}f} %"
