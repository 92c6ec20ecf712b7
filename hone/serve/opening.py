"""Opens the parts of an engine: the model and its draft model, the cache that fits the device, the runner."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from hone.base.errors import SpecError
from hone.cost.cache import page_bytes
from hone.measure.machine import describe
from hone.model import hf
from hone.model.decoder import Decoder
from hone.model.folder import model_folder, weights_bytes
from hone.model.sparse.sparsify import AUTO_ROWS, sparsify
from hone.model.tokenizer import Tokenizer, identity_of, load_tokenizer
from hone.serve import DRAFTERS
from hone.serve.paging.cache import KVCache, cache_tensors
from hone.serve.paging.pages import PagePool
from hone.serve.runner import Runner
from hone.serve.sampler import Sampler
from hone.serve.sizing import Memory, cache_pages, check_weights, sized, work_bytes
from hone.serve.spec import EngineSpec
from hone.serve.speculation.drafter import Drafter, DraftSetting, Guesser, Proposer


class Parts(NamedTuple):
    """An engine's parts. `spec` is the given one with its sizes filled in."""

    spec: EngineSpec
    model: Decoder
    tokenizer: Tokenizer | None
    pool: PagePool
    runner: Runner
    drafter: Drafter | None
    proposer: Proposer | None
    max_model_len: int
    note: str = ""
    """What a user must know of how the model is held, beside the spec."""


def open_parts(
    model: Decoder | Path | str,
    spec: EngineSpec,
    tokenizer: Tokenizer | None,
    draft: Decoder | Path | str | None,
    device: torch.device,
) -> Parts:
    """Loads models given as folders and allocates the cache; arguments as in `Engine`.

    Raises FitError when weights or cache do not fit, SpecError for arguments that do not fit together.
    """
    spec = sized(spec, describe(str(device)))
    if not isinstance(model, Decoder):
        model = model_folder(model)
        if tokenizer is None and (model / "tokenizer.json").exists():
            tokenizer = load_tokenizer(model)
    given = isinstance(model, Decoder)
    model, note = _sparsified(model, device, spec)
    drafter, draft_model = _open_draft(spec, draft if draft is not None else spec.draft, tokenizer, device)
    longest, size = spec.max_model_len or model.config.max_seq_len, spec.block_size
    cache_dtype = None if spec.kv_cache_dtype == "auto" else getattr(torch, spec.kv_cache_dtype)
    dtype = cache_dtype or model.embedding.dtype
    note = "; ".join(filter(None, (note, _cache_note(model, given, _name(dtype)))))
    tensors = cache_tensors(model.config)
    one = page_bytes(tensors, size, _name(dtype))
    if draft_model is not None:
        one += page_bytes(cache_tensors(draft_model.config), size, _name(cache_dtype or draft_model.embedding.dtype))
    work = work_bytes(model.config.facts(), spec, _name(model.embedding.dtype), str(device))
    num_pages = cache_pages(spec, one, Memory.now(device), longest, work=work)
    cache = KVCache(tensors, num_pages, size, dtype=dtype, device=device, rope_len=longest)
    sampler = Sampler(model.config.vocab_size, device)
    proposer: Proposer | None = None
    guesser: Guesser | None = None
    if drafter is not None:
        assert spec.max_num_batched_tokens is not None, "sized() fills it in"
        budget = spec.max_num_batched_tokens
        setting = DraftSetting(model, draft_model, sampler, num_pages, size, budget, cache_dtype, device, longest)
        proposer, guesser = drafter.open(setting)
    pool = PagePool(num_pages, size, enable_prefix_caching=spec.enable_prefix_caching)
    runner = Runner(model, cache, sampler, device, guesser)
    return Parts(spec, model, tokenizer, pool, runner, drafter, proposer, min(longest, num_pages * size), note)


def _sparsified(model: Decoder | Path | str, device: torch.device, spec: EngineSpec) -> tuple[Decoder, str]:
    """The model of `_opened` with the linears that `spec.sparsity` asks for, and what was done."""
    if spec.sparsity == "none":
        return _opened(model, device, spec.dtype), ""
    if isinstance(model, Decoder):
        raise SpecError(
            f"engine.sparsity is {spec.sparsity} and the model is given, not its folder: it would be changed",
            fix="give the folder, or call hone.model.sparse.sparsify on the model before",
        )
    opened = _opened(model, device, spec.dtype)
    rows = spec.max_num_seqs or AUTO_ROWS
    return opened, sparsify(opened, spec.sparsity, rows=rows, where=str(model)).said


def _cache_note(model: Decoder, given: bool, dtype: str) -> str:
    """What happened to the scales that a folder has for its KV cache."""
    if given or not (model.quantization or {}).get("kv_cache_scheme"):
        return ""
    return f"the folder has scales for a KV cache of 8 bits, which the engine does not have yet: keys and values stay {dtype}"


def _opened(model: Decoder | Path | str, device: torch.device, dtype: str) -> Decoder:
    """The model ready to serve, in `dtype` ("auto": the stored one)."""
    kind = None if dtype == "auto" else getattr(torch, dtype)
    if not isinstance(model, Decoder):
        check_weights(str(model), weights_bytes(model), device)
        model = hf.load(model, device=device, dtype=kind)
        for layer in model.layers:  # a cache of 16 bits rounds nothing
            if hasattr(layer.mixer, "kv_rounding"):
                layer.mixer.kv_rounding = None
    elif kind is not None and model.embedding.dtype != kind:
        raise SpecError(
            f"engine.dtype is {dtype}, the given model has {_name(model.embedding.dtype)}",
            fix="convert the model before, or leave engine.dtype out",
        )
    return model.eval().requires_grad_(False)


def _open_draft(
    spec: EngineSpec, model: Decoder | Path | str | None, tokenizer: Tokenizer | None, device: torch.device
) -> tuple[Drafter | None, Decoder | None]:
    """The drafter and its model. The drafter defaults to "draft_model" when a draft model is given."""
    drafter = spec.drafter
    if drafter is None and model is not None:
        drafter = DRAFTERS.read("draft_model")
    if drafter is None:
        return None, None
    wanted = "draft" in drafter.needs
    if wanted != (model is not None):
        raise SpecError(
            f"the drafter '{drafter.kind}' {'needs a' if wanted else 'uses no'} draft model",
            fix="give engine.draft: FOLDER" if wanted else "leave engine.draft out",
        )
    if model is None:
        return drafter, None
    if not isinstance(model, Decoder):
        model = model_folder(model)
    theirs = None if isinstance(model, Decoder) else identity_of(model)
    if tokenizer is not None and theirs not in (None, tokenizer.identity):
        raise SpecError(
            f"the draft model {model} has another tokenizer than the model",
            fix="use a draft model with the same tokenizer",
        )
    return drafter, _opened(model, device, spec.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
