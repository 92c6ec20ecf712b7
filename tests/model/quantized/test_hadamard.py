"""Hadamard matrices: their definition, products with them by hand, and linears that multiply their inputs, as config.json says."""

from __future__ import annotations

import pytest
import torch

from hone.base.errors import ArtifactError, SpecError
from hone.model.linear import Dense
from hone.model.quantized import config as config_of
from hone.model.quantized.hadamard import factors, hadamard, input_hadamard, multiply, multiply_inputs
from hone.model.quantized.scheme import InputHadamard, Quantization, Scheme

KNOWN = (
    1,
    2,
    4,
    8,
    12,
    20,
    24,
    28,
    36,
    40,
    44,
    60,
    84,
    96,
    104,
    128,
    180,
    384,
    576,
    896,
    1536,
    2560,
    3584,
    5120,
    14336,
)
"""Hidden sizes and head widths of common models among them."""
NONE = (3, 6, 10, 18, 52, 92, 4095)


def sylvester(order: int) -> torch.Tensor:
    """Entries (-1)^(number of ones in i & j): the definition by bits."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(order)] for i in range(order)]).double()


def whole(size: int) -> torch.Tensor:
    """The Kronecker product of the factors, by its definition."""
    made = torch.ones(1, 1, dtype=torch.float64)
    for order in factors(size):
        one = hadamard(order)
        made = (made[:, None, :, None] * one[None, :, None, :]).reshape(len(made) * order, -1)
    return made


@pytest.mark.parametrize("size", KNOWN)
def test_rows_of_ones_and_minus_ones_are_orthogonal(size: int) -> None:
    product = 1
    for order in factors(size):
        matrix = hadamard(order)
        assert matrix.shape == (order, order) and bool((matrix.abs() == 1).all())
        assert torch.equal(matrix @ matrix.T, order * torch.eye(order, dtype=torch.float64))
        product *= order
    assert product == size


@pytest.mark.parametrize("size", NONE)
def test_a_size_without_a_construction_has_no_factors(size: int) -> None:
    assert factors(size) == ()


def test_powers_of_two_are_sylvesters_in_their_order() -> None:
    for order in (2, 8, 64, 256):
        assert torch.equal(whole(order), sylvester(order))


@pytest.mark.parametrize(("columns", "size"), [(16, 16), (96, 32), (48, 24), (512, 256), (24, 12), (5, 1)])
def test_a_product_is_that_of_a_block_diagonal_matrix(columns: int, size: int) -> None:
    x = torch.randn(2, 3, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = x @ torch.block_diag(*[whole(size) / size**0.5] * (columns // size))
    assert torch.allclose(multiply(x, size), expected, atol=1e-13)
    assert torch.allclose(multiply(x, size).norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(multiply(x.bfloat16(), size), multiply(x.bfloat16().float(), size).bfloat16())


def test_hadamard_runs_before_other_hooks() -> None:
    linear = Dense(96, 8, False)
    torch.nn.init.normal_(linear.weight)
    x, seen = torch.randn(4, 96), []
    expected = (x.double() @ torch.block_diag(*[sylvester(32) / 32**0.5] * 3)).float() @ linear.weight.T
    assert multiply_inputs(linear, 0) is linear and input_hadamard(linear) == 0
    assert torch.equal(linear(x), x @ linear.weight.T)
    assert input_hadamard(multiply_inputs(linear, 32)) == 32
    linear.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    assert torch.allclose(linear(x), expected, atol=1e-5)
    assert torch.allclose(seen[0], multiply(x, 32))
    compiled = torch.compile(linear, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(x), expected, atol=1e-5)


BLOCK = config_of.to_json(
    Quantization(
        ((("Linear",), Scheme(4, 32)),),
        ("lm_head",),
        hadamards=(InputHadamard(("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"), 32),),
    )
)


def test_transform_config_is_compressed_tensors() -> None:
    transform = pytest.importorskip("compressed_tensors.transform")
    parsed = transform.TransformConfig.model_validate(BLOCK["transform_config"])
    (scheme,) = parsed.config_groups.values()
    assert (scheme.type, scheme.head_dim, scheme.randomize) == ("hadamard", 32, False)
    (where,) = scheme.apply
    assert where.is_online() and where.location == "input"
    assert where.targets == ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]


def test_transform_config_is_read() -> None:
    assert config_of.input_hadamard(BLOCK, "model.layers.1.mlp.down_proj", 96) == 32
    assert config_of.input_hadamard(BLOCK, "model.layers.2.mlp.down_proj", 96) == 0
    with pytest.raises(ArtifactError, match="48 input features, and transform_config multiplies blocks of 32"):
        config_of.input_hadamard(BLOCK, "model.layers.1.mlp.down_proj", 48)


def group(**values) -> dict:
    """`BLOCK` with one transform, of all linears' inputs, with `values`."""
    plain = {"type": "hadamard", "apply": [{"targets": "Linear", "location": "input", "ignore": "re:.*down_proj"}]}
    return BLOCK | {"transform_config": {"config_groups": {"u": plain | values}}}


def test_a_transform_of_all_linears_has_the_size_of_their_inputs() -> None:
    assert config_of.input_hadamard(group(), "model.layers.0.mlp.up_proj", 64) == 64
    assert config_of.input_hadamard(group(head_dim=16), "model.layers.0.mlp.up_proj", 64) == 16
    assert config_of.input_hadamard(group(), "model.layers.0.mlp.down_proj", 64) == 0
    offline = [{"targets": ["Linear"], "location": "weight_input", "inverse": True}]
    assert config_of.input_hadamard(group(apply=offline), "model.layers.0.mlp.up_proj", 64) == 0
    with pytest.raises(ArtifactError, match="96 input features, and transform_config multiplies blocks of 96"):
        config_of.input_hadamard(group(), "model.layers.0.mlp.up_proj", 96)


@pytest.mark.parametrize(
    "values",
    [
        {"type": "random-hadamard"},
        {"randomize": True},
        {"head_dim": 24},
        {"apply": [{"targets": ["Linear"], "location": "output"}]},
        {"apply": [{"targets": ["re:.*self_attn"], "location": "q_attn"}]},
    ],
)
def test_other_transforms_are_refused(values: dict) -> None:
    with pytest.raises(ArtifactError, match="transform_config"):
        config_of.read(group(**values))


def test_other_methods_cannot_say_it() -> None:
    with pytest.raises(SpecError, match="gptq cannot say that inputs are multiplied"):
        config_of.to_json(
            Quantization(
                ((("Linear",), Scheme(4, 32, "gptq")),), method="gptq", hadamards=(InputHadamard(("Linear",), 32),)
            )
        )
