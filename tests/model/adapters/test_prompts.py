"""Soft prompts: PEFT as the oracle both ways, first values, documents, windows and caches, and what cannot have one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hone.base.errors import ArtifactError, SpecError
from hone.exports.merged.write import merge
from hone.model import hf
from hone.model.adapters import ADAPTERS, peft
from hone.model.adapters.prompts.attend import Prefixed
from hone.model.adapters.trainable import Trainable
from hone.model.context import Causal, Context, Packed
from hone.model.decoder import Decoder, build
from hone.model.incremental import generate
from hone.model.shape import Shape
from hone.serve.paging.cache import cache_tensors
from tests.conftest import byte_tokenizer
from tests.model.adapters.test_techniques import SIZES, TOKENS, adapters, library, theirs

COUNT = 5
TECHNIQUES: dict[str, dict[str, Any]] = {
    "prefix": {"kind": "prefix", "init": "random"},
    "prefix of an MLP": {"kind": "prefix", "init": "random", "encoder_hidden_size": 7},
    "v2": {"kind": "p_tuning_v2"},
    "prompt tuning": {"kind": "prompt_tuning"},
    "P-tuning": {"kind": "p_tuning", "encoder_hidden_size": 9},
    "P-tuning of an LSTM": {"kind": "p_tuning", "encoder_type": "lstm"},
}
TEXT = {"init": "text", "init_text": "the cat"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts") / "model"
    tokenizer = byte_tokenizer()
    hf.save(build(Shape(**SIZES, max_seq_len=64).config(len(tokenizer)), seed=1), folder)
    tokenizer.save_pretrained(folder)
    return folder


def begun(base: Path, spec: dict[str, Any], *, moved: bool = True) -> Decoder:
    """The model with a new prompt, whose numbers are moved."""
    adapter = ADAPTERS.read({"num_virtual_tokens": COUNT, **spec})
    model = Trainable(hf.Checkpoint(base), adapter).build("cpu", torch.float32)
    draw = torch.Generator().manual_seed(0)
    for part in adapters(model).values() if moved else ():
        with torch.no_grad():
            part.add_(torch.empty_like(part).normal_(std=0.2, generator=draw))
    return model


def written(model: Decoder, base: Path, folder: Path) -> Path:
    """Its PEFT folder."""
    names = peft.keys(model.config)
    adapter, tensors = model.config.prompt.exported({names[one]: model.get_parameter(one).detach() for one in names})
    peft.write(folder, model.config.model_copy(update={"adapters": (adapter,)}), tensors, str(base))
    return folder


def each_alone(model: Decoder, tokens: Tensor, ids: Tensor) -> Tensor:
    """The logits of a sequence's documents, each in a pass of its own."""
    return torch.cat([model(tokens[:, ids[0] == one]) for one in ids[0].unique()], 1)


@torch.no_grad()
@pytest.mark.parametrize("name", TECHNIQUES)
def test_peft_computes_what_hone_wrote(name: str, base: Path, tmp_path: Path) -> None:
    model = begun(base, TECHNIQUES[name])
    folder = written(model, base, tmp_path / "adapter")
    again, ours = hf.load(folder), model(TOKENS)
    assert again.config.trained_params == COUNT * (SIZES["hidden_size"] if "rompt" in name or "P-" in name else 64)
    torch.testing.assert_close(again(TOKENS), ours, rtol=0, atol=1e-6)
    assert float((ours - hf.load(base)(TOKENS)).abs().max()) > 1e-3
    loaded = library().PeftModel.from_pretrained(theirs(base), str(folder)).eval()
    torch.testing.assert_close(loaded(TOKENS).logits[:, -TOKENS.shape[1] :], ours, rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("name", ["PrefixTuningConfig", "PromptTuningConfig", "PromptEncoderConfig"])
def test_hone_computes_what_peft_wrote(name: str, base: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = getattr(library(), name)(task_type="CAUSAL_LM", num_virtual_tokens=COUNT)
    model = library().get_peft_model(theirs(base), config).eval()
    model.save_pretrained(tmp_path / "adapter")
    wanted = model(TOKENS).logits[:, -TOKENS.shape[1] :]
    torch.testing.assert_close(hf.load(tmp_path / "adapter")(TOKENS), wanted, rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["prefix", "prompt_tuning"])
def test_a_text_begins_as_if_it_stood_before_the_tokens(kind: str, base: Path) -> None:
    ids = (byte_tokenizer().encode("the cat") * 9)[:9]
    model, plain = begun(base, {"kind": kind, "num_virtual_tokens": 9, **TEXT}, moved=False), hf.load(base)
    wanted = plain(torch.cat((torch.tensor(ids).expand(2, -1), TOKENS), 1))[:, 9:]
    torch.testing.assert_close(model(TOKENS), wanted, rtol=0, atol=1e-5)


@torch.no_grad()
def test_an_mlp_that_begins_as_zero_gives_places_of_zeros(base: Path) -> None:
    """Keys and values of zero: a place takes its share of the attention and adds nothing."""
    model = begun(base, {"kind": "prefix", "init": "zero", "encoder_hidden_size": 7}, moved=False)
    assert not model.prompt.numbers().any() and model.prompt.embedding.any()


def test_a_vocabulary_s_rows_are_drawn_by_the_seed(base: Path) -> None:
    made = begun(base, {"kind": "prompt_tuning"}, moved=False).prompt.embedding.detach()
    table = hf.load(base).embedding.detach()
    assert all(bool((table == row).all(1).any()) for row in made)
    other = Trainable(hf.Checkpoint(base), ADAPTERS.read({"kind": "prompt_tuning", "num_virtual_tokens": COUNT}), 1)
    assert not torch.equal(other.build("cpu", torch.float32).prompt.embedding.detach(), made)


@torch.no_grad()
@pytest.mark.parametrize("name", ["prefix", "prompt tuning"])
@pytest.mark.parametrize("window", [None, 8])
def test_every_document_follows_the_prompt(name: str, window: int | None, base: Path) -> None:
    """Packed documents, sequences one by one and a cache compute the same, with windows that reach into the prompt, too."""
    model = begun(base, TECHNIQUES[name])
    if window is not None:
        for layer in model.layers:
            layer.mixer.options["window"] = window
    ids = torch.tensor([[0] * 7 + [1] * 12 + [2]])
    row = TOKENS[:1]
    torch.testing.assert_close(model(row, Packed(ids)), each_alone(model, row, ids), rtol=0, atol=1e-6)
    grown, now = generate(model, row, 6), row
    for _ in range(6):
        now = torch.cat((now, model(now)[:, -1:].argmax(-1)), 1)
    assert torch.equal(grown, now)
    assert torch.equal(generate(model, row, 6, chunk=3), now)


@pytest.mark.parametrize("window", [None, 8])
def test_masks_of_kernels_are_those_of_torch(window: int | None) -> None:
    """hone.ops.attend on the mask's rule against a loop over queries in float64, values and gradients."""
    from hone.ops import attend

    ids = torch.tensor([[0] * 7 + [1] * 13, [0] * 20])
    context = Prefixed(Packed(ids), {}, COUNT)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 2, 8, generator=draw, dtype=torch.float64) for n in (20, 25, 25))
    found = attend(q, k, v, context._mask(window), scale=0.3)
    for row in range(2):
        for at in range(20):
            begin = 7 if row == 0 and at >= 7 else 0
            places = torch.cat((torch.arange(COUNT), COUNT + torch.arange(begin, at + 1)))
            if window is not None:
                places = places[-window:]  # of a document, the prompt's places come right before its first
            scores = torch.einsum("hd,khd->hk", q[row, at], k[row, places]) * 0.3
            wanted = torch.einsum("hk,khd->hd", scores.softmax(-1), v[row, places])
            torch.testing.assert_close(found[row, at], wanted)


def test_gradients_are_those_of_the_tokens_in_front(base: Path) -> None:
    """The loss through recorded keys and values against embeddings that stand in the sequence, in float64."""
    model = begun(base, {"kind": "prompt_tuning"}).double()
    model(TOKENS).square().mean().backward()
    whole = torch.cat((torch.zeros(2, COUNT, dtype=torch.int64), TOKENS), 1)
    rows = model.prompt.embedding.detach().clone().requires_grad_()
    context, prompt, model.prompt = Causal(whole), model.prompt, None
    x = torch.cat((rows.expand(2, -1, -1), model.embed(TOKENS)), 1)
    model.prepare(x, context)
    for layer in model.layers:
        x = layer(x, context)
    model.head(x)[:, COUNT:].square().mean().backward()
    torch.testing.assert_close(prompt.embedding.grad, rows.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"kind": "prefix", "init": "text"}, "init_text belong together"),
        ({"kind": "prefix", **TEXT, "encoder_hidden_size": 4}, "no MLP begins with"),
        ({"kind": "prefix", "init": "zero"}, "makes all places alike"),
        ({"kind": "p_tuning_v2", "encoder_hidden_size": 4}, "has no encoder"),
        ({"kind": "prompt_tuning", "init": "text", "init_text": ""}, "belong together"),
    ],
)
def test_options_that_do_not_fit_are_one_error(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        ADAPTERS.read(spec)


def test_models_and_passes_without_a_place_for_it_are_one_error(base: Path, tmp_path: Path) -> None:
    config = Shape(**SIZES, max_seq_len=64, mixers=("retnet",)).config(50)
    with pytest.raises(SpecError, match="layer 0 mixes with 'retnet'"):
        peft.adapted(config, ADAPTERS.read("prefix"))
    model = begun(base, {"kind": "prefix"})

    class Other(Context):
        positions = torch.arange(20).expand(2, 20)

    with pytest.raises(SpecError, match="cannot follow a soft prompt"):
        model(TOKENS, Other())
    with pytest.raises(SpecError, match="pages do not hold"):
        cache_tensors(model.config)
    folder = written(model, base, tmp_path / "adapter")
    with pytest.raises(SpecError, match="is not around linears"):
        merge(folder, tmp_path / "merged")
    values = (folder / peft.CONFIG).read_text().replace('"CAUSAL_LM"', "null")
    (folder / peft.CONFIG).write_text(values)
    with pytest.raises(ArtifactError, match="task_type is None"):
        hf.load(folder)
