"""TransMLA: exact where nothing is left out, DeepSeek's folder in transformers, and what fewer numbers cost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from hone.base.errors import SpecError
from hone.model.hf import load
from tests.compress.conftest import must_serve_what_it_computes

TOKENS = torch.arange(2 * 30).reshape(2, 30) * 7 % 250
EXACT = {"kind": "transmla", "latent_norm": False}


@pytest.fixture
def convert(compress, calibration_text: Path):
    """convert(model folder, step, ...) -> Artifact, calibrated."""

    def make(model: Path, step: dict, **more):
        return compress(model, step, calibration_text=str(calibration_text), num_sequences=6, check_sequences=2, **more)

    return make


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return load(folder)(TOKENS)


@pytest.mark.parametrize(
    ("heads", "step", "yarn"),
    [
        (4, {"rope_heads": 4}, False),
        (1, {}, False),  # one key head: nothing is turned, and its folder has the usual positions
        (2, {"rope_heads": 2}, True),
    ],
)
def test_all_rotated_keys_and_a_whole_latent_compute_the_same_logits(
    heads, step, yarn, family_folder, convert, tmp_path
) -> None:
    folder = family_folder("llama", num_key_value_heads=heads)
    if yarn:
        folder = Path(shutil.copytree(folder, tmp_path / "yarn"))
        values = json.loads((folder / "config.json").read_text())
        values.pop("rope_parameters", None)
        values["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
        (folder / "config.json").write_text(json.dumps(values))
        assert load(folder).config.layers[0].mixer.rope.attention_factor > 1.1
    made = convert(folder, {**EXACT, **step})
    torch.testing.assert_close(logits(made.folder), logits(folder), atol=1e-5, rtol=0)
    mixer = load(made.folder).config.layers[0].mixer
    assert mixer.kind == "mla" and mixer.latent_dim == heads * 16 and mixer.rope_dim == heads * 16
    kept = made.figures["kv_bytes_per_token"]
    assert kept.value == kept.estimate.value == 2 * 2 * heads * 16 * 4
    assert abs(made.figures["kl_to_dense"].value) < 1e-6
    must_serve_what_it_computes(made.folder)


def test_its_folder_is_deepseek_v3_in_transformers(family_folder, convert) -> None:
    folder = family_folder("llama", num_key_value_heads=4)
    made = convert(folder, {"kind": "transmla", "kv_rank": 24})
    assert json.loads((made.folder / "config.json").read_text())["model_type"] == "deepseek_v3"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(logits(made.folder), theirs(TOKENS).logits, atol=1e-5, rtol=1e-5)
    kept = made.figures["kv_bytes_per_token"]
    assert kept.value == kept.estimate.value == 2 * (24 + 16) * 4
    must_serve_what_it_computes(made.folder)


@pytest.mark.slow
def test_fewer_numbers_cost_more_and_more_of_them_less(family_folder, convert) -> None:
    folder = family_folder("llama", num_key_value_heads=4)
    arms = {"r4": {"rope_heads": 4}, "r2": {"rope_heads": 2}, "r1": {}, "rank": {"kv_rank": 8}, "fold": {"fold": 2}}
    made = {name: convert(folder, {**EXACT, **step}, name=name) for name, step in arms.items()}
    kl = {name: one.figures["kl_to_dense"].value for name, one in made.items()}
    assert kl["r4"] < 1e-6 < kl["r2"] < kl["r1"] < kl["rank"]
    shares = {name: one.techniques[0]["kept"]["0"] for name, one in made.items()}
    assert shares["r4"] == pytest.approx(1) and shares["rank"] < 0.9
    assert load(made["fold"].folder).config.layers[0].mixer.rope_dim == 8


def test_turned_keys_commute_with_rotary_positions() -> None:
    """Scores of queries and keys turned by an orthogonal matrix at each frequency are those before, with positions."""
    from hone.compress.conversions.latents import _split, _turned
    from hone.model.rope import Rope
    from hone.ops import rope

    torch.manual_seed(0)
    heads, dim, tokens = 3, 8, 5
    turns = torch.linalg.qr(torch.randn(dim // 2, heads, heads, dtype=torch.float64)).Q
    q, k = torch.randn(2, heads * dim, tokens, dtype=torch.float64)
    cos, sin = Rope().tables(torch.arange(tokens), dim, torch.float64)
    rotate = lambda x: rope(x.T.unflatten(1, (-1, dim))[None], cos[None], sin[None])[0]  # noqa: E731
    before = torch.einsum("shd,thd->st", rotate(q), rotate(k))
    one, other = (_turned(_split(x, heads, 1), turns, heads * dim)[0] for x in (q, k))
    halves = [x.unflatten(0, (dim // 2, heads, 2)).permute(1, 2, 0, 3).flatten(0, 2) for x in (one, other)]
    torch.testing.assert_close(torch.einsum("shd,thd->st", *map(rotate, halves)), before)


def test_mistakes_are_named(family_folder, convert, compress) -> None:
    llama = family_folder("llama", num_key_value_heads=4)
    for step, said in (
        ({"kv_rank": 200}, "kv_rank 200 of 112 numbers"),
        ({"rope_heads": 5}, "rope_heads 5 of 4 keys"),
        ({"fold": 3}, "fold 3 does not divide the 8 frequencies"),
    ):
        with pytest.raises(SpecError, match=said):
            convert(llama, {"kind": "transmla", **step})
    with pytest.raises(SpecError, match="qkv_bias=True, which a converted layer cannot compute"):
        convert(family_folder("qwen2"), {"kind": "transmla"})
    with pytest.raises(SpecError, match="calibration inputs"):
        compress(llama, {"kind": "transmla"})


def test_what_was_measured_is_read_back(tmp_path: Path) -> None:
    from hone.base.ranks import Mesh
    from hone.compress.conversions.latents import Latents, read, write

    path = tmp_path / "cut-0.json"
    assert read(path, Mesh()) is None
    known = {3: Latents(torch.randn(2, 2, 2).double(), torch.randn(6, 4).double(), 0.5, 2.0, 0.9, 0.7)}
    write(known, path)
    found = read(path, Mesh())
    assert found is not None and list(found) == [3]
    assert all(torch.equal(one, other) for one, other in zip(found[3][:2], known[3][:2], strict=True))
    assert found[3][2:] == known[3][2:]
