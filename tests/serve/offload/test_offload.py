"""Layers in host memory: the same tokens as with all layers on the device, for every kind of weight; and its errors."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from hone.base.errors import FitError, HoneError, MachineError, SpecError
from hone.base.figure import byte_count
from hone.model import hf
from hone.ops.cpu.isa import cpu_isa
from hone.serve.engine import Engine, EngineSpec
from hone.serve.http import ServerSpec
from hone.serve.offload import budget, pinned
from hone.serve.offload.opening import weights_on_device
from hone.serve.offload.stream import LayerStream
from hone.serve.paging.cache import KVCache, cache_tensors
from hone.serve.paging.compiled_step import why_not
from tests.model.parallel.quantized_folder import write_quantized
from tests.model.parallel.test_reading import SCHEMES
from tests.serve.paging.test_compiled_step import layer_by_layer, packed
from tests.serve.small import (
    VOCAB,
    assert_all_free,
    decoder,
    drain,
    engine,
    greedy,
    poison_freed_pages,
    request,
    tokens_of,
)

CPU = torch.device("cpu")
SPEC = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_pages": 64}
LAYERS = 7
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("model")
    hf.save(decoder(num_layers=LAYERS, hidden_size=64, intermediate_size=256), made)
    return made


@pytest.fixture
def poisoned(monkeypatch):
    """A buffer is full of NaN as soon as its layer has computed; a CPU streams, too."""
    monkeypatch.setattr(budget, "DEVICES", ["cuda", "cpu"])
    leave = LayerStream._leave

    def wipe(self, slot):
        leave(self, slot)
        self._buffers[slot].fill_(255)

    monkeypatch.setattr(LayerStream, "_leave", wipe)


def streamed(model, layers: list[int]) -> LayerStream:
    """The given layers of a model in host memory."""
    stream = LayerStream(CPU)
    for index in layers:
        stream.take(model.layers[index])
    stream.open()
    return stream


def smallest(folder: Path, **spec) -> str:
    with pytest.raises(SpecError, match="gpu_memory is") as caught:
        Engine(folder, EngineSpec.read({**SPEC, "gpu_memory": "1MiB", **spec}))
    return caught.value.fix.split("=")[1].split()[0]


def amount(folder: Path, layers: float, **spec) -> str:
    """The smallest gpu_memory and `layers` more."""
    return str(int(byte_count(smallest(folder, **spec)) + layers * 4 * 61_000))


def all_tokens(one: Engine) -> dict[str, list[int]]:
    """Prompts that share a prefix, and others; more than fit at once."""
    shared = [5, 9, 2, 7, 1, 8, 3, 3, 6]
    for name in range(7):
        prompt = [*shared, name] if name % 2 else [(3 * name + place) % VOCAB for place in range(3 + 6 * name)]
        one.add(request(str(name), prompt, greedy(12 + name)))
    outputs = drain(one)
    assert not any(output.error for each in outputs.values() for output in each)
    assert_all_free(one)
    return {name: tokens_of(each) for name, each in outputs.items()}


class TestStream:
    """Tokens of a model some of whose layers are in host memory."""

    pytestmark = pytest.mark.usefixtures("poisoned")

    @pytest.mark.parametrize(
        ("bits", "layers"),
        [(None, [0, 1, 2]), (None, [1, 3, 4, 6]), (None, list(range(LAYERS))), (8, [1, 3, 4, 6]), (4, [0, 2, 5])],
    )
    def test_dense_and_packed_weights(self, layers, bits, monkeypatch):
        layer_by_layer(monkeypatch)

        def made():
            model = (
                decoder(num_layers=LAYERS, hidden_size=64, head_dim=32, intermediate_size=96)
                .eval()
                .requires_grad_(False)
            )
            return model if bits is None else packed(model, bits, 32)

        resident, other = made(), made()
        stream = streamed(other, layers)
        for layer in other.layers:
            assert all(one.device.type == "cpu" for one in (*layer.parameters(), *layer.buffers()))
        assert weights_on_device(other) < weights_on_device(resident) or len(layers) == 3
        assert all_tokens(engine(other, num_pages=16)) == all_tokens(engine(resident, num_pages=16))
        assert stream.num_copies > 20 * len(layers)

    def test_strides_and_layers_of_unlike_sizes(self):
        model, x = decoder(num_layers=5).requires_grad_(False), torch.arange(20).view(1, 20)
        turned = model.layers[1].mixer.out.weight
        turned.data = turned.data.t().contiguous().t()
        model.layers[1].register_buffer("spare", torch.ones(3, 1000, dtype=torch.float64)[:, ::2])
        before = model(x)
        stream = streamed(model, [0, 1, 2, 4])
        assert stream.num_copies == 2, "the first two layers wait in their buffers"
        assert (
            torch.equal(model.layers[1].mixer.out.weight, turned)
            and model.layers[1].mixer.out.weight.stride() == turned.stride()
        )
        assert model.layers[1].spare.sum() == 1500 and model.layers[1].spare.stride() == (1000, 2)
        for _ in range(3):
            assert torch.equal(model(x), before)

    def test_a_pass_that_fails_or_ends_early_is_followed_by_a_right_one(self):
        model, x = decoder(num_layers=LAYERS).requires_grad_(False), torch.arange(20).view(1, 20)
        before = model(x)
        stream = streamed(model, [0, 2, 3, 5, 6])
        for failing in range(LAYERS):
            once = model.layers[failing].mixer.register_forward_pre_hook(partial(_fail, failing))
            with pytest.raises(ArithmeticError, match=str(failing)):
                model(x)
            once.remove()
            assert torch.equal(model(x), before)
        copies = stream.num_copies
        assert torch.equal(model(x), before) and stream.num_copies == copies + 5, "each layer once a pass"

    def test_a_failing_step_of_an_engine_is_run_in_halves(self):
        resident, other = decoder(num_layers=LAYERS), decoder(num_layers=LAYERS)
        streamed(other, [1, 3, 4, 6])
        one, calls = engine(other), []

        def fail_at_times(*_):
            calls.append(1)
            if len(calls) in (3, 9, 10):
                raise ArithmeticError("at times")

        other.layers[3].mixer.register_forward_pre_hook(fail_at_times)
        assert all_tokens(one) == all_tokens(engine(resident))

    def test_memory_is_free_when_the_model_is_gone(self):
        model = decoder(num_layers=3)
        stream = weakref.ref(streamed(model, [0, 1, 2]))
        gc.disable()
        try:
            del model
            assert stream() is None, "no circle keeps buffers and pinned memory"
        finally:
            gc.enable()

    def test_a_compiled_step_does_not_pass_the_layers_by(self):
        model = decoder(num_layers=3)
        cache = KVCache(cache_tensors(model.config), 4, 4)
        assert "hook" not in (why_not(model, cache) or "")
        streamed(model, [0, 1, 2])
        assert not cpu_isa() or "forward hook" in why_not(model, cache)

    def test_scales_that_the_cache_reads_stay_where_they_are(self):
        model = decoder(num_layers=3)
        rounding = model.layers[1].mixer.kv_rounding = nn.Module()
        rounding.register_buffer("k_scale", torch.full((2,), 0.5))
        stream = LayerStream(CPU)
        for layer in model.layers:
            stream.take(layer)
        assert model.layers[1].mixer.kv_rounding.k_scale.tolist() == [0.5, 0.5]
        assert model.layers[1].mixer.out.weight.is_meta


def _fail(failing: int, *_) -> None:
    raise ArithmeticError(str(failing))


class TestEngine:
    """Folders served with a gpu_memory, on a CPU as the device."""

    pytestmark = pytest.mark.usefixtures("poisoned")

    @pytest.mark.parametrize(
        "more",
        [
            {},
            {"num_pages": 18, "max_model_len": 60},
            {"async_scheduling": True, "enable_prefix_caching": False},
            {"drafter": {"kind": "prompt_lookup"}},
            {"kv_policy": {"kind": "streaming_llm", "sink_tokens": 4, "window": 12}},
            {"kv_policy": {"kind": "snapkv", "budget": 24, "window": 4}},
        ],
    )
    def test_the_same_tokens(self, folder, more):
        spec = {**SPEC, **more}
        one = Engine(folder, EngineSpec.read({**spec, "gpu_memory": amount(folder, 2, **more)}))
        resident = Engine(folder, EngineSpec.read(spec))
        assert "stream" in one.sizes and weights_on_device(one.model) < 0.7 * weights_on_device(resident.model)
        poison_freed_pages(one)
        assert all_tokens(one) == all_tokens(resident)
        if "num_pages" in more:
            assert one.stats()["preemptions"] > 0
        if not more:
            assert one.stats()["prefix_hit_tokens"] > 0

    def test_random_weights_are_the_same_streamed(self, folder):
        spec = {**SPEC, "load_format": "dummy"}
        one = Engine(folder, EngineSpec.read({**spec, "gpu_memory": amount(folder, 0)}))
        assert f"0 of {LAYERS} layers stay on cpu, {LAYERS} stream" in one.sizes
        assert all_tokens(one) == all_tokens(Engine(folder, EngineSpec.read(spec)))

    @pytest.mark.parametrize("name", ["int4 with zero points", "gptq", "fp8 blocks", "nvfp4"])
    def test_quantized_folders(self, name, tmp_path, monkeypatch):
        layer_by_layer(monkeypatch)
        model = decoder(num_layers=5, hidden_size=128, intermediate_size=512)
        made = write_quantized(model, tmp_path / "model", *SCHEMES[name])
        least = byte_count(smallest(made))
        spec = {**SPEC, "gpu_memory": str(least + 300_000)}
        one, resident = Engine(made, EngineSpec.read(spec)), Engine(made, EngineSpec.read(SPEC))
        assert "stream" in one.sizes and weights_on_device(one.model) < weights_on_device(resident.model)
        assert all_tokens(one) == all_tokens(resident)

    def test_the_smallest_amount_works_and_more_keeps_more_layers(self, folder):
        least, stay = byte_count(smallest(folder)), []
        for layers in (0, 1.1, 2.1, 4.1, 8):
            one = Engine(folder, EngineSpec.read({**SPEC, "gpu_memory": str(int(least + layers * 250_000))}))
            stay.append(LAYERS - sum(bool(layer._forward_pre_hooks) for layer in one.model.layers))
        assert stay[0] == 0 and stay == sorted(stay) and stay[-1] == LAYERS
        with pytest.raises(SpecError):
            Engine(folder, EngineSpec.read({**SPEC, "gpu_memory": str(least - 20_000)}))

    def test_the_cache_takes_what_is_left(self, folder):
        unsized = {**SPEC, "num_pages": None}
        most = 4 * 128 // 4
        pages = []
        for layers in (0, 3, 40):
            one = Engine(folder, EngineSpec.read({**unsized, "gpu_memory": amount(folder, layers, num_pages=None)}))
            pages.append(one.pool.num_pages)
            assert 32 <= one.pool.num_pages <= most, "at least one longest sequence, at most max_num_seqs of them"
        assert pages[-1] == most
        given = {**SPEC, "num_pages": None, "kv_cache_memory_bytes": 300_000}
        one = Engine(
            folder,
            EngineSpec.read({**given, "gpu_memory": amount(folder, 1, num_pages=None, kv_cache_memory_bytes=300_000)}),
        )
        assert 290_000 < one.cache_bytes <= 300_000

    def test_quantized_layers_larger_than_expected_are_an_error_with_numbers(self, folder, monkeypatch):
        monkeypatch.setattr(budget, "layer_sizes", lambda model, dtype: (0.0, [100_000.0] * LAYERS))
        with pytest.raises(FitError, match="weights take") as caught:
            Engine(folder, EngineSpec.read({**SPEC, "gpu_memory": smallest(folder)}))
        assert "engine.gpu_memory=" in caught.value.fix


class TestErrors:
    @pytest.mark.parametrize(
        ("more", "named"),
        [
            ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization"),
            ({"tensor_parallel_size": 2}, "several ranks"),
            ({"pipeline_parallel_size": 2}, "several ranks"),
            ({"draft": "folder"}, "draft model"),
            ({"drafter": {"kind": "draft_model"}}, "draft model"),
            ({"sparsity": "2:4"}, "sparsity"),
            ({"gpu_memory": "all"}, "no amount of memory"),
            ({"gpu_memory": "0GiB"}, "no amount of memory"),
        ],
    )
    def test_options_that_exclude_gpu_memory(self, more, named):
        with pytest.raises(SpecError, match=named):
            EngineSpec.read({"gpu_memory": "1GiB", **more})

    def test_gpu_memory_is_an_option_of_the_engine(self):
        assert ServerSpec.from_overrides({"engine.gpu_memory": "80%"}).engine.gpu_memory == "80%"
        with pytest.raises(SpecError) as caught:
            ServerSpec.from_overrides({"gpu_memory": "1GiB"})
        assert "'engine.gpu_memory'" in caught.value.fix

    def test_amounts_may_be_numbers(self):
        assert EngineSpec.read({"gpu_memory": 5_000_000}).gpu_memory == "5000000"

    def test_a_cpu_has_no_memory_of_its_own(self, folder):
        with pytest.raises(SpecError, match="device is cpu"):
            Engine(folder, EngineSpec(gpu_memory="1GiB"))

    def test_more_than_is_free_and_a_given_model(self, folder, poisoned):
        with pytest.raises(FitError, match="free"):
            Engine(folder, EngineSpec(gpu_memory="9000TB"))
        with pytest.raises(SpecError, match="model is given"):
            Engine(decoder(), EngineSpec(gpu_memory="1GiB"))
        with pytest.raises(SpecError, match="draft"):
            Engine(folder, EngineSpec(gpu_memory="1GiB"), draft=decoder())

    def test_host_memory_that_is_not_there_or_cannot_be_pinned(self, monkeypatch):
        with pytest.raises(FitError, match="of host memory"):
            pinned.check_host(1e18)
        monkeypatch.setattr(pinned, "_register", lambda address, size: 2)
        with pytest.raises(MachineError, match="ulimit -l") as caught:
            pinned.host_memory(10_000, pin=True)
        assert "RAM are free" in caught.value.what and isinstance(caught.value, HoneError)

    def test_host_memory_is_given_back_before_it_is_unmapped(self, monkeypatch):
        seen = []
        monkeypatch.setattr(pinned, "_register", lambda address, size: seen.append((address, size)) or 0)
        monkeypatch.setattr(pinned, "_unregister", seen.append)
        memory = pinned.host_memory(10_000, pin=True)
        assert len(memory) == 10_000 and seen == [(memory.data_ptr(), 12_288)] and memory.data_ptr() % 4096 == 0
        del memory
        assert seen[1:] == [seen[0][0]]


class TestOnGPU:
    """Two buffers on a GPU and a stream of copies: the same tokens as with all layers there, in the memory that is given."""

    pytestmark = on_gpu

    def model(self):
        return decoder(num_layers=9, hidden_size=256, head_dim=64, intermediate_size=1024, max_seq_len=512)

    @pytest.mark.parametrize("layers", [[0, 1, 2], [1, 3, 5, 7], list(range(9))])
    @pytest.mark.parametrize("bits", [None, 8, 4])
    def test_the_same_tokens(self, layers, bits):
        found = []
        for streams in (False, True):
            model = self.model().requires_grad_(False)
            model = (model if bits is None else packed(model, bits, 64)).to("cuda", torch.bfloat16)
            if streams:
                stream = LayerStream(torch.device("cuda", torch.cuda.current_device()))
                for index in layers:
                    stream.take(model.layers[index])
                stream.open()
            spec = {"block_size": 16, "num_pages": 60, "max_num_seqs": 4, "max_num_batched_tokens": 40}
            one = Engine(model, EngineSpec.read(spec), device="cuda")
            one.runner.graphs = None
            found.append(all_tokens(one))
        assert found[0] == found[1]

    def test_a_folder_within_its_memory(self, tmp_path):
        model = decoder(num_layers=9, hidden_size=1024, head_dim=64, intermediate_size=4096, max_seq_len=512)
        hf.save(model.to(torch.bfloat16), tmp_path)
        spec = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
        with pytest.raises(SpecError) as caught:
            Engine(tmp_path, EngineSpec.read({**spec, "gpu_memory": "1MiB"}), device="cuda")
        least = byte_count(caught.value.fix.split("=")[1].split()[0])
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        whole = 2 * sum(one.numel() for one in model.parameters())
        torch.cuda.reset_peak_memory_stats()
        given = least + (40 << 20)
        one = Engine(tmp_path, EngineSpec.read({**spec, "gpu_memory": str(given)}), device="cuda")
        assert "stream" in one.sizes and one.runner.graphs is None
        tokens = all_tokens(one)
        assert given + (64 << 20) < whole, "64 MiB: workspaces of libraries"
        assert torch.cuda.max_memory_allocated() - before <= given + (64 << 20)
        resident = Engine(tmp_path, EngineSpec.read(spec), device="cuda")
        resident.runner.graphs = None
        assert all_tokens(resident) == tokens
