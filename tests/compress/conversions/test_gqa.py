"""Pooled key/value heads against the same done by hand in transformers' models, of families that store them in other ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from hone.base.errors import SpecError
from hone.model.hf import load

TOKENS = torch.arange(2 * 30).reshape(2, 30) * 7 % 250


def theirs(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def by_hand(model: torch.nn.Module, before: int, after: int, first: bool) -> torch.nn.Module:
    """`model`, whose `before` key/value heads are all there still, each with what its group of before / after becomes."""
    width = before * model.config.head_dim if getattr(model.config, "head_dim", None) else 64 // 4 * before

    def pooled(rows: torch.Tensor) -> torch.Tensor:
        groups = rows.unflatten(0, (after, before // after, -1))
        found = groups[:, :1] if first else groups.mean(1, keepdim=True)
        return found.expand_as(groups).flatten(0, 2)

    with torch.no_grad():
        for name, value in model.named_parameters():
            if any(f".{one}." in name for one in ("k_proj", "v_proj", "k_norm")):
                value.copy_(pooled(value))
            elif ".qkv_proj." in name:
                for start in (len(value) - 2 * width, len(value) - width):
                    value[start : start + width] = pooled(value[start : start + width].clone())
    return model


@pytest.mark.parametrize(
    ("family", "before", "after", "pooling"),
    [("llama", 4, 2, "mean"), ("qwen2", 4, 1, "first"), ("phi3", 2, 1, "mean"), ("olmo2", 4, 2, "mean")],
)
def test_pooled_heads_compute_what_equal_heads_did(family, before, after, pooling, family_folder, compress) -> None:
    folder = family_folder(family, num_key_value_heads=before)
    made = compress(folder, {"kind": "gqa", "num_kv_heads": after, "pooling": pooling})
    wanted = by_hand(theirs(folder), before, after, pooling == "first")
    if family == "olmo2":  # its one norm over all heads counts each merged head once, as that of the equal heads does
        assert wanted.config.num_key_value_heads == before
    with torch.no_grad():
        expected = wanted(TOKENS).logits
        torch.testing.assert_close(load(made.folder)(TOKENS), expected, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(theirs(made.folder)(TOKENS).logits, expected, atol=2e-5, rtol=1e-5)
    assert json.loads((made.folder / "config.json").read_text())["num_key_value_heads"] == after
    kept = made.figures["kv_bytes_per_token"]
    assert kept.value == kept.estimate.value == 2 * 2 * after * 16 * 4  # layers, keys and values, channels, float32


def test_random_heads_have_the_size_of_the_given_ones_and_depend_on_the_seed(family_folder, compress) -> None:
    folder = family_folder("llama", num_key_value_heads=4)
    step = {"kind": "gqa", "num_kv_heads": 1, "pooling": "random"}
    keys = [load(compress(folder, {**step, "seed": seed}, name=str(name)).folder).layers[0].mixer.qkv.weight[64:80]
            for name, seed in enumerate((0, 0, 1))]  # fmt: skip
    given = load(folder).layers[0].mixer.qkv.weight[64:128]
    assert torch.equal(keys[0], keys[1]) and not torch.equal(keys[0], keys[2])
    assert float(keys[0].detach().std() / given.detach().std()) == pytest.approx(1, abs=0.1)


def test_the_given_model_is_compared_with_the_converted_one(family_folder, compress, calibration_text) -> None:
    folder = family_folder("llama", num_key_value_heads=4)
    options = {"calibration_text": str(calibration_text), "check_sequences": 3}
    step = {"kind": "gqa", "num_kv_heads": 2}
    made = compress(folder, step, **options)
    figure = made.figures["kl_to_dense"]
    assert figure.value > 1e-4 and figure.n == 3 * 31 and made.techniques[0]["slot"] == "conversion"
    turned = compress(
        folder, step, {"kind": "rotation"}, {"kind": "rtn", "bits": 4, "group_size": 32}, name="turned", **options
    )
    assert "rotated" not in turned.figures["kl_to_dense"].note, "the model as it was given"
    packed = compress(folder, step, {"kind": "rtn", "bits": 4, "group_size": 32}, name="int4", **options)
    assert packed.figures["kl_to_dense"].value > 0 and load(packed.folder).config.layers[0].mixer.num_kv_heads == 2


def test_mistakes_are_named(family_folder, compress) -> None:
    folder = family_folder("llama", num_key_value_heads=4)
    for count in (3, 4, 8):
        with pytest.raises(SpecError, match=f"num_kv_heads {count} does not divide the 4 of layer 0") as error:
            compress(folder, {"kind": "gqa", "num_kv_heads": count})
        assert "1 or 2" in error.value.fix
    with pytest.raises(SpecError, match="which rtn removes"):
        compress(folder, {"kind": "rtn"}, {"kind": "gqa", "num_kv_heads": 2})
