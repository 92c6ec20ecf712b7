"""Small models and calibration text for the compression tests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.compress.stage import Compress
from tests.conftest import byte_tokenizer

MORE = {
    "qwen3": {"head_dim": 32},
    "phi3": {"partial_rotary_factor": 0.5},
    "gemma2": {"head_dim": 32, "sliding_window": 8},
    "gemma3_text": {"head_dim": 32, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {"residual_multiplier": 0.3, "embedding_multiplier": 6.0, "logits_scaling": 4.0},
    "smollm3": {"no_rope_layers": [1, 0]},
}
"""What the families' small models have besides common sizes."""
SENTENCES = ["the quick brown fox jumps over the lazy dog", "and the cat sat on the mat", "a dog and a fox met"]


@pytest.fixture(scope="session")
def calibration_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(". ".join(SENTENCES[number * number % 3] for number in range(600)))
    return path


@pytest.fixture
def compress(tmp_path: Path, calibration_text: Path):
    """compress(model folder, *steps, name=..., **spec) -> Artifact; calibrated with `calibration_text` where a step needs it."""

    def make(model: Path, *steps: dict, name: str = "small", **spec) -> Artifact:
        values = {"steps": list(steps), "num_sequences": 16, "seq_len": 32, **spec}
        if any(step["kind"] in ("gptq", "gptaq", "sorted_groups", "autoround", "sparsegpt") for step in steps):
            values.setdefault("calibration_text", str(calibration_text))
        parents = {"model": Artifact.read(model)}
        return Compress.read(values).make(tmp_path / f"compress-{name}", parents, Run(quiet=True))

    return make


@pytest.fixture(scope="session")
def stories(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, torch.Tensor]:
    """The stories260K model, a text file to calibrate with, and token rows [B, 256] of another part of the text."""
    from hone.model.tokenizer import load_tokenizer
    from tests.model.llama2c import convert

    folder = tmp_path_factory.mktemp("stories")
    source = shared_data / "models" / "stories260K"
    model = convert(source / "stories260K.bin", source / "tok512.bin", folder / "model")
    text = (shared_data / "lm_text" / "tinystories-200K.txt").read_text(encoding="utf8")
    calibration = folder / "calibration.txt"
    calibration.write_text(text[: len(text) // 2], encoding="utf8")
    ids = torch.tensor(load_tokenizer(model).encode(text[-len(text) // 8 :]))
    return model, calibration, ids[: len(ids) // 256 * 256].view(-1, 256)


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory):
    """family_folder(name, hidden_size=64, ...): a random two-layer model of that family with a byte-level tokenizer."""
    import transformers

    made: dict[tuple, Path] = {}

    def make(family: str, hidden_size: int = 64, intermediate_size: int = 96, **options) -> Path:
        key = (family, hidden_size, intermediate_size, *options.items())
        if key in made:
            return made[key]
        tokenizer = byte_tokenizer()
        more = {"num_key_value_heads": 2} | MORE.get(family, {}) | options
        config = transformers.AutoConfig.for_model(
            family,
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            tie_word_embeddings=family in ("llama", "qwen3", "gemma2", "smollm3"),
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            pad_token_id=None,
            **more,
        )
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.1) if parameter.dim() == 2 else parameter.add_(
                    0.1 * torch.randn_like(parameter)
                )
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        made[key] = folder
        return folder

    return make


def must_serve_what_it_computes(folder: Path) -> None:
    """Greedy tokens of the engine equal those of the loaded model."""
    import hone
    from hone.model.hf import load
    from hone.model.incremental import generate

    model, prompt = load(folder), list(range(60, 72))
    with torch.no_grad():
        wanted = generate(model, torch.tensor([prompt]), 8)[0].tolist()[-8:]
    params = hone.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    done = hone.Engine(folder).generate([prompt], params)[0]
    assert done.error is None and done.tokens == wanted


@contextmanager
def stopped_before(index: int) -> Iterator[None]:
    """Compressions inside are interrupted before layer `index`."""
    from hone.compress.stream import Stream

    done = Stream._compress_layer

    def stop(*arguments):
        if arguments[-1] == index:
            raise KeyboardInterrupt
        return done(*arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Stream, "_compress_layer", stop)
        yield


def perplexity(folder: Path, rows: torch.Tensor) -> float:
    """exp of the mean next-token loss over token rows [B, S]."""
    from hone.model.hf import load

    model, total = load(folder), 0.0
    with torch.no_grad():
        for part in rows.split(16):
            logits = model(part[:, :-1])
            total += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
    return math.exp(total / rows[:, 1:].numel())
