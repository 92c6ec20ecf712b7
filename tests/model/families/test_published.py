"""Published configs with random weights against transformers: logits below and above the old context, saving, serving, compression."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from hone.base.errors import HoneError, SpecError
from hone.model import hf
from hone.model.context import Causal, Packed
from hone.model.decoder import build
from hone.model.families import FAMILIES
from hone.model.families.config_json import from_hf, to_hf
from hone.model.incremental import generate
from hone.model.linear_spec import Norm, Stream, outputs_of
from hone.model.norm import RMSNorm
from hone.model.shape import Shape
from hone.train.objectives.next_token import NextToken
from tests.model.families.published import PUBLISHED, SMALL
from tests.model.test_linear_spec import local_layer, rows_of, spread
from tests.serve.small import drain, engine, greedy, request, tokens_of

LENGTHS = (21, 57)
"""Below and above the old context of every scaling, and above every window."""


def theirs(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def prompt(length: int, rows: int = 2) -> torch.Tensor:
    draw = torch.Generator().manual_seed(length)
    return torch.randint(3, SMALL["vocab_size"], (rows, length), generator=draw)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_equal_transformers_both_ways(name: str, folder_of, tmp_path: Path) -> None:
    folder = folder_of(name)
    ours, model = hf.load(folder), theirs(folder)
    assert sum(one.numel() for one in ours.parameters()) == ours.config.num_params == model.num_parameters()
    logits = [model(prompt(length)).logits for length in LENGTHS]
    for length, expected in zip(LENGTHS, logits):
        assert expected.std() > 0.05
        torch.testing.assert_close(ours(prompt(length)), expected, atol=1e-4, rtol=1e-4)
    hf.save(ours, tmp_path)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    again = theirs(tmp_path)
    for length, expected in zip(LENGTHS, logits):
        torch.testing.assert_close(again(prompt(length)).logits, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_config_is_read_in_every_form(name: str, folder_of, tmp_path: Path) -> None:
    """As published, as transformers 5 writes it again, and as hone writes it."""
    values = {**PUBLISHED[name], **SMALL}
    config = from_hf(values)
    transformers.AutoConfig.from_pretrained(folder_of(name)).save_pretrained(tmp_path)
    rewritten = json.loads((tmp_path / "config.json").read_text(encoding="utf8"))
    assert from_hf({**rewritten, "architectures": None}) == config
    assert from_hf(json.loads(json.dumps(to_hf(config)))) == config
    assert type(config).read(config.model_dump(mode="json")) == config


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.just(2.5), st.text(max_size=3), st.lists(st.integers(), max_size=2),
    st.dictionaries(
        st.sampled_from(["factor", "type", "rope_type", "short_factor", "full_attention", "original_max_position_embeddings"]),
        st.sampled_from([-1, 2, None, "yarn", "longrope", "dynamic", [1.0], {}]), max_size=4,
    ),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(PUBLISHED)), st.data())
def test_any_broken_config_is_a_spec_error(name: str, data: st.DataObject) -> None:
    values = {**PUBLISHED[name], **SMALL}
    fields = st.sampled_from(sorted({*values, "rope_parameters", "rope_scaling", "query_pre_attn_scalar"}))
    changes = data.draw(st.dictionaries(fields, JUNK, min_size=1, max_size=3))
    try:
        from_hf({**values, **changes})
    except HoneError as error:
        assert isinstance(error, SpecError) and error.fix


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_engine_computes_what_whole_passes_compute(name: str, folder_of) -> None:
    """Prefill in chunks and decoding from pages, and `generate`, on both sides of the old context."""
    model = hf.load(folder_of(name))
    long, short = prompt(40, 1)[0].tolist(), prompt(9, 1)[0].tolist()
    longest = max(model.config.max_seq_len, 64)
    one = engine(model, max_num_batched_tokens=16, max_model_len=longest)
    one.add(request("a", long, greedy(8, prompt_logprobs=0, logprobs=0)))
    one.add(request("b", short, greedy(8, prompt_logprobs=0, logprobs=0)))
    found = drain(one)
    for key, start in (("a", long), ("b", short)):
        made = tokens_of(found[key])
        assert generate(model, torch.tensor([start]), 8, chunk=7, rope_len=longest)[0, len(start) :].tolist() == made
        tokens = torch.tensor([start + made])
        context = Causal(tokens)
        context.rope_len = longest
        expected = model(tokens, context)[0].log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
        served = [entry.logprob for entry in found[key][0].prompt_logprobs[1:]]
        served += [entry.logprob for output in found[key] for entry in output.logprobs]
        torch.testing.assert_close(torch.tensor(served), expected, atol=1e-4, rtol=1e-4)


FAMILY_EXAMPLES = ("gemma2-27b", "gemma3-4b-text", "phi4-mini", "granite3", "olmo2", "smollm3")


@pytest.mark.parametrize("name", FAMILY_EXAMPLES)
def test_a_packed_document_is_computed_as_alone(name: str, folder_of) -> None:
    model = hf.load(folder_of(name))
    tokens = prompt(57)
    ids = (torch.arange(57) >= 20).long().expand(2, 57)
    packed = model(tokens, Packed(ids))
    for part in (slice(0, 20), slice(20, 57)):
        context = Causal(tokens[:, part])
        context.rope_len = 57
        torch.testing.assert_close(packed[:, part], model(tokens[:, part], context), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILY_EXAMPLES)
def test_training_takes_the_loss_of_the_logits(name: str, folder_of) -> None:
    """The objective, which never makes all logits, against cross entropy of the logits; every weight gets a gradient."""
    model = hf.load(folder_of(name)).requires_grad_()
    tokens = prompt(30)
    targets = torch.roll(tokens, -1, 1)
    wanted = F.cross_entropy(model(tokens).flatten(0, -2), targets.flatten(), reduction="sum")
    expected = torch.autograd.grad(wanted, list(model.parameters()))
    loss = NextToken().total(model, model.hidden(tokens, Causal(tokens)), targets, None, None)
    torch.testing.assert_close(loss, wanted, atol=1e-3, rtol=1e-5)
    for (path, _), one, other in zip(
        model.named_parameters(), torch.autograd.grad(loss, list(model.parameters())), expected
    ):
        assert other.abs().max() > 0, path
        torch.testing.assert_close(one, other, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("name", FAMILY_EXAMPLES)
def test_fresh_weights_norm_by_one(name: str) -> None:
    """Whatever is added to their weights, norms start as the plain norm."""
    config = from_hf({**PUBLISHED[name], **SMALL})
    model = build(config)
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    assert len(norms) == 1 + sum("norm" in path for index in range(4) for path in config.parameters(index))
    assert all(torch.equal(norm.weight + config.norm_offset, torch.ones_like(norm.weight)) for norm in norms)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shape_of_every_family_can_be_saved(family: str, tmp_path: Path) -> None:
    shape = Shape(family=family, hidden_size=32, num_heads=4, num_kv_heads=2, num_layers=2, intermediate_size=48)
    model = build(shape.config(60))
    hf.save(model, tmp_path)
    assert hf.load(tmp_path).config == model.config
    expected = theirs(tmp_path)(prompt(21) % 60).logits
    torch.testing.assert_close(model(prompt(21) % 60), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gemma3-4b-text", "phi4-mini", "granite3", "smollm3"])
def test_two_ranks_add_up_to_the_whole(name: str, folder_of) -> None:
    """Layers of half the heads and half the inner width, with the rows and columns their specs name."""
    model = hf.load(folder_of(name))
    x, context = model.embed(prompt(21)), Causal(prompt(21))
    whole, local = model.layers[0], model.config.local(2)
    mixed, fed = torch.zeros_like(x), torch.zeros_like(x)
    for rank in range(2):
        part = local_layer(model, 0, rank, 2, dtype=torch.float32)
        mixed += part.mixer(whole.mixer_norm(x), context)
        fed += part.feed_forward(whole.feed_forward_norm(x), context)
    assert local.num_params < model.config.num_params
    torch.testing.assert_close(mixed, whole.mixer(whole.mixer_norm(x), context), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(fed, whole.feed_forward(whole.feed_forward_norm(x), context), atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILY_EXAMPLES)
def test_scales_move_along_reads(name: str, folder_of) -> None:
    """Wherever norms stand and whatever is added to their weights; linears that read one thing get one thing."""
    wanted = hf.load(folder_of(name), dtype=torch.float64)(prompt(21))
    for edge in {linear.reads for linear in hf.Checkpoint(folder_of(name)).config.linears(1).values()}:
        model = hf.load(folder_of(name), dtype=torch.float64)
        layer, linears, outputs = model.layers[1], model.config.linears(1), outputs_of(edge)
        if isinstance(edge, Stream):
            assert model.config.layers[1].norms == "post"
            continue
        if isinstance(edge, Norm):
            weight, offset = layer.get_submodule(edge.name).weight, model.config.norm_offset
            scale = torch.rand(len(weight), dtype=torch.float64) + 0.5
            weight.copy_((weight + offset) / scale - offset)
        else:
            rows = rows_of(layer, outputs[-1], linears)
            scale = torch.rand(len(rows[0]), dtype=torch.float64) + 0.5
            for part in rows:
                part.div_(scale if part.dim() == 1 else scale[:, None])
        for path in (path for path, one in linears.items() if one.reads == edge):
            columns = layer.get_submodule(path).weight
            columns.mul_(spread(scale, columns.shape[1], model.config.layers[1].mixer, outputs))
        torch.testing.assert_close(model(prompt(21)), wanted)


def test_norms_over_all_heads_are_not_split() -> None:
    with pytest.raises(SpecError, match="qk_norm_over"):
        from_hf({**PUBLISHED["olmo2"], **SMALL}).local(2)
