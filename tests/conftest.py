"""Fixtures every room's tests share."""

from __future__ import annotations

import gc
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest
from filelock import FileLock

from hone.base.run import Run
from hone.measure.calibration import (
    GRADIENT_SHAPES,
    SHAPES,
    AttentionRate,
    Bandwidth,
    Calibration,
    MatmulRate,
    keep_calibration,
)
from hone.measure.compilers import LIMITS, keep_kernels_apart
from hone.measure.machine import describe, identity
from hone.recipe import Recipe

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores: more threads than cores wait for each other
    _workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _workers)))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a GPU machine that runs only what is marked gpu
    pass
else:  # how long an example takes to draw or to run says something of the machine, nothing of hone
    _patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    # Each run draws the same examples, also where no variable CI says so: what passes here passes there.
    settings.register_profile("hone", **_patient, derandomize=True, database=None)
    # Other examples each time: `pytest --hypothesis-profile=explore`.
    settings.register_profile("explore", **_patient, derandomize=False)
    settings.load_profile("hone")

ROOT = Path(__file__).resolve().parent.parent
keep_kernels_apart()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before fixtures run: every test starts from the same random numbers, whatever this worker ran before it."""
    import torch

    torch.manual_seed(0)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name` that `make(folder)` fills: by the first worker that asks; the others wait, then share it.

    It is what a session fixture returns when making it takes seconds. Tests do not write into it.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder, whole = base / "shared" / name, base / "shared" / f"{name}.whole"
    folder.parent.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            whole.touch()
    _SHARED[folder] = _files(folder)
    return folder


_SHARED: dict[Path, set] = {}
"""What is in every folder that `made_once` gave this process."""


def _files(folder: Path) -> set:
    return {(path, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where workers share the files, the longest come first: else one worker waits at the end for the other's."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    seconds: dict[Path, float] = {}
    for item in items:
        slow = item.get_closest_marker("slow")
        about = 0.1 if slow is None else slow.kwargs.get("seconds", 5.0)
        seconds[item.path] = seconds.get(item.path, 0.0) + about
    items.sort(key=lambda item: -seconds[item.path])  # a stable order: equal files and a file's tests stay as they were


def pytest_collection_finish() -> None:
    """Garbage collection looks at what tests make, not at the million objects of their imports each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def shared_folders_stay() -> Iterator[None]:
    """What one file of tests leaves changes nothing for the next: folders that tests share are as they were made, and garbage
    collection does not visit imports and session fixtures of the files before."""
    yield
    for folder, files in _SHARED.items():
        _SHARED[folder] = _files(folder)
        changed = sorted({str(path) for path, *_ in files ^ _SHARED[folder]})
        assert not changed, f"a test of this file, or of another worker's, changed what tests share: {changed}"
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says on what the outcome of a test with rounded numbers or compiled kernels may depend."""
    import numpy
    import torch

    machine = describe()
    kernels = [f"torch {torch.backends.cpu.get_cpu_capability()}"]
    try:
        from bitsandbytes.functional import has_avx512bf16

        kernels.append(f"bitsandbytes {'bfloat16' if has_avx512bf16() else 'float32'}")
    except ImportError:
        pass
    try:
        from llvmlite.binding import get_host_cpu_name

        kernels.append(f"numba {get_host_cpu_name()}")
    except ImportError:
        pass
    limits = [f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ]
    blas = (
        numpy.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {}).get("name", "its BLAS not said")
    )
    terminalreporter.write_sep("=", "machine")
    terminalreporter.write_line(
        f"{machine.processor}, {os.cpu_count()} cores, {machine.memory_bytes / 2**30:.0f} GiB; "
        f"Python {platform.python_version()}, torch {torch.__version__}, numpy {numpy.__version__} ({blas})"
    )
    terminalreporter.write_line(f"kernels: {', '.join([*kernels, *limits])}")


@pytest.fixture(scope="session", autouse=True)
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A calibration with fixed rates in a cache folder of the session's own, for its subprocesses too.

    A machine that runs tests is busy: each command would measure its rates again, for seconds, and keep none.
    """
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    machine = describe()
    products = [("forward", shape) for shape in SHAPES]
    products += [(layout, shape) for layout in ("input_gradient", "weight_gradient") for shape in GRADIENT_SHAPES]
    keep_calibration(
        identity(machine),
        Calibration(
            device=machine.processor,
            threads=1,
            torch=str(machine.torch),
            read_bytes_per_s=1e10,
            copies=tuple(Bandwidth(num_bytes=1 << size, bytes_per_s=1e10) for size in (16, 20, 24, 28)),
            gathers=tuple(Bandwidth(num_bytes=1 << size, bytes_per_s=5e9) for size in (18, 21, 24, 26)),
            matmuls=tuple(
                MatmulRate(dtype="float32", m=m, n=n, k=k, flops_per_s=3e10, layout=layout)
                for layout, (m, n, k) in products
            ),
            attentions=(AttentionRate(dtype="float32", forward_flops_per_s=2e10, train_flops_per_s=8e9),),
            op_s=4e-6,
            exp_per_s=5e8,
            durable_s=0.002,
            disk_bytes_per_s=5e8,
        ),
    )
    describe.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """`os.fsync` returns at once, here and in forked processes: it guards against a power cut, which no test makes. What a killed
    process has written the system keeps. A training of many small steps would wait for the disk longer than it computes."""

    def synced(file: int | IO) -> None:
        os.fstat(file if isinstance(file, int) else file.fileno())  # a closed one is an error as before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", synced)
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data beside the checkout; the test skips where it is absent."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no ../shared/data beside the checkout")
    return folder


@pytest.fixture
def experts_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table line of the feed-forward of `experts_folder`."""
    from tests.model.extensions.routed_model import add_line

    add_line(monkeypatch)


@pytest.fixture(scope="session")
def experts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with experts (`tests.model.extensions.routed_model`), to be read with `experts_line`."""
    from tests.model.extensions.routed_model import write

    return made_once(tmp_path_factory, "experts", write)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a random two-layer Llama and a byte-level tokenizer, made by transformers itself."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("tiny-llama")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():  # wider than transformers' init, so that greedy text is not constant
            if parameter.dim() == 2:
                parameter.normal_(std=0.15)
    model.save_pretrained(folder)
    return folder


MINI = {
    "data.tokenizer.vocab_size": "512",
    "data.validation_fraction": "0.2",
    "train-base.steps": "12",
    "train-base.early_stopping": "{}",
    "train-base.batch_size": "4",
    "train-base.seq_len": "128",
    "train-base.checkpoint.interval": "5",
    "train-base.model": "{hidden_size: 64, num_layers: 4, num_heads: 4, num_kv_heads: 2, intermediate_size: 128}",
    "train-draft.steps": "6",
    "train-draft.early_stopping": "{}",
    "train-draft.batch_size": "4",
    "train-draft.seq_len": "128",
    **{
        f"compress-{name}.{field}": value
        for name in ("int8", "rtn4", "gptq4", "pruned")
        for field, value in (("num_sequences", "8"), ("seq_len", "128"))
    },
    "eval.max_tokens": "2000",
}
SERVE = {
    "num_requests": "6",
    "prompt_tokens": "[4, 12]",
    "output_tokens": "[4, 12]",
    "shared_prefix": "16",
    "engine.max_model_len": "48",  # what the samples are as long as
}


def mini_recipe(source: Path) -> Recipe:
    """recipes/tiny.yaml, shrunk to seconds and fed from `source`."""
    recipe = Recipe.load(ROOT / "recipes" / "tiny.yaml")
    stages = [{**entry, "repeats": 2} if "repeats" in entry else entry for entry in recipe.stages]
    recipe = recipe.model_copy(update={"stages": stages})
    serving = {
        f"serve-{entry['name']}.{key}": value
        for entry in stages
        if entry["stage"] == "serve"
        for key, value in SERVE.items()
    }
    return recipe.override({"data.source": str(source), **MINI, **serving})


@pytest.fixture(scope="session")
def mini_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text that every machine has: a few modules of the standard library."""
    import json as json_module

    def make(folder: Path) -> None:
        package = Path(json_module.__file__).parent
        for path in sorted([*package.glob("*.py"), *(package.parent / "email").glob("*.py")]):
            shutil.copy2(path, folder / path.name)

    return made_once(tmp_path_factory, "source", make)


@pytest.fixture(scope="session")
def mini_line(mini_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose work/tiny holds every artifact of the tiny recipe, made small, and its report."""
    from hone.report import build

    def make(home: Path) -> None:
        build(mini_recipe(mini_source).run(home / "work", Run(quiet=True)))

    return made_once(tmp_path_factory, "home", make)


def byte_tokenizer():
    """A byte-level BPE tokenizer of 320 tokens trained on one sentence, with `<|endoftext|>` and a chat template."""
    import tokenizers
    import transformers

    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(["the quick brown fox jumps over the lazy dog and the cat sat on the mat"] * 4, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return tokenizer
