"""Sliding windows: exactly w tokens, itself among them, in the whole pass and from a ring of w keys."""

from __future__ import annotations

import json

import pytest
import torch

from hone.base.errors import SpecError
from hone.model import hf
from hone.model.families.config_json import to_hf
from hone.model.shape import Shape
from tests.model.mixers.small import (
    check_apart,
    check_causal,
    check_incremental,
    check_saved,
    check_together,
    prompt,
    small,
    state_count,
)

LOCAL = {"kind": "sliding_window", "window": 5}


@torch.no_grad()
def test_a_token_sees_w_tokens_itself_among_them():
    model = small(LOCAL, num_layers=1)
    tokens = prompt(1, 12)
    for back in range(12):
        other = tokens.clone()
        other[0, 11 - back] = (other[0, 11 - back] + 1) % 40
        changed = not torch.allclose(model(other)[0, -1], model(tokens)[0, -1], atol=1e-9)
        assert changed == (back < 5), back


@pytest.mark.parametrize("mixers", [(LOCAL,), (LOCAL, LOCAL, "attention")])
def test_decoding_keeps_the_window_and_no_more(mixers):
    model = small(*mixers, num_layers=len(mixers))
    carry = check_incremental(model, 23, [[23], [1] * 23, [7, 1, 1, 9, 5], [3] * 7 + [2]])
    assert state_count({0: carry[0]}) == 2 * 2 * 2 * 6 * 5
    assert state_count(carry) == 2 * model.config.dims().state_values(23)


def test_order_and_documents():
    model = small(LOCAL, "attention")
    check_causal(model, 15)
    check_apart(model, [4, 9, 7])
    check_together(model, [4, 9, 7])


def test_it_is_attention_with_an_option_where_a_family_can_say_that(tmp_path):
    shape = Shape(family="qwen3", hidden_size=32, num_heads=4, num_kv_heads=2, num_layers=3, window=6)
    config = shape.model_copy(update={"mixers": ("sliding_window", "attention")}).config(64)
    assert to_hf(config)["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    model = small("sliding_window", "attention", family="qwen3", window=6).float()
    hf.save(model, tmp_path / "theirs")
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["model_type"] == "qwen3"
    assert torch.equal(hf.load(tmp_path / "theirs")(prompt(2, 20)), model(prompt(2, 20)))


def test_what_a_family_cannot_say_is_saved_in_a_format_of_its_own(tmp_path):
    with pytest.warns(RuntimeWarning, match="transformers cannot"):
        check_saved(small(LOCAL, "attention"), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["model_type"] == "hone" and "llama" in values["note"]


def test_a_window_must_be_given():
    with pytest.raises(SpecError, match="window"):
        Shape(mixers=("sliding_window",)).config(64)
    with pytest.raises(SpecError, match="sliding_windo"):
        Shape.read({"mixers": ["sliding_windo"]})
