"""The finished folder of a compression: config.json, the tokenizer, and the figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.base.artifact import Draft
from hone.base.durable import write_atomic
from hone.base.run import Run
from hone.compress import ALLOCATIONS, STEPS
from hone.compress.check import Checked
from hone.compress.spec import CompressSpec
from hone.compress.statistics import STATISTICS
from hone.compress.step import Assigned, Step
from hone.compress.targets import EMBEDDING_CLASS, HEAD, Linear, has_head, linears, matrix_name
from hone.model.config import ModelConfig
from hone.model.families import FAMILIES
from hone.model.families.config_json import OWN
from hone.model.folder import copy_companions, weights_bytes
from hone.model.hf import Checkpoint, config_values
from hone.model.quantized.config import to_json
from hone.model.quantized.layouts import layout_of
from hone.model.quantized.scheme import CacheScheme, InputHadamard, Quantization, Scheme
from hone.model.weights.model import ModelSource
from hone.model.weights.stacked import Stacked

if TYPE_CHECKING:
    from hone.compress.calibration import Calibration

CHANCE = 20
"""A perplexity above the vocabulary's size divided by this is of text that the model can hardly predict."""


def quantization_config(
    config: ModelConfig,
    targets: tuple[tuple[Linear, ...], ...],
    assigned: Assigned,
    dtype: str,
    hadamards: Mapping[str, int],
    kv_cache: CacheScheme | None = None,
    embedding: Linear | None = None,
) -> dict[str, Any] | None:
    """config.json's quantization_config: the scheme of most modules by their class, any other by module names,
    which readers prefer; or that weights are factors; and the rounding of the KV cache. None where all stays as it is.
    `hadamards`: sizes of the Hadamard matrices of inputs, by matrix."""
    if assigned.template is None:
        return None if kv_cache is None else to_json(Quantization((), ("lm_head",), kv_cache=kv_cache))
    ignored = [] if has_head(targets) else [HEAD]
    paths = [{one.path for one in chosen} for chosen in targets]
    left = (one for index, chosen in enumerate(paths) for one in linears(config, index) if one.path not in chosen)
    own = assigned.template.quantization([*ignored, *(name for linear in left for name, _ in linear.modules)])
    if own is not None:
        return own
    modules: dict[Scheme, list[str]] = {}
    multiplied: dict[int, list[str]] = {}
    for index, chosen in enumerate(paths):
        for linear in linears(config, index):
            names = [name for name, _ in linear.modules]
            if linear.path in chosen:
                scheme = assigned.scheme(index, linear)
                modules.setdefault(scheme, []).extend(names)
                size = hadamards.get(matrix_name(index, linear.path))
                if size is not None:
                    multiplied.setdefault(size, []).extend(names)
            else:
                ignored += names
    by_count = sorted(modules, key=lambda scheme: len(modules[scheme]))
    groups = [(tuple(modules[scheme]), scheme) for scheme in by_count[:-1]]
    options = assigned.template.config_options(dtype)
    inputs = tuple(InputHadamard(tuple(names), size) for size, names in multiplied.items())
    if by_count:
        # vLLM's head is no Linear: it goes by its name
        head = tuple(name for name in modules[by_count[-1]] if name == HEAD)
        groups.append((("Linear", *head), by_count[-1]))
    if embedding is not None:
        scheme = assigned.scheme(-1, embedding)
        # by its class, and before linears: its name has other prefixes in other libraries
        groups.insert(0, ((EMBEDDING_CLASS,), scheme))
    method = layout_of(groups[-1][1]).method
    made = Quantization(tuple(groups), tuple(ignored), method, options, inputs, kv_cache)
    return to_json(made)


def describe(
    draft: Draft, checkpoint: ModelSource, quantization: dict[str, Any] | None, more: Mapping[str, Any]
) -> None:
    """Writes config.json with the quantization and what steps add to it, and copies what lies beside the weights."""
    values = checkpoint.values
    method = None if quantization is None else quantization["quant_method"]
    if method == "low_rank" or (method not in (None, "mxfp4") and FAMILIES[checkpoint.config.family].stacked):
        values = config_values(checkpoint.config, checkpoint.dtype, quantization)
    values = values | more
    if quantization is not None:
        values["quantization_config"] = quantization
    write_atomic(draft.folder / "config.json", (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode())
    copy_companions(checkpoint.folder, draft.folder)


def stacked_experts(checkpoint: ModelSource, storage: Step | None) -> Stacked:
    """The tensors of all experts of a layer that the folder of a compression has: as its family's, with what `storage` stores.

    Codes that these cannot hold are stored for each expert, in hone's own format.
    """
    method = None if storage is None else storage.method(checkpoint.config.hidden_size)
    own = checkpoint.values.get("model_type") == OWN or method not in (None, "mxfp4")
    return {} if own else FAMILIES[checkpoint.config.family].stacked


def techniques(
    draft: Draft,
    run: Run,
    spec: CompressSpec,
    samples: Calibration | None,
    said: list[dict[str, Any]],
    loss: float | None,
) -> None:
    """Writes down what the stage `spec` did: every step, with what those of the model `said`, the allocation with the sum of its losses."""
    source = {} if samples is None else {"calibration": samples.source}
    words = dict(zip(map(id, spec.model_steps), said, strict=True))
    for step in spec.ordered:
        given = source if step.needs & STATISTICS.keys() or step.reads_inputs else {}
        note = {"note": step.note} if step.note else {}
        told = words.get(id(step), {})
        draft.did({"slot": STEPS.slot_of(step.kind), **step.model_dump(mode="json"), **told, **given, **note})
        if step.note:
            run.warn(f"{step.kind}: {step.note}")
    if spec.allocation is not None:
        draft.did({"slot": ALLOCATIONS.slot, **spec.allocation.model_dump(mode="json"), "loss": loss})


def record(draft: Draft, folder: Path, checkpoint: ModelSource, rows: list[dict[str, Any]]) -> None:
    """The figures of the folder made from the one in `folder`; `rows` are of its matrices, none where no step worked on them."""
    size = weights_bytes(draft.folder)
    draft.record("model_bytes", size, "B")
    draft.record(
        "bits_per_weight", 8 * size / checkpoint.config.num_params, "bits", note="whole folder, scales included"
    )
    draft.record(
        "compression_ratio",
        weights_bytes(folder) / size,
        "times",
        note=f"relative to the stored checkpoint in {str(checkpoint.dtype).removeprefix('torch.')}",
    )
    whole = Checkpoint(folder).config.num_params
    if checkpoint.config.num_params != whole:
        note = f"{checkpoint.config.num_params / whole:.3f} of the given model's"
        draft.record("num_params", checkpoint.config.num_params, "parameters", note=note)
    if not rows:
        return
    draft.record(
        "sparsity",
        sum(row["zeros"] for row in rows) / sum(row["weights"] for row in rows),
        "fraction",
        note="zeros in the compressed matrices",
    )
    given = json.loads((folder / "config.json").read_text(encoding="utf8")).get("quantization_config")
    against = f"; W are the weights of a {given.get('quant_method')} checkpoint, with its errors" if given else ""
    outputs = [row["error"] for row in rows if row["error"] is not None]
    draft.record(
        "relative_output_error",
        sum(outputs) / len(outputs) if outputs else None,
        "fraction",
        n=max(len(outputs), 1),
        note=f"|(W' - W) X| / |W X| over the calibration inputs X (not rounded), mean over matrices{against}"
        if outputs
        else "not measured: no calibration inputs (give the role data, or calibration_text), or the embedding alone, which has none",
    )
    errors = [row["weight_error"] for row in rows]
    draft.record(
        "relative_weight_error",
        sum(errors) / len(errors),
        "fraction",
        n=len(errors),
        note=f"|W' - W| / |W|, mean over matrices; larger for methods that minimize the output error{against}",
    )


def record_check(draft: Draft, checked: Checked | None, num_sequences: int, changed: str) -> None:
    """The figures of the comparison with the model that was given; `changed`: what steps changed in it."""
    if checked is None:
        why = "no calibration inputs, or no other sequences in their text" if num_sequences else "check_sequences is 0"
        draft.record("kl_to_dense", None, "nats/token", note=f"not measured: {why}")
        return
    given = f"the given model{changed}"
    note = f"against {given}, in the dtype of the calibration, on sequences of its text outside the calibration"
    count = checked.num_tokens
    kl = {"n": count, "interval": checked.kl_interval, "note": f"KL(given || compressed) {note}"}
    draft.record("kl_to_dense", checked.kl, "nats/token", **kl)
    draft.record("top1_agreement", checked.top1, "fraction", n=count, note=f"same most likely token {note}")
    ratio = checked.perplexity / checked.dense_perplexity
    draft.record(
        "perplexity_ratio",
        ratio,
        "times",
        n=count,
        note=f"{checked.perplexity:.4g}, the given model's is {checked.dense_perplexity:.4g}; {note}",
    )
