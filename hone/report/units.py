"""Numbers as people read them: three significant digits, SI or binary prefixes, exact values kept for tooltips."""

from __future__ import annotations

import math
import re

ABSENT = "not measured"
NAMES = {
    "time_s": "time",
    "peak_memory_bytes": "peak memory",
    "memory_growth_bytes": "memory growth",
    "energy_j": "energy",
    "joules_per_token": "joules per token",
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
    "top1_agreement": "same top token as the reference",
    "bits_per_byte": "bits per byte",
    "tokens_evaluated": "tokens evaluated",
    "ttft_p50_s": "first token, median",
    "ttft_p99_s": "first token, 99th percentile",
    "tpot_p50_s": "time per token, median",
    "prefix_hit_rate": "prefix cache hits",
    "acceptance_rate": "drafted tokens accepted",
    "kv_cache_bytes": "KV cache",
}
_PERCENT = {"mfu", "sparsity", "top1_agreement", "prefix_hit_rate", "acceptance_rate", "relative_output_error"}
_COUNTS = {"tokens", "documents", "parameters", "requests", "params"}
_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ((1024.0**4, "TiB"), (1024.0**3, "GiB"), (1024.0**2, "MiB"), (1024.0, "KiB"))


def label(name: str) -> str:
    """The words for figure `name`; its own name with spaces when it has no entry."""
    return NAMES.get(name, name.replace("_", " "))


def heading(name: str) -> str:
    """`label` with a capital first letter."""
    words = label(name)
    return words[:1].upper() + words[1:]


def three(value: float) -> str:
    """`value` with three significant digits, without an exponent between 1e-4 and 1e6."""
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else ("infinite" if value > 0 else "-infinite")
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")
    size = abs(rounded)
    if size < 1e-4 or size >= 1e6:
        return f"{value:.2e}"
    if size >= 1000:
        return f"{rounded:,.0f}"
    return f"{rounded:.{max(0, 2 - math.floor(math.log10(size)))}f}"


def show(value: float | None, unit: str = "", name: str = "") -> str:
    """`value` in `unit` for reading: '1.25 MiB', '4 min 12 s', '12.3 k tokens/s', '41.3 %'; ABSENT for None."""
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return three(value)
    if name in _PERCENT or unit in ("fraction", "%"):
        return f"{three(value * (1 if unit == '%' else 100))} %"
    if unit in ("B", "bytes"):
        return show_bytes(value)
    if unit in ("s", "seconds"):
        return seconds(value)
    if unit in ("J", "J/token", "W"):
        return _small_prefix(value, unit)
    if unit == "x":
        return f"{three(value)}x"
    if unit in _COUNTS and float(value).is_integer() and abs(value) < 10_000:
        return f"{value:,.0f} {unit}"
    number = prefixed(value)
    return f"{number} {unit}".strip()


def tick(value: float, unit: str = "") -> str:
    """As `show`, without trailing zeros: '2 MiB', '0.5 %'; for axes."""
    text = show(value, unit)
    return re.sub(r"\.(\d*?)0+(?!\d)", lambda found: f".{found.group(1)}" if found.group(1) else "", text)


def exact(value: float | None, unit: str = "") -> str:
    """The unrounded value with its unit, for a tooltip."""
    if value is None:
        return ABSENT
    text = f"{value:,.0f}" if math.isfinite(value) and float(value).is_integer() else repr(value)
    return f"{text} {unit}".strip()


def prefixed(value: float) -> str:
    """`value` with an SI prefix from 10,000 up: '12.3 k'; plain below."""
    if math.isfinite(value) and abs(value) >= 9999.5:
        for size, prefix in _SI:
            if abs(value) >= size * 0.9995:
                return f"{three(value / size)} {prefix}"
    return three(value)


def show_bytes(value: float) -> str:
    """Bytes in binary units: '1.25 MiB'."""
    for size, unit in _BINARY:
        if abs(value) >= size * 0.9995:
            return f"{three(value / size)} {unit}"
    return f"{three(value)} B"


def seconds(value: float) -> str:
    """A duration: '31.2 s', '4 min 12 s', '2 h 05 min', '840 µs'."""
    size = abs(value)
    if size >= 3600:
        minutes = round(value / 60)
        return f"{minutes // 60} h {minutes % 60:02d} min"
    if size >= 119.5:
        whole = round(value)
        return f"{whole // 60} min {whole % 60:02d} s"
    return _small_prefix(value, "s")


def _small_prefix(value: float, unit: str) -> str:
    size = abs(value)
    if size == 0 or 0.9995 <= size < 1000:
        return f"{three(value)} {unit}"
    for scale, prefix in ((1e6, "M"), (1e3, "k"), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n")):
        if size >= scale * 0.9995:
            return f"{three(value / scale)} {prefix}{unit}"
    return f"{three(value)} {unit}"


def signed_percent(ratio: float) -> str:
    """A relative change: 0.009 -> '+0.9 %'; small changes keep their sign, '+0.04 %'."""
    percent = 100 * ratio
    if not math.isfinite(percent):
        return three(percent)
    if percent != 0 and abs(percent) < 0.005:
        return f"{'+' if percent > 0 else '-'}<0.01 %"
    digits = 0 if abs(percent) >= 99.5 else 1 if abs(percent) >= 0.95 else 2
    return f"{percent:+.{digits}f} %"
