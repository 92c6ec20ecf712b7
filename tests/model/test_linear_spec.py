"""Linears as data: what they say of a layer against the layer itself, scales along their edges, tensor-parallel shards."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.model.context import Causal
from hone.model.decoder import Decoder, DecoderLayer, build
from hone.model.families import FAMILIES
from hone.model.families.base import Family
from hone.model.linear_spec import (
    Computed,
    LinearSpec,
    Norm,
    Output,
    ParameterSpec,
    Piece,
    Product,
    each_expert,
    grouped_pieces,
    is_router,
    outputs_of,
    projection_in,
)  # fmt: skip
from hone.model.mixers import MIXERS
from hone.model.shape import Shape
from tests.model.mixers.small import prompt, widen
from tests.test_contracts import TINY

VARIANTS = [
    *MIXERS,
    {"kind": "attention", "qkv_bias": True, "out_bias": True, "qk_norm": True},
    {"kind": "attention", "rotary_dim": 4, "scale": 0.3, "softcap": 2.0},
    {"kind": "mla", "q_latent_dim": 16},
    {"kind": "gated_linear", "gate": "head"},
    {"kind": "delta_net", "gated": False},
    {"kind": "longformer", "encoder": True},
]


def model_of(mixer: str | dict, **sizes: int) -> Decoder:
    """One layer of a mixer (two where it reuses keys) in float64, every weight of a size that matters."""
    entry = {"kind": mixer} if isinstance(mixer, str) else mixer
    cls = MIXERS[entry["kind"]]
    entry = {**{name: value for name, value in TINY.items() if name in cls.model_fields}, **entry}
    if "window" in cls.model_fields and cls.model_fields["window"].is_required():
        entry["window"] = 6
    shape = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48, "max_seq_len": 96, **sizes}
    mixers = ["attention", entry] if cls.reuses_kv else [entry]
    model = build(Shape.read({**shape, "num_layers": len(mixers), "mixers": mixers}).config(40), seed=1).double()
    widen(model)
    return model


def ids(value: object) -> str | None:
    return "-".join(map(str, value.values())) if isinstance(value, dict) else None


@pytest.mark.parametrize("mixer", VARIANTS, ids=ids)
def test_the_declaration_is_the_module(mixer) -> None:
    """Every parameter of a layer is declared, by path and shape, and nothing else is."""
    model = model_of(mixer)
    for index, layer in enumerate(model.layers):
        declared = {path: one.shape for path, one in model.config.parameters(index).items()}
        for path, linear in model.config.linears(index).items():
            declared[f"{path}.weight"] = (linear.out_features, linear.in_features)
            if linear.bias:
                declared[f"{path}.bias"] = (linear.out_features,)
            assert linear.num_params == sum(one.numel() for one in layer.get_submodule(path).parameters())
        assert {name: tuple(one.shape) for name, one in layer.state_dict().items()} == declared
        residual = [linear.name for linear in model.config.linears(index).values() if linear.residual]
        assert residual == ["out", "down"]


@torch.no_grad()
@pytest.mark.parametrize("mixer", VARIANTS, ids=ids)
def test_scales_move_along_reads(mixer) -> None:
    """What a linear reads can be divided by a scale a channel when the linear's columns are multiplied by it."""
    for edge in {one.reads for one in model_of(mixer).config.linears(-1).values()}:
        model = model_of(mixer)
        wanted = model(prompt(2, 40))
        layer, linears = model.layers[-1], model.config.linears(-1)
        outputs = outputs_of(edge)
        readers = [path for path, linear in linears.items() if linear.reads == edge]
        generator = torch.Generator().manual_seed(0)
        if isinstance(edge, Norm):
            divided = [layer.get_parameter(f"{edge.name}.weight")]
        elif outputs:
            divided = rows_of(layer, outputs[-1], linears)
        else:
            assert isinstance(edge, Computed)
            continue
        scale = torch.rand(len(divided[0]), generator=generator, dtype=torch.float64) + 0.5
        for part in divided:
            part.div_(scale if part.dim() == 1 else scale[:, None])
        for path in readers:
            columns = layer.get_submodule(path).weight
            columns.mul_(spread(scale, columns.shape[1], model.config.layers[-1].mixer, outputs))
        torch.testing.assert_close(model(prompt(2, 40)), wanted)


def rows_of(layer: DecoderLayer, output: Output, linears: dict[str, LinearSpec]) -> list[Tensor]:
    """The rows of a piece in the weight, and in the bias if there is one: views."""
    named = linears[output.linear].parts
    parts = layer.get_submodule(output.linear).parts(list(named.values()))[list(named).index(output.piece)]
    return [parts[name] for name in ("weight", "bias") if name in parts]


def spread(scale: Tensor, width: int, mixer, outputs: tuple[Output, ...]) -> Tensor:
    """A scale a channel of the source as a scale a column: key heads serve several query heads, norms several tokens."""
    if len(scale) == width:
        return scale
    if outputs:
        return scale.unflatten(0, (mixer.num_kv_heads, -1)).repeat_interleave(width // len(scale), 0).flatten()
    return scale.repeat(width // len(scale))


SPLIT = [mixer for mixer in VARIANTS if MIXERS[mixer if isinstance(mixer, str) else mixer["kind"]].splits]


@torch.no_grad()
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("mixer", SPLIT, ids=ids)
def test_ranks_with_some_of_the_heads_add_up_to_the_whole(mixer, num_ranks: int) -> None:
    """Layers built from a local spec, with the rows and columns it names, in the place of the whole one."""
    model = model_of(mixer)
    x, context = model.embed(prompt(2, 40)), Causal(prompt(2, 40))
    model.prepare(x, context)
    lenders = model.layers[:-1]
    for layer in lenders:
        x = layer(x, context)
    index, whole = len(lenders), model.layers[-1]
    mixed, fed = torch.zeros_like(x), torch.zeros_like(x)
    local = model.config.local(num_ranks)
    for rank in range(num_ranks):
        parts = [local_layer(model, at, rank, num_ranks) for at in range(index + 1)]
        seen = Causal(prompt(2, 40))
        for layer in local.layers:
            layer.mixer.prepare(seen, x)
        for at, part in enumerate(parts[:-1]):
            before = model.embed(prompt(2, 40)) if at == 0 else None
            part.mixer(part.mixer_norm(before), seen)  # shares its heads
        mixed += parts[-1].mixer(whole.mixer_norm(x), seen)
        fed += parts[-1].feed_forward(x, seen)
    torch.testing.assert_close(mixed, whole.mixer(whole.mixer_norm(x), context))
    torch.testing.assert_close(fed, whole.feed_forward(x, context))


def local_layer(
    model: Decoder, index: int, rank: int, num_ranks: int, dtype: torch.dtype = torch.float64
) -> DecoderLayer:
    local = model.config.local(num_ranks)
    layer = DecoderLayer(local.layers[index], local, index).to(dtype).requires_grad_(False)
    whole = model.layers[index]
    specs = model.config.linears(index)
    for path, spec in specs.items():
        assert spec.local(0, num_ranks) == local.linears(index)[path]
        rows = torch.cat(
            [
                part[spec.rows(rank, num_ranks)[piece.name]]
                for piece, part in zip(
                    spec.pieces, torch.arange(spec.out_features).split(list(spec.parts.values())), strict=True
                )
            ]
        )
        module = layer.get_submodule(path)
        module.weight.copy_(whole.get_submodule(path).weight[rows][:, spec.columns(rank, num_ranks)])
        if spec.bias:
            keep = 1.0 if spec.local(rank, num_ranks).bias else 0.0
            module.bias.copy_(keep * whole.get_submodule(path).bias[rows])
    for path, spec in model.config.parameters(index).items():
        taken = spec.local(rank, num_ranks) if isinstance(spec, ParameterSpec) else slice(None)
        layer.get_parameter(path).copy_(whole.get_parameter(path)[taken])
    return layer


def test_key_heads_fewer_than_ranks_are_shared() -> None:
    qkv = projection_in("qkv", 32, *grouped_pieces(8, 2, 4))
    rows = [qkv.rows(rank, 4) for rank in range(4)]
    assert [row["q"] for row in rows] == [slice(0, 8), slice(8, 16), slice(16, 24), slice(24, 32)]
    assert [row["k"] for row in rows] == [slice(0, 4), slice(0, 4), slice(4, 8), slice(4, 8)]
    assert [piece.heads for piece in qkv.local(3, 4).pieces] == [2, 1, 1] and qkv.local(3, 4).out_features == 16


def test_a_vocabulary_is_divided_with_a_short_last_rank() -> None:
    head = model_of("attention").config.model_copy(update={"vocab_size": 10}).ends()["embed_tokens"]
    assert [head.local(rank, 4).out_features for rank in range(4)] == [3, 3, 3, 1]
    assert [head.local(rank, 6).out_features for rank in range(6)] == [2, 2, 2, 2, 2, 0]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (projection_in("qkv", 32, *grouped_pieces(6, 2, 4)), r"the 6 heads of qkv\.q cannot be divided among 4"),
        (projection_in("qkv", 32, *grouped_pieces(12, 3, 4)), r"the 3 heads of qkv\.k cannot be divided among 4"),
        (LinearSpec("down", 6, (Piece("down", 8),), "up", "row"), "the 6 input features of down"),
        (LinearSpec("up", 8, (Piece("up", 6),), "x", "column"), r"the 6 rows of up\.up"),
    ],
)
def test_what_does_not_divide_is_said(spec: LinearSpec, says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        spec.local(0, 4)
    assert "tensor_parallel_size" in caught.value.fix


def test_a_mixer_whose_heads_differ_cannot_be_split() -> None:
    with pytest.raises(SpecError, match="'retnet' cannot be split over 2"):
        model_of("retnet").config.local(2)
    with pytest.raises(SpecError, match="num_heads 4 cannot be divided among 3"):
        model_of("linear_attention").config.local(3)
    config = model_of("attention").config
    assert config.local(1) == config


@torch.no_grad()
@pytest.mark.parametrize("mixer", VARIANTS, ids=ids)
def test_linears_that_read_the_same_get_the_same(mixer) -> None:
    """Calibration captures once for each `reads` of a layer."""
    model = model_of(mixer)
    layer, linears, seen = model.layers[-1], model.config.linears(-1), {}
    for path in linears:
        layer.get_submodule(path).register_forward_pre_hook(
            lambda _, args, path=path: seen.setdefault(path, []).append(args[0])
        )
    model(prompt(2, 40))
    for path, linear in linears.items():
        for other in (one for one in linears if linears[one].reads == linear.reads and linear.share == 1):
            if linears[other].share == 1:
                assert all(map(torch.equal, seen[path], seen[other]))


def test_a_family_is_a_row() -> None:
    """One that stores fused tensors and calls its norms otherwise."""
    row = Family("X", {}, names={"mixer.qkv": "attn.qkv_proj", "mixer_norm": "pre_norm", "feed_forward.up": "mlp.w3"})
    linears = model_of("attention").config.linears(0)
    assert row.modules(2, "mixer.qkv", linears["mixer.qkv"]) == {"model.layers.2.attn.qkv_proj": 64}
    assert row.modules(2, "mixer.out", linears["mixer.out"]) == {"model.layers.2.self_attn.o_proj": 32}
    assert list(row.modules(0, "feed_forward.gate_up", linears["feed_forward.gate_up"])) == [
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.w3",
    ]
    assert row.tensor(1, "mixer_norm.weight") == "model.layers.1.pre_norm.weight"
    assert row.tensor(1, "mixer.decay_up") == "model.layers.1.mixer.decay_up"
    assert FAMILIES["llama"].tensor(0, "mixer.q_norm.weight") == "model.layers.0.self_attn.q_norm.weight"


def test_the_declarations_need_no_torch() -> None:
    code = "import sys, hone.model.linear_spec, hone.model.families; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_each_expert_is_a_linear_that_reads_its_own_and_a_router_is_told_from_others() -> None:
    norm, halves = Norm("feed_forward_norm"), (Piece("gate", 2), Piece("up", 2))
    made = Product((Output("feed_forward.gate_up", "gate"), Output("feed_forward.gate_up", "up")))
    linears = {
        "feed_forward.router": LinearSpec("router", 8, (Piece("router", 4),), norm),
        "feed_forward.shared_gate_up": LinearSpec("shared_gate_up", 8, halves, norm, "column"),
        "feed_forward.gate_up": LinearSpec("gate_up", 8, halves, norm, "column", experts=4, share=0.5),
        "feed_forward.down": LinearSpec(
            "down", 2, (Piece("down", 8),), made, "row", experts=4, share=0.5, residual=True
        ),
        "mixer.other": LinearSpec("other", 8, (Piece("other", 4),), norm),
    }
    assert [path for path in linears if is_router(linears, path)] == ["feed_forward.router"]
    found = each_expert(linears)
    names = [f"feed_forward.{name}.{expert}" for name in ("gate_up", "down") for expert in range(4)]
    assert [*found] == ["feed_forward.router", "feed_forward.shared_gate_up", *names, "mixer.other"]
    third = found["feed_forward.down.2"]
    assert [one.linear for one in outputs_of(third.reads)] == ["feed_forward.gate_up.2"] * 2
    assert third.experts is None and (third.num_params, third.out_features) == (16, 8)
