"""The real model stories260K: llama2.c's own expected story, transformers' logits, and its loss on TinyStories.

The loss is 1.482 nats/token on the first 20 windows of tinystories-200K.txt, tokenized as one text and cut into windows
of 511 tokens behind a BOS (21.5 KB; 1.007 bits/byte). The figure known for this model is 1.487. The file's later part is
not what the model was trained on (other authors, mis-decoded quotation marks) and costs 1.90 nats/token under the same
convention.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

from hone.model import hf
from hone.model.tokenizer import load_tokenizer
from tests.model.llama2c import convert

# What `run stories260K.bin -z tok512.bin -t 0.0 -n 200` prints: github.com/karpathy/llama2.c, test_all.py.
STORY = """Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a \
big, red ball. She wanted to play with it, but it was too high.
Lily's mom said, "Lily, let's go to the park." Lily was sad and didn't know what to do. She said, "I want to play with \
your ball, but I can't find it."
Lily was sad and didn't know what to do. She said, "I'm sorry, Lily. I didn't know what to do."
Lily didn't want to help her mom, so she"""


@pytest.fixture(scope="module")
def folder(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = shared_data / "models" / "stories260K"
    return convert(source / "stories260K.bin", source / "tok512.bin", tmp_path_factory.mktemp("stories260K"))


@torch.no_grad()
def test_it_tells_the_story_that_llama2c_tells(folder: Path) -> None:
    model, tokenizer = hf.load(folder), load_tokenizer(folder)
    tokens = [1]
    for _ in range(200):
        tokens.append(int(model(torch.tensor(tokens))[-1].argmax()))
    assert tokenizer.decode(tokens) == STORY


@torch.no_grad()
def test_logits_equal_transformers(folder: Path) -> None:
    """In float64: in float32 another order of sums alone is nine tenths of the bound, and which order is the CPU's affair."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).double()
    ours = hf.load(folder).double()
    assert ours.config.num_params == 260_032
    tokens = torch.tensor([load_tokenizer(folder).encode(STORY)])
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=2e-5, rtol=0)


@torch.no_grad()
def test_loss_on_its_text(folder: Path, shared_data: Path) -> None:
    text = (shared_data / "lm_text" / "tinystories-200K.txt").read_text(encoding="utf8")
    model, tokenizer = hf.load(folder), load_tokenizer(folder)
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False)[: 20 * 511]).view(20, 511)
    rows = torch.cat([torch.full((20, 1), tokenizer.bos_id), ids], dim=1)
    loss = F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:]).item()
    assert loss == pytest.approx(1.487, abs=0.01)


def test_tokens_are_those_of_transformers(folder: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert load_tokenizer(folder).encode(STORY) == theirs(STORY).input_ids
