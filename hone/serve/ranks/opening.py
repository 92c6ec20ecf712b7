"""Opens one rank of an engine, and on rank 0 all of them: processes, collectives, model parts, a cache of equal pages."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hone.base.errors import MachineError, SpecError
from hone.cost.cache import LayerCache, page_bytes
from hone.measure.topology.pin import Bound, bind, place_of
from hone.model.families.config_json import from_hf
from hone.model.folder import CONFIG, model_folder, read_json, weights_bytes
from hone.model.parallel.experts import Slots
from hone.model.parallel.local import LocalDecoder
from hone.model.parallel.reading import LocalCheckpoint, random_model
from hone.model.sparse.sparsify import AUTO_ROWS, sparsify
from hone.model.weights.values import stated_dtype
from hone.ops.dispatch import say_once
from hone.parallel.group import Group, Pipe
from hone.parallel.one_shot import OneShot
from hone.parallel.place import Place
from hone.serve.device.graphs import StepGraphs
from hone.serve.experts.placing import ExpertPlacing, slots_of
from hone.serve.paging.cache import KVCache, cache_tensors
from hone.serve.ranks.frames import MessageKind
from hone.serve.ranks.links import Links, Spawn, spawn
from hone.serve.ranks.order import WorkerOrder
from hone.serve.ranks.runner import LeadRunner, RankRunner
from hone.serve.sampler import Sampler
from hone.serve.sizing import DeviceMemory, cache_pages, check_weights, widens_experts, work_bytes
from hone.serve.spec import EngineSpec

if TYPE_CHECKING:
    from hone.model.decoder import Decoder


@dataclass
class OpenRank:
    """A rank whose model is in memory and whose cache is not yet."""

    model: LocalDecoder
    spec: EngineSpec
    device: torch.device
    tensors: list[LayerCache]
    dtype: torch.dtype
    longest: int
    num_pages: int
    """Pages for which this rank has memory."""
    note: str = ""
    placing: ExpertPlacing | None = None

    def runner(self, num_pages: int, kind: type[RankRunner] = RankRunner) -> RankRunner:
        """The runner, with a cache of `num_pages`: the fewest of all ranks."""
        spec = self.spec
        cache = KVCache(
            self.tensors, num_pages, spec.block_size, dtype=self.dtype, device=self.device, rope_len=self.longest
        )
        sampler = Sampler(self.model.config.vocab_size, self.device)
        assert spec.max_num_seqs is not None, "sized() fills it in"
        made = kind(self.model, cache, sampler, self.device, max_num_seqs=spec.max_num_seqs)
        made.placing = self.placing
        return made


def open_worker(order: WorkerOrder) -> OpenRank:
    """The part of a worker, in its process."""
    place, device = order.place, device_of(order.device, order.place)
    if device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // place.world_size))
    bind(place_of(place.rank, place.world_size, str(device)).shares[place.rank])
    store = dist.TCPStore("127.0.0.1", order.port, place.world_size, False, _timeout(order.spec))
    return open_rank(Path(order.folder), order.spec, place, device, store)


def open_rank(folder: Path, spec: EngineSpec, place: Place, device: torch.device, store: dist.Store) -> OpenRank:
    """Joins the ranks and reads this one's part of the model. Raises HoneError when it cannot be divided or does not fit."""
    group, pipe = _join(place, device, store, _timeout(spec))
    dtype = None if spec.dtype == "auto" else getattr(torch, spec.dtype)
    slots = slots_of(spec, folder)
    if spec.load_format == "dummy":
        model = dummy_model(folder, place, group, pipe, device, dtype, slots)
    else:
        check_weights(str(folder), weights_bytes(folder) // place.world_size, device)
        model = LocalCheckpoint(folder, place, group, pipe, slots).build(device, dtype)
    for layer in model.layers:  # a cache of 16 bits rounds nothing
        if hasattr(layer.mixer, "kv_rounding"):
            layer.mixer.kv_rounding = None
    note = ""
    if (model.quantization or {}).get("kv_cache_scheme"):
        note = "the folder has scales for a KV cache of 8 bits, which several ranks do not use yet"
    if spec.sparsity != "none":
        said = sparsify(model, spec.sparsity, rows=spec.max_num_seqs or AUTO_ROWS, where=str(folder)).said
        note = "; ".join(filter(None, (note, said)))
    model.eval().requires_grad_(False)
    placing = ExpertPlacing(model) if spec.enable_eplb else None
    if placing is not None and spec.eplb_config.step_interval:
        placing.check_moves()
    kept = model.dtype if spec.kv_cache_dtype == "auto" else getattr(torch, spec.kv_cache_dtype)
    declared = cache_tensors(model.config)
    tensors = [one if index in model.stage_layers else () for index, one in enumerate(declared)]
    longest = spec.max_model_len or model.config.max_seq_len
    memory = DeviceMemory.now(device)
    if device.type == "cpu":  # all ranks share it
        memory = memory._replace(free=memory.free / place.world_size)
    widens = widens_experts(model, device)
    work = work_bytes(model.config.dims(), spec, _name(model.dtype), str(device), widens=widens)
    num_pages = cache_pages(spec, page_bytes(tensors, spec.block_size, _name(kept)), memory, longest, work=work)
    return OpenRank(model, spec, device, tensors, kept, longest, num_pages, note, placing)


def open_lead(
    model: Decoder | Path | str, spec: EngineSpec, device: torch.device, *, start: Spawn | None = None
) -> tuple[OpenRank, LeadRunner, int]:
    """Starts the other ranks and opens all: rank 0's part, its runner, and the pages of every rank's cache.

    `spec` is `sized`. Raises HoneError of any rank, RankError when one ends; no process is left then.
    """
    size, stages = spec.tensor_parallel_size, spec.pipeline_parallel_size
    if not isinstance(model, Path | str):
        raise SpecError(
            "a given model cannot be divided among processes", fix="save it (hone.save) and give the engine its folder"
        )
    if dist.is_initialized():
        raise SpecError(
            "this process is in a torch.distributed group already, and an engine on several ranks needs one of its own",
            fix="close the other engine first, or start this one in a process of its own, without torchrun",
        )
    if spec.kv_cache_dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise SpecError(
            f"engine.kv_cache_dtype is {spec.kv_cache_dtype}: several ranks keep a cache of 16 or 32 bits so far",
            fix="use auto, float32, bfloat16 or float16",
        )
    folder, placement = model_folder(model), place_of(0, size * stages, str(device))
    places = [Place.of(rank, size, stages) for rank in range(size * stages)]
    own = device_of(str(device), places[0])
    bound = Bound("")
    links = Links(places[1:], spec.distributed_timeout_seconds, start=start or STARTS[0], interval_s=INTERVAL_S[0])
    try:
        store = dist.TCPStore("127.0.0.1", 0, len(places), True, _timeout(spec), wait_for_workers=False)
        port = store.port
        links.send(MessageKind.OPEN, lambda place: WorkerOrder(place, str(folder), spec, str(device), port))
        bound = bind(placement.shares[0])
        if bound.said:
            say_once(f"rank 0 of {len(places)}: {bound.said}; the others likewise")
        try:
            rank = open_rank(folder, spec, places[0], own, store)
        except RuntimeError as error:  # of torch.distributed: another rank has ended
            raise _first_refusal(links) or links.fail(error) from None
        num_pages = min([rank.num_pages, *links.replies(MessageKind.OPEN)])
        links.send(MessageKind.PAGES, num_pages)
        runner = rank.runner(num_pages, LeadRunner)
        assert isinstance(runner, LeadRunner)
        links.replies(MessageKind.PAGES)
    except BaseException:
        links.close()
        _leave()
        bound.undo()
        raise
    runner.links, runner.step_interval = links, spec.eplb_config.step_interval
    if own.type == "cuda":
        links.on_lost = _abort
    runner.end = weakref.finalize(runner, _end, links, bound, runner.graphs)
    return rank, runner, num_pages


def dummy_model(
    folder: Path,
    place: Place,
    group: Group,
    pipe: Pipe | None,
    device: torch.device,
    dtype: torch.dtype | None,
    slots: Slots | None = None,
) -> LocalDecoder:
    """A rank's part of a model of random dense weights with the config.json in `folder`; `dtype` None: that of config.json."""
    values = read_json(folder / CONFIG)
    if values.get("quantization_config"):
        raise SpecError(
            f"{folder} has a quantization_config, and random weights of several ranks are dense",
            fix="measure one rank, or leave the quantization_config out",
        )
    config, found = from_hf(values, str(folder / CONFIG)), dtype or stated_dtype(values) or torch.bfloat16
    return random_model(config, place, group, pipe, device=device, dtype=found, slots=slots)


STARTS: list[Spawn] = [spawn]
"""How workers are started; tests fork them instead."""
INTERVAL_S = [1.0]
"""Seconds between pings."""
_ABORT_S = 10.0
"""Seconds that a closing engine waits for NCCL to end."""
_FINISH_S = 10.0
"""Seconds in which the other ranks end the steps that they were sent, when an engine is closed."""


def device_of(device: str, place: Place) -> torch.device:
    """The device of a rank where `device` is given for all. Raises MachineError when there are fewer GPUs than ranks."""
    if not device.startswith("cuda"):
        return torch.device(device)
    if device not in ("cuda", "cuda:0"):
        raise MachineError(f"{place.world_size} ranks and one device {device}", fix="use --device=cuda: one GPU a rank")
    there = torch.cuda.device_count()
    if place.world_size > there:
        raise MachineError(
            f"tensor_parallel_size x pipeline_parallel_size is {place.world_size}, torch sees {there} GPUs",
            fix=f"use at most {there}, or make more visible (CUDA_VISIBLE_DEVICES)",
        )
    torch.cuda.set_device(place.rank)
    return torch.device("cuda", place.rank)


def _join(place: Place, device: torch.device, store: dist.Store, timeout: timedelta) -> tuple[Group, Pipe | None]:
    """Meets the other ranks: the collectives of this rank's stage, and its pipe."""
    gpu = device.type == "cuda"
    if not gpu:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host
    for name, value in (("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"), ("NCCL_NVLS_ENABLE", "0")):
        os.environ.setdefault(name, value)
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
        device_id=device if gpu else None,
    )
    group = None
    for stage in range(place.num_stages):
        ranks = list(range(stage * place.tensor_size, (stage + 1) * place.tensor_size))
        made = dist.new_group(ranks, timeout=timeout)  # all ranks make all groups
        group = made if stage == place.stage else group
    one_shot = _one_shot(place, group, device) if gpu else None
    pipe = Pipe(place) if place.num_stages > 1 else None
    return Group(place, group, one_shot), pipe


def _one_shot(place: Place, group: dist.ProcessGroup | None, device: torch.device) -> OneShot | None:
    """The own all-reduce of a stage's GPUs, where all of them can share memory; why not is said once."""
    if not OneShot.possible(place.tensor_size, list(place.peers)):
        return None
    found, why = None, ""
    try:
        found = OneShot(group, place.tensor_rank, place.tensor_size, device)
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
    worked = torch.tensor(int(found is not None), device=device)
    dist.all_reduce(worked, op=dist.ReduceOp.MIN, group=group)
    if not int(worked):
        if place.rank == 0:
            say_once(f"NCCL adds small messages, too: memory cannot be shared between GPUs: {why or 'on another rank'}")
        return None
    return found


def _first_refusal(links: Links) -> BaseException | None:
    """The HoneError with which a worker ended, if one did."""
    try:
        links.replies(MessageKind.OPEN)
    except BaseException as error:
        return error
    return None


def _abort() -> None:
    """Stops NCCL's kernels that wait for a lost rank, so that the thread that waits for them comes back."""
    with suppress(RuntimeError):
        dist.distributed_c10d._abort_process_group()


def _abort_soon() -> None:
    """The same, but its caller waits a limited time: NCCL may wait for what never comes, and the process is about to end."""
    thread = threading.Thread(target=_abort, name="hone-abort", daemon=True)
    thread.start()
    thread.join(_ABORT_S)
    if thread.is_alive():
        say_once(f"NCCL's communicators have not ended within {_ABORT_S:.0f} s; nothing waits for them any more")


def _leave() -> None:
    if not dist.is_initialized():
        return
    if dist.get_backend() == "nccl":  # an orderly end would wait for ranks that are gone
        _abort_soon()
    else:
        with suppress(RuntimeError):  # its peers may be gone
            dist.destroy_process_group()


def _end(links: Links, bound: Bound, graphs: StepGraphs | None) -> None:
    links.close(_FINISH_S)
    if graphs is not None:
        graphs.close()
    _leave()
    bound.undo()


def _timeout(spec: EngineSpec) -> timedelta:
    return timedelta(seconds=spec.distributed_timeout_seconds)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
