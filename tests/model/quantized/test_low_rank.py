"""A linear of two factors for each checkpoint module: its product, its tensors in and out, and folders that are broken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hone.base.errors import ArtifactError
from hone.model import hf
from hone.model.decoder import build
from hone.model.quantized.low_rank import LowRank, config
from hone.model.shape import Shape

ROWS, RANKS = [3, 5], [2, 4]


def parts(bias: bool) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    found = []
    for rows, rank in zip(ROWS, RANKS):
        shapes = {"factor_a": (rank, 6), "factor_b": (rows, rank)} | ({"bias": (rows,)} if bias else {})
        found.append({name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()})
    return found


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_product_of_each_modules_factors(bias: bool) -> None:
    given, x = parts(bias), torch.randn(2, 3, 6, dtype=torch.float64)
    with torch.device("meta"):
        linear = LowRank(6, 8, bias)
    linear.load(given)
    weight = torch.cat([part["factor_b"] @ part["factor_a"] for part in given])
    expected = x @ weight.T + (torch.cat([part["bias"] for part in given]) if bias else 0.0)
    torch.testing.assert_close(linear(x), expected)
    torch.testing.assert_close(linear.dequantize(torch.float64), weight)
    for before, after in zip(given, linear.parts(ROWS)):
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    shapes = linear.part_shapes(ROWS)
    assert shapes[0]["factor_a"] == (-1, 6) and shapes[1]["factor_b"] == (5, -1)


def test_ranks_that_differ_are_refused(tmp_path: Path) -> None:
    given = parts(False)
    given[0]["factor_a"] = given[0]["factor_a"][:1]
    with pytest.raises(ArtifactError, match="different ranks"):
        LowRank(6, 8, False).load(given)


@torch.no_grad()
def test_a_model_with_some_of_them_is_saved_and_read(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}
    model = build(Shape(**sizes, max_seq_len=64).config(50), seed=1)
    down, tokens = LowRank(48, 32, False), torch.arange(10)[None]
    left, size, right = torch.linalg.svd(model.layers[0].feed_forward.down.weight, full_matrices=False)
    down.load([{"factor_a": right.contiguous(), "factor_b": (left * size).contiguous()}])
    model.layers[0].feed_forward.down = down
    names = [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"] + [
        f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")
    ]
    model.quantization = config(["lm_head", *names])
    expected = model(tokens)
    with pytest.warns(RuntimeWarning, match="low-rank factors"):
        hf.save(model, tmp_path)
    assert torch.equal(hf.load(tmp_path)(tokens), expected)
    assert torch.equal(hf.load(tmp_path).layers[0].feed_forward.down.factor_a, right)
