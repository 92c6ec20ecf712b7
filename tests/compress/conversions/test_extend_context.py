"""Scaled positions beyond the old context, as transformers computes them from the folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from hone.base.errors import SpecError
from hone.compress.conversions.divisors import evolve, usual
from hone.model.hf import load
from hone.model.rope import Rope

TOKENS = torch.arange(2 * 200).reshape(2, 200) * 7 % 250
"""Longer than the 128 of the given models."""


def logits(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """hone's and transformers'."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return load(folder)(TOKENS), theirs(TOKENS).logits


@pytest.mark.parametrize(
    "step",
    [
        {},
        {"attention_factor": 1.3, "beta_fast": 16.0},
        {"scaling": "linear"},
        {"scaling": "ntk"},
        {"scaling": "llama3", "original_max_seq_len": 64, "factor": 4.0},
        {"scaling": "dynamic"},
        {"scaling": "llama3", "high_freq_factor": 3.0},
        {"scaling": "longrope", "long_factor": [1.0, 1.0, 1.2, 1.6, 2.0, 2.0, 2.0, 2.1]},
    ],
    ids=lambda step: step.get("scaling", "yarn" + "-own" * bool(step)),
)
def test_transformers_computes_the_same_beyond_the_old_context(step, family_folder, compress) -> None:
    folder = family_folder("llama")
    made = compress(folder, {"kind": "extend_context", "factor": 2.0, **step}).folder
    ours, theirs = logits(made)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
    assert not torch.allclose(ours, logits(folder)[0], atol=1e-2)
    config = load(made).config
    assert config.max_seq_len == (128 if step.get("scaling") == "dynamic" else 256) and config.family == "llama"


def test_layers_with_a_window_keep_their_positions_and_a_phi_rotates_in_part(family_folder, compress) -> None:
    made = compress(family_folder("gemma3_text"), {"kind": "extend_context", "scaling": "linear", "factor": 2.0}).folder
    ours, theirs = logits(made)
    torch.testing.assert_close(ours, theirs, atol=5e-4, rtol=5e-4)
    scalings = [layer.mixer.rope.scaling for layer in load(made).config.layers]
    assert scalings == ["none", "linear"]
    given = family_folder("phi3")
    part = load(compress(given, {"kind": "extend_context", "scaling": "ntk", "factor": 2.0}, name="phi").folder).config
    assert part.layers[0].mixer.rope.theta == pytest.approx(
        load(given).config.layers[0].mixer.rope.theta * 2 ** (8 / 6)
    )


def test_latent_attention_is_sharpened_as_deepseeks_classes_do(family_folder, compress, calibration_text) -> None:
    folder = family_folder("llama", num_key_value_heads=4)
    steps = ({"kind": "transmla", "kv_rank": 64}, {"kind": "extend_context", "factor": 2.0})
    made = compress(folder, *steps, calibration_text=str(calibration_text), num_sequences=4).folder
    assert json.loads((made / "config.json").read_text())["model_type"] == "deepseek_v3"
    ours, theirs = logits(made)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


def test_it_is_measured_on_sequences_of_the_new_length(family_folder, compress, calibration_text) -> None:
    options = {"calibration_text": str(calibration_text), "num_sequences": 2, "check_sequences": 2}
    made = compress(family_folder("llama"), {"kind": "extend_context", "factor": 2.0}, **options, seq_len=256)
    assert made.figures["kl_to_dense"].n == 2 * 255 and "kv_bytes_per_token" not in made.figures


def test_evolution_finds_what_none_of_the_usual_divisors_is() -> None:
    wanted = np.array([1.0, 1.0, 1.5, 3.0, 3.5, 4.0])
    first = usual(4.0, 12, Rope(original_max_seq_len=64))
    assert [len(one) for one in first] == [6, 6, 6] and first[1][0] == 1.0 and first[1][-1] == pytest.approx(4.0)
    found, loss, begun = evolve(first, 4.0, 16, 25, 0, lambda one: float(np.square(np.log(one / wanted)).sum()))
    assert loss < 0.3 * min(begun) and list(found) == sorted(found)
    assert evolve(first, 4.0, 16, 0, 0, lambda one: one[0])[1] == 1.0, "the best of the first ones"


def test_longrope_is_searched_on_calibration_sequences(family_folder, compress, calibration_text) -> None:
    options = {"calibration_text": str(calibration_text), "num_sequences": 2, "check_sequences": 0, "seq_len": 200}
    step = {"kind": "extend_context", "scaling": "longrope", "factor": 2.0, "population": 6, "rounds": 2}
    made = compress(family_folder("llama"), step, **options)
    (row,) = made.techniques
    assert row["loss"] <= min(row["begun"]) and len(row["begun"]) == 3
    rope = load(made.folder).config.layers[0].mixer.rope
    assert (
        rope.scaling == "longrope" and list(rope.long_factor) == row["long_factor"] and rope.short_factor == (1.0,) * 8
    )
    torch.testing.assert_close(*logits(made.folder), atol=2e-4, rtol=2e-4)


def test_mistakes_are_named(family_folder, compress) -> None:
    folder = family_folder("llama")
    for step, said in (
        ({"scaling": "linear", "beta_fast": 8.0}, "scaling linear does not read beta_fast"),
        ({"scaling": "longrope"}, "calibration inputs"),
        ({"beta_fast": 1.0, "beta_slow": 4.0}, "beta_slow must be below beta_fast"),
        ({"scaling": "llama3", "low_freq_factor": 4.0}, "low_freq_factor must be below high_freq_factor"),
        ({"scaling": "longrope", "long_factor": [-1.0] * 8}, "long_factor.0 = -1.0"),
        ({"scaling": "longrope", "long_factor": [1.0, 2.0]}, "8 short_factor and 2 long_factor|longrope has"),
    ):
        with pytest.raises(SpecError, match=said):
            compress(folder, {"kind": "extend_context", **step})
    once = compress(folder, {"kind": "extend_context", "factor": 2.0}).folder
    with pytest.raises(SpecError, match="scaled already \\(yarn, factor 2\\)"):
        compress(once, {"kind": "extend_context"}, name="twice")
