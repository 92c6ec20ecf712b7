"""The logic of CUDA graphs on a CPU: a capture records torch's operations and runs none, a replay repeats them in place.

As on a GPU, a replay knows only tensors, not the numbers that Python had when it was captured; what reads a tensor's value
on the host cannot be captured; and a graph's outputs are gone when another one runs. Faults in what a replay is given
(inputs of another step, padding that counts, tokens left in the wrong place) must change tokens: the last tests see to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hone.ops.dispatch import _say
from hone.ops.paged.api import attend_paged, write_kv
from hone.ops.where import Where
from hone.serve import runner
from hone.serve.device import graphs, placing
from hone.serve.device.graphs import StepGraphs
from hone.serve.engine import Engine
from hone.serve.paging.paged import Paged, PagedBuffers
from hone.serve.request import SamplingParams
from hone.serve.sampler import SamplerOutput
from tests.serve.small import decoder, drain, engine, poison_freed_pages, request, tokens_of

_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Recording(TorchDispatchMode):
    """Records every operation below it. Those that write are not run: a capture computes nothing."""

    under_way: Recording | None = None

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _WAITS & set(function.tags) and not (function is torch.ops.aten.index.Tensor and _places(args[1])):
            raise RuntimeError(f"{function}: operation not permitted when stream is capturing")
        if function._schema.is_mutable:
            self._graph.calls.append(lambda: function(*args, **kwargs))
            return kwargs["out"] if "out" in kwargs else args[0]
        found = function(*args, **kwargs)
        made = [one for one in (found if isinstance(found, tuple | list) else [found]) if isinstance(one, Tensor)]
        given = {_memory(one) for one in _tensors((args, kwargs))}
        if any(_memory(one) not in given for one in made):  # else it is a view, which follows what it views

            def again() -> None:
                values = function(*args, **kwargs)
                for one, value in zip(made, values if isinstance(values, tuple | list) else [values]):
                    one.copy_(value)

            self._graph.calls.append(again)
            self._graph.outputs += made
        return found

    def __enter__(self) -> Any:
        Recording.under_way = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        Recording.under_way = None
        super().__exit__(*error)


class Graph:
    """As torch.cuda.CUDAGraph. All share their memory."""

    every: ClassVar[list[Graph]] = []

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []
        self.outputs: list[Tensor] = []
        self.num_replays = 0
        Graph.every.append(self)

    def replay(self) -> None:
        self.num_replays += 1
        for other in Graph.every:
            for one in other.outputs:
                one.fill_(float("nan") if one.is_floating_point() else True if one.dtype == torch.bool else 3)
        for call in self.calls:
            call()


def _places(index: list[Tensor | None]) -> bool:
    """Whether an index has numbers, not a mask whose true values must be counted."""
    return all(one is None or one.dtype == torch.int64 for one in index)


def _memory(one: Tensor) -> int:
    return one.untyped_storage().data_ptr()


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)


def kernel(results: Callable[[], tuple[Tensor, ...]], like: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """What a kernel computes: at once, or, while a capture is under way, at every replay. `like`: tensors for it."""
    recording = Recording.under_way
    if recording is None:
        return results()
    with torch.utils._python_dispatch._disable_current_modes():
        made = like()

    def again() -> None:
        for one, value in zip(made, results(), strict=True):
            one.copy_(value)

    recording._graph.calls.append(again)
    recording._graph.outputs += made
    return made


def attend(
    self: Paged, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: Any = None
) -> Tensor:
    """What the paged kernels do: they find their work in tensors on the device, and leave rows of padding as they are."""
    k_pages, v_pages = self._kv(layer)
    decoding = self._most == 1

    def attended() -> tuple[Tensor]:
        write_kv(k, v, k_pages, v_pages, self._pages, self._offsets)
        counts = (self._ends > 0).int() if decoding else self._lengths
        real = torch.nonzero(counts).flatten()
        out = torch.full((*q.shape[:2], v_pages.shape[3]), 777.0)  # finite: the reference also reads the null page
        total = int(counts.sum())
        out[:total] = attend_paged(
            q[:total], k_pages, v_pages, self._table[real], self._ends[real], counts[real], scale=scale, window=window
        )
        return (out,)

    return kernel(attended, lambda: (torch.empty(*q.shape[:2], v_pages.shape[3]),))[0]


class Nothing:
    """An event or a stream where everything happens at once."""

    def __init__(self, *_: Any) -> None: ...
    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, _: Any) -> None: ...


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that is taken for a GPU with kernels that read pages in place."""
    draw = graphs.sample

    def sample(logits: Tensor, *options: Any, **more: Any) -> tuple[Tensor, Tensor]:
        made = (torch.zeros(len(logits), dtype=torch.int64), torch.zeros(len(logits)))
        return kernel(lambda: draw(logits.nan_to_num(7.0), *options, **more), lambda: made)  # type: ignore[return-value]

    @contextlib.contextmanager
    def capture(graph: Graph, **_: Any) -> Iterator[None]:
        with Recording(graph):
            yield

    of = SamplerOutput.of.__func__  # type: ignore[attr-defined]
    cuda = torch.cuda
    for place, name, value in (
        (torch.Tensor, "pin_memory", lambda self, *_: self),
        (cuda, "Event", Nothing), (cuda, "Stream", Nothing), (cuda, "current_stream", Nothing),
        (cuda, "stream", lambda _: contextlib.nullcontext()), (cuda, "CUDAGraph", Graph),
        (cuda, "graph_pool_handle", lambda: None), (cuda, "graph", capture),
        (runner, "reads_in_place", lambda *_, **__: True), (graphs, "sample", sample),
        (Paged, "attend", attend), (Paged, "run_layers", lambda *_: None),
        # Copies to the host are made at once, before the next replay.
        (SamplerOutput, "of", classmethod(lambda cls, tokens, told, *more: of(cls, tokens, told.clone(), *more))),
    ):  # fmt: skip
        monkeypatch.setattr(place, name, value)
    monkeypatch.setattr(
        "hone.ops.dispatch._locate", lambda kind, index: Where(kind)
    )  # no kernels that torch does not see
    monkeypatch.setattr(Graph, "every", [])


KINDS: dict[str, Callable[[int], SamplingParams]] = {
    "greedy": lambda n: SamplingParams(temperature=0, **ended(n)),
    "plain": lambda n: SamplingParams(temperature=1.2, seed=n, **ended(n)),
    "filtered": lambda n: SamplingParams(temperature=1.2, top_k=9, top_p=0.9, min_p=0.01, seed=n, **ended(n)),
    "penalized": lambda n: SamplingParams(temperature=1.2, seed=n, presence_penalty=1.0, **ended(n)),
    "scored": lambda n: SamplingParams(temperature=0, prompt_logprobs=1, logprobs=1, **ended(n)),
    "mixed": lambda n: KINDS[["greedy", "plain", "filtered", "penalized", "scored"][n % 5]](n),
}


def ended(number: int) -> dict[str, Any]:
    return {"max_tokens": 9 + number, "ignore_eos": True}


def serve(kind: str, *, replays: bool, **spec: Any) -> tuple[dict[str, list[int]], Engine]:
    """Tokens of more requests of unlike lengths than fit at once, in few pages."""
    one = engine(decoder(), num_pages=22, max_num_seqs=6, max_num_batched_tokens=40, **spec)
    one.runner._wipes = True
    poison_freed_pages(one)
    if not replays:
        one.runner.graphs = None
    for number in range(9):
        prompt = [(3 * number + 5 * at) % 61 for at in range(2 + 4 * number)]
        one.add(request(str(number), prompt, KINDS[kind](number), pooling="mean" if kind == "scored" else None))
    outputs = drain(one)
    assert not [each.error for every in outputs.values() for each in every if each.error]
    for name, every in outputs.items():
        if (state := every[0].pooled) is not None:
            assert np.isfinite(np.frombuffer(state, dtype=np.float32)).all(), name
    return {name: tokens_of(every) for name, every in outputs.items()}, one


def replayed(one: Engine) -> int:
    return sum(graph.num_replays for graph in Graph.every)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "in turn"])
def test_replays_give_what_launches_give(gpu: None, kind: str, ahead: bool) -> None:
    wanted, _ = serve(kind, replays=False, async_scheduling=False)
    found, one = serve(kind, replays=True, async_scheduling=ahead)
    assert found == wanted
    assert one.stats()["preemptions"] > 0
    keys = one.runner.graphs._captured
    assert {key.seqs is None for key in keys} == {True, False} and replayed(one) > one.stats()["steps"] // 2
    drawn = {"greedy": {"plain"}, "plain": {"plain"}, "filtered": {"filtered"}}.get(kind, set())
    assert {key.draws for key in keys if key.seqs is None} >= (drawn or {""})


def test_pages_that_a_failed_step_did_not_bring_come_with_the_next(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then there is no memory for a step's arrays: it runs in halves, whose rows of pages must arrive."""
    wanted, _ = serve("mixed", replays=False)
    real, calls = placing.Placer.place, iter(range(10**6))

    def place(self: placing.Placer, arrays: Any) -> Any:
        if len(arrays.get("table_rows", ())) > 1 and next(calls) % 3 == 1:
            raise torch.OutOfMemoryError("no memory")
        return real(self, arrays)

    monkeypatch.setattr(placing.Placer, "place", place)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for replays in (False, True):
        assert serve("mixed", replays=replays)[0] == wanted


def test_graphs_captured_while_idle_serve_all_sizes(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the largest batch, whose size is not one to which others are padded."""
    monkeypatch.setattr(graphs, "MIXED_TOKENS", 128)
    one = engine(decoder(), max_num_seqs=6)
    while one.idle():
        pass
    count = one.runner.graphs.num_captured
    assert count == len(Graph.every) and not replayed(one)
    assert not one.runner._last.any(), "a capture ran something"
    for number in range(6):
        one.add(request(str(number), [number + 1] * (3 + number), KINDS["greedy"](number)))
    drain(one)
    assert one.runner.graphs.num_captured == count and replayed(one) == one.stats()["steps"]


def test_a_load_that_has_run_once_runs_again_without_a_capture(gpu: None) -> None:
    """Once the sizes that came are captured, too, the same requests find a graph in each step."""
    one = engine(decoder(), max_num_seqs=6, max_num_batched_tokens=256, enable_prefix_caching=False)

    def load() -> None:
        for number in range(9):
            prompt = [(3 * number + 5 * at) % 61 for at in range(2 + 4 * number + 60 * (number == 0))]
            one.add(request(str(number), prompt, KINDS["greedy"](number)))
        drain(one)

    load()
    before, steps = one.runner.graphs.num_captured, one.stats()["steps"]
    assert replayed(one) < steps, "the first step of a size with prompts has no graph"
    assert one.runner.graphs.capture_seen() > 0
    count, already = one.runner.graphs.num_captured, replayed(one)
    load()
    assert one.runner.graphs.num_captured == count > before
    assert replayed(one) - already == one.stats()["steps"] - steps
    assert one.runner.graphs.capture_seen() == 0


def test_what_reads_a_value_cannot_be_captured(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then steps are launched, and the engine says so once."""
    _say.cache_clear()
    real = PagedBuffers.take

    def take(self: PagedBuffers, last: Tensor) -> None:
        real(self, last)
        assert self.tokens.sum().item() >= 0

    monkeypatch.setattr(PagedBuffers, "take", take)
    with pytest.warns(RuntimeWarning, match="without CUDA graphs.*not permitted when stream is capturing"):
        found, one = serve("plain", replays=True)
    assert found == serve("plain", replays=False)[0] and one.runner.graphs.num_captured == 0


def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third step's inputs do not arrive."""
    real, calls = placing.FixedInputs.send, iter(range(10**6))
    monkeypatch.setattr(placing.FixedInputs, "send", lambda self: None if next(calls) % 3 == 2 else real(self))


def padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding that looks like a sequence: it writes its keys to a page of another one."""
    real = PagedBuffers.fill

    def fill(self: PagedBuffers, batch: Any, sampling: Any = None, *more: Any) -> None:
        real(self, batch, sampling, *more)
        count = len(batch.tokens)
        self._pages[count:], self._offsets[count:] = int(batch.pages[0]), 0
        self.tokens[count:] = 5

    monkeypatch.setattr(PagedBuffers, "fill", fill)


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drawn tokens are not left where the next step reads them."""
    real = StepGraphs._pass
    monkeypatch.setattr(StepGraphs, "_pass", lambda self, buffers, key, last: real(self, buffers, key, last.clone()))


def baked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions as they were at the capture."""
    real = PagedBuffers.take

    def take(self: PagedBuffers, last: Tensor) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            self.positions = self.positions.clone()
        real(self, last)

    monkeypatch.setattr(PagedBuffers, "take", take)


def unseeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds of the step before."""
    real, kept = PagedBuffers.fill, [np.arange(6)]

    def fill(self: PagedBuffers, batch: Any, sampling: Any = None, *more: Any) -> None:
        real(self, batch, sampling, *more)
        if sampling is not None:
            seeds = self.seeds.clone().numpy()
            self.seeds[: len(kept[0])] = torch.from_numpy(kept[0][: len(self.seeds)])
            kept[0] = seeds

    monkeypatch.setattr(PagedBuffers, "fill", fill)


@pytest.mark.parametrize("fault", [stale, padding, elsewhere, baked, unseeded])
def test_faults_of_a_replay_are_seen(gpu: None, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, _ = serve("plain", replays=False)
    fault(monkeypatch)
    found, _ = serve("plain", replays=True, async_scheduling=True)
    assert found != wanted
