"""Opens the parts of an engine: the model and its draft model, the cache that fits the device, the runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from hone.base.errors import SpecError
from hone.base.figure import human_bytes
from hone.cost.cache import cache_dtype, page_bytes
from hone.cost.serve.serving import Serving
from hone.measure.machine import describe
from hone.measure.topology.pin import asked, spread_layers
from hone.model import hf
from hone.model.decoder import Decoder
from hone.model.drafters.stored import heads_bytes, load_heads
from hone.model.facts import CheckpointFacts
from hone.model.folder import heads_kind, model_folder, weights_bytes
from hone.model.sparse.sparsify import AUTO_ROWS, sparsify
from hone.model.tokenizer import Tokenizer, identity_of, load_tokenizer
from hone.serve import DRAFTERS, EVICTIONS
from hone.serve.adapters.registry import Adapters
from hone.serve.eviction.eviction import Eviction
from hone.serve.kv_policies.policy import KeptTokens, check_bits, check_combination
from hone.serve.offload.budget import MemoryBudget
from hone.serve.offload.experts import ExpertStream
from hone.serve.offload.opening import open_experts, open_streamed, said_of, weights_on_device
from hone.serve.paging.cache import KVCache, cache_tensors
from hone.serve.paging.pages import PagePool
from hone.serve.paging.scales import cache_format, check_on, take_scales
from hone.serve.planning import budget_on, pages_bytes, serving_of
from hone.serve.runner import Runner
from hone.serve.sampler import Sampler
from hone.serve.sizing import DeviceMemory, cache_pages, check_weights, kept_of, sized, widens_experts, work_bytes
from hone.serve.spec import EngineSpec
from hone.serve.speculation.drafter import Drafter, DraftSetting, Proposer


class EngineParts(NamedTuple):
    """An engine's parts. `spec` is the given one with its sizes filled in."""

    spec: EngineSpec
    model: Decoder
    tokenizer: Tokenizer | None
    pool: PagePool
    runner: Runner
    drafter: Drafter | None
    proposer: Proposer | None
    max_model_len: int
    kept: KeptTokens
    note: str = ""
    """What a user must know of how the model is held, beside the spec."""
    adapters: Adapters | None = None
    """LoRA adapters; None: the engine serves none."""

    @property
    def lookahead(self) -> int:
        """The most guesses that follow a sequence's token in a step."""
        if self.drafter is None:
            return 0
        rounds = self.runner.rounds
        return self.drafter.num_tokens if rounds is None else len(rounds.tree) - 1


def open_parts(
    model: Decoder | Path | str,
    spec: EngineSpec,
    tokenizer: Tokenizer | None,
    draft: Decoder | Path | str | None,
    device: torch.device,
) -> EngineParts:
    """Loads models given as folders and allocates the cache; arguments as in `Engine`.

    Raises FitError when weights or cache do not fit, SpecError for arguments that do not fit together.
    """
    spec = sized(spec, describe(str(device)))
    if not isinstance(model, Decoder):
        model = model_folder(model)
        if tokenizer is None and (model / "tokenizer.json").exists():
            tokenizer = load_tokenizer(model)
    if spec.num_ranks > 1:
        return _open_ranked(model, spec, tokenizer, draft, device)
    given = isinstance(model, Decoder)
    model, note, streamed, experts = _loaded(model, spec, device, draft)
    given_draft = draft if draft is not None else spec.draft
    drafter, draft_model, heads = _open_draft(spec, given_draft, tokenizer, device, model)
    adapters = None if spec.lora.max_loras is None else Adapters(model, spec.lora, device)
    if adapters is not None:
        said = f"{adapters.slots.num_slots} adapters of rank {spec.lora.max_lora_rank}: {human_bytes(adapters.slots.num_bytes)}"
        note = "; ".join(filter(None, (note, said)))
    longest, size = spec.max_model_len or model.config.max_seq_len, spec.block_size
    weights = _name(model.dtype)
    held = cache_format(spec.kv_cache_dtype, weights, None if given else model.quantization)
    fixed = None if given else take_scales(model)
    fixed = fixed if held.fixed else None
    note = "; ".join(filter(None, (note, held.note)))
    tensors = cache_tensors(model.config)
    check_on(held.dtype, tensors, model.dtype, device)
    check_bits(spec.kv_policy, held.dtype)
    one = page_bytes(tensors, size, held.dtype, fixed_scales=held.fixed)
    draft_dtype: torch.dtype | None = None
    if draft_model is not None:
        drafted = cache_tensors(draft_model.config)
        draft_name = cache_dtype(spec.kv_cache_dtype, _name(draft_model.dtype))
        check_on(draft_name, drafted, draft_model.dtype, device)
        draft_dtype = getattr(torch, draft_name)
        one += page_bytes(drafted, size, draft_name)
    if heads is not None:
        one += heads_bytes(heads, size)
    work = work_bytes(model.config.dims(), spec, weights, str(device), widens=widens_experts(model, device))
    if drafter is not None:  # a draft model may be given beside the spec
        check_scheduling(spec)
        check_combination(spec.model_copy(update={"drafter": drafter}))
    kept = kept_of(spec, model.config)
    assert spec.max_num_batched_tokens is not None, "sized() fills it in"
    most = kept.most_pages(longest, spec.max_num_batched_tokens, size)  # of one sequence
    sizes = spec
    if streamed is not None:
        sizes = streamed.budget.sized(spec, weights_on_device(model))
    num_pages = cache_pages(sizes, one, DeviceMemory.now(device), most * size, work=work)
    dtype = getattr(torch, held.dtype)
    cache = KVCache(
        tensors, num_pages, size, dtype=dtype, device=device, rope_len=longest, kept=kept, fixed_scales=fixed
    )
    sampler = Sampler(model.config.vocab_size, device)
    proposer: Proposer | None = None
    assert spec.max_num_seqs is not None, "sized() fills it in"
    guessers: dict[str, Any] = {}
    if drafter is not None:
        budget = spec.max_num_batched_tokens
        setting = DraftSetting(
            model, draft_model, sampler, num_pages, size, budget, draft_dtype, device, longest, heads, spec.max_num_seqs
        )
        proposer, guesser = drafter.open(setting)
        guessers = {"guesser" if heads is None else "hidden_guesser": guesser}
    options: dict[str, Any] = {"max_num_seqs": spec.max_num_seqs, "adapters": adapters, "drafter": drafter}
    runner = Runner(model, cache, sampler, device, **options, **guessers)
    if experts is not None:
        runner.graphs = runner.rounds = None  # which are copied is decided anew in every step
        runner.experts = experts.counts
    longest = longest if most <= num_pages else min(longest, num_pages * size)
    if streamed is not None:
        if streamed.streams:
            runner.graphs = runner.rounds = None  # copies come from host memory anew in every step
        context = max(1, min(longest, num_pages * size // spec.max_num_seqs))
        note = "; ".join(filter(None, (note, said_of(streamed.budget, streamed.serving, spec, context))))
    pool = _pool(spec, num_pages)
    return EngineParts(spec, model, tokenizer, pool, runner, drafter, proposer, longest, kept, note, adapters)


def _loaded(
    model: Decoder | Path, spec: EngineSpec, device: torch.device, draft: object
) -> tuple[Decoder, str, Streamed | None, ExpertStream | None]:
    """(model, what was done to it, how its layers stream, how its experts do). Raises SpecError and FitError."""
    if spec.gpu_memory is not None:
        if draft is not None:
            raise SpecError("engine.gpu_memory is given and a draft model, too", fix="leave one of them out")
        streamed = _open_streamed(model, spec, device)
        return streamed.model, "", streamed, None
    if spec.expert_offload.num_cached_experts is not None:
        opened, experts = _open_experts(model, spec, device)
        cached = spec.expert_offload.num_cached_experts
        said = f"{human_bytes(experts.host_bytes)} of experts in host memory, {cached} a layer on the device"
        return opened, said, None, experts
    opened, note = _sparsified(model, device, spec)
    if device.type == "cpu" and asked() != "none":
        note = "; ".join(filter(None, (note, spread_layers(opened.layers))))
    return opened, note, None, None


class Streamed(NamedTuple):
    """A model opened with `engine.gpu_memory`."""

    model: Decoder
    budget: MemoryBudget
    serving: Serving
    streams: bool


def _open_streamed(model: Decoder | Path, spec: EngineSpec, device: torch.device) -> Streamed:
    """The model with as many layers on `device` as `spec.gpu_memory` allows. Raises SpecError and FitError as `budget_of`."""
    if isinstance(model, Decoder):
        raise SpecError(
            f"engine.gpu_memory is {spec.gpu_memory} and the model is given, not its folder: all of it is on a device already",
            fix="save it (hone.save) and give the engine its folder",
        )
    facts, machine = CheckpointFacts.of(model), describe(str(device))
    budget = budget_on(spec, facts, machine, pages_bytes(spec, [facts]), DeviceMemory.now(device))
    assert budget is not None, "gpu_memory is given"
    opened, stream = open_streamed(model, spec, budget.offload, device)
    serving = serving_of(spec, facts, machine, budget.offload.loaded(stream.layer_bytes))
    return Streamed(opened, budget, serving, bool(budget.offload.streamed))


def _open_experts(model: Decoder | Path, spec: EngineSpec, device: torch.device) -> tuple[Decoder, ExpertStream]:
    """The model with its experts in host memory. Raises SpecError for a given model, and as `open_experts`."""
    if isinstance(model, Decoder):
        raise SpecError(
            "engine.expert_offload is given and the model is given, not its folder: its experts are on a device already",
            fix="save it (hone.save) and give the engine its folder",
        )
    return open_experts(model, spec, device)


def _open_ranked(
    model: Decoder | Path, spec: EngineSpec, tokenizer: Tokenizer | None, draft: object, device: torch.device
) -> EngineParts:
    """The parts of an engine on several processes, of which this one is rank 0. `spec` is `sized`."""
    from hone.serve.ranks.opening import open_lead

    if draft is not None:
        raise SpecError("a draft model does not run on several ranks yet", fix="leave the draft model out")
    drafter, _, _ = _open_draft(spec, None, tokenizer, device, None)  # ranks have no draft model and no heads
    if device.type == "cpu" and spec.num_threads is None:
        spec = spec.model_copy(update={"num_threads": max(1, torch.get_num_threads() // spec.num_ranks)})
    rank, runner, num_pages = open_lead(model, spec, device)
    size, longest, proposer = spec.block_size, rank.longest, None
    if drafter is not None:
        check_scheduling(spec)
        assert spec.max_num_batched_tokens is not None, "sized() fills it in"
        budget = spec.max_num_batched_tokens
        setting = DraftSetting(rank.model, None, runner.sampler, num_pages, size, budget, None, device, longest)
        proposer, guesser = drafter.open(setting)
        assert guesser is None, "only a draft model guesses on the device"
    usable = min(longest, num_pages * size)
    return EngineParts(
        spec, rank.model, tokenizer, _pool(spec, num_pages), runner, drafter, proposer, usable, KeptTokens(), rank.note
    )


def check_scheduling(spec: EngineSpec) -> None:
    """Raises SpecError where an engine with a drafter shall schedule a step before it knows the tokens of the last one."""
    if spec.async_scheduling:
        raise SpecError(
            "engine.async_scheduling is on and a drafter is given: guesses follow tokens that are known",
            fix="leave one of them out",
        )


def _pool(spec: EngineSpec, num_pages: int) -> PagePool:
    eviction = EVICTIONS.read(spec.eviction or "lru")
    assert isinstance(eviction, Eviction), "the table holds nothing else"
    caching = spec.enable_prefix_caching
    return PagePool(num_pages, spec.block_size, enable_prefix_caching=caching, eviction=eviction)


def _sparsified(model: Decoder | Path | str, device: torch.device, spec: EngineSpec) -> tuple[Decoder, str]:
    """The model of `_opened` with the linears that `spec.sparsity` asks for, and what was done."""
    if spec.load_format == "dummy" and not isinstance(model, Decoder):
        from hone.model.parallel.random import RandomCheckpoint

        model = RandomCheckpoint(model).build(device, None if spec.dtype == "auto" else getattr(torch, spec.dtype))
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


def _opened(model: Decoder | Path | str, device: torch.device, dtype: str) -> Decoder:
    """The model ready to serve, in `dtype` ("auto": the stored one)."""
    kind = None if dtype == "auto" else getattr(torch, dtype)
    if not isinstance(model, Decoder):
        check_weights(str(model), weights_bytes(model), device)
        model = hf.load(model, device=device, dtype=kind)
    elif kind is not None and model.dtype != kind:
        raise SpecError(
            f"engine.dtype is {dtype}, the given model has {_name(model.dtype)}",
            fix="convert the model before, or leave engine.dtype out",
        )
    return model.eval().requires_grad_(False)


def _open_draft(
    spec: EngineSpec,
    model: Decoder | Path | str | None,
    tokenizer: Tokenizer | None,
    device: torch.device,
    target: Decoder | None,
) -> tuple[Drafter | None, Decoder | None, Any]:
    """The drafter, its model and its heads, if it has any. It defaults to what is given as `model`: "draft_model", or the heads' kind."""
    folder = None if model is None or isinstance(model, Decoder) else Path(model)
    kind = None if folder is None else heads_kind(folder)
    drafter = spec.drafter
    if drafter is None and model is not None:
        drafter = DRAFTERS.read(kind or "draft_model")
    if drafter is None:
        return None, None, None
    wanted = "draft" in drafter.needs or "heads" in drafter.needs
    if wanted != (model is not None):
        raise SpecError(
            f"the drafter '{drafter.kind}' {'needs a' if wanted else 'uses no'} draft model",
            fix="give engine.draft: FOLDER" if wanted else "leave engine.draft out",
        )
    if model is None:
        return drafter, None, None
    if kind != (drafter.kind if "heads" in drafter.needs else None):
        raise SpecError(
            f"the drafter is '{drafter.kind}', and {folder or 'the draft model'} holds {f'{kind} heads' if kind else 'a model'}",
            fix="give engine.draft and engine.drafter of one kind, or leave engine.drafter out",
        )
    if folder is not None and kind is not None and target is not None:
        _same_tokens(folder, tokenizer)
        return drafter, None, load_heads(folder, target.config, device, target.dtype)
    if not isinstance(model, Decoder):
        model = model_folder(model)
        _same_tokens(model, tokenizer)
    opened = _opened(model, device, spec.dtype)
    if not isinstance(model, Decoder):
        take_scales(opened)  # its own cache has none of a folder's
    return drafter, opened, None


def _same_tokens(folder: Path, tokenizer: Tokenizer | None) -> None:
    """Raises SpecError where the drafter in `folder` has a tokenizer that is not the model's."""
    if tokenizer is not None and identity_of(folder) not in (None, tokenizer.identity):
        raise SpecError(
            f"the draft model {folder} has another tokenizer than the model",
            fix="use a draft model with the same tokenizer",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
