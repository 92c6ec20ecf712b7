"""Transforms: the layer computes the same, scales follow the papers' rules, statistics follow the inputs; what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hone.base.errors import SpecError
from hone.compress import TRANSFORMS
from hone.compress.layer import LayerWeights
from hone.compress.quantizers.rtn import RoundToNearest
from hone.compress.stage import Compress
from hone.compress.statistics import STATISTICS
from hone.measure.machine import describe
from hone.model.context import Causal
from hone.model.facts import CheckpointFacts
from hone.model.hf import Checkpoint, load
from hone.model.shape import Shape
from tests.compress.conftest import perplexity
from tests.compress.written.test_export import transformers_logits

FAMILIES = ("llama", "qwen2", "gemma2", "phi3", "olmo2")


def opened(folder: Path, targets: frozenset[str] | None = None, dtype=torch.float64):
    """(layer 0, its weights as transforms see them, a function that captures the inputs of its linears)."""
    checkpoint = Checkpoint(folder)
    layer = checkpoint.build_layer(0, "cpu", dtype)
    names = [name for name in checkpoint.names() if name.startswith("model.layers.0.")]
    tensors = {name: checkpoint.tensor(name).double() for name in names}
    x = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(1), dtype=dtype)
    context = Causal(torch.zeros(3, 16, dtype=torch.long))
    paths = list(checkpoint.config.linears(0))

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        inputs = {}
        hooks = [
            layer.get_submodule(path).register_forward_pre_hook(
                lambda module, args, path=path: inputs.__setitem__(path, args[0].detach().flatten(0, -2))
            )
            for path in paths
        ]
        with torch.no_grad():
            out = layer(x, context)
        for hook in hooks:
            hook.remove()
        return out, inputs

    targets = frozenset(paths) if targets is None else targets
    _, inputs = run()
    shared: dict[str, dict] = {}
    for path in targets:
        reads = checkpoint.config.linears(0)[path].reads
        if reads not in shared:
            shared[reads] = {
                name: gathered(name, inputs[path]) for name in STATISTICS if name not in ("samples", "cross")
            }
    statistics = {path: shared[checkpoint.config.linears(0)[path].reads] for path in sorted(targets)}
    quantizers = dict.fromkeys(targets, RoundToNearest(bits=3, group_size=32))
    return layer, LayerWeights(checkpoint, 0, layer, tensors, statistics, targets, quantizers), run


def gathered(name: str, x: torch.Tensor) -> torch.Tensor:
    statistic = STATISTICS[name](x.shape[1], len(x), x.device)
    statistic.add(x)
    return statistic.value().double()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", [kind for kind in TRANSFORMS if TRANSFORMS[kind].phase == "layer"])
def test_the_layer_computes_the_same_and_statistics_follow(kind: str, family: str, family_folder) -> None:
    _, weights, run = opened(family_folder(family))
    before, _ = run()
    TRANSFORMS.read(kind if kind != "smoothquant" else {"kind": kind, "inputs": "all"}).change(weights)
    assert weights.changed, "no source of a scale was found"
    weights.put()
    after, inputs = run()
    assert (after - before).abs().max() <= 1e-12 * before.abs().max()
    for path, values in weights.statistics.items():
        for name, value in values.items():
            assert torch.allclose(value, gathered(name, inputs[path]), rtol=2e-5, atol=1e-7), (path, name)


def test_a_norm_in_16_bits_takes_the_scale_it_can_hold(family_folder) -> None:
    """The columns take the ratio of the norm's weights as they are stored, so nothing is lost to rounding."""
    _, weights, run = opened(family_folder("gemma2"))
    for name in weights.names.values():
        weights.tensors[name] = weights.tensors[name].bfloat16()
    weights.put()
    before, _ = run()
    TRANSFORMS.read("smoothquant").change(weights)
    assert all(weights.tensors[name].dtype == torch.bfloat16 for name in weights.names.values())
    weights.put()
    assert (run()[0] - before).abs().max() <= 1e-12 * before.abs().max()


def test_smoothquant_gives_inputs_and_weights_the_same_range(family_folder) -> None:
    _, weights, _ = opened(family_folder("llama"))
    expected = {}
    for path in ("mixer.qkv", "feed_forward.gate_up"):
        x, w = weights.statistics[path]["absmax"].clone(), weights.weight(path).abs().amax(0)
        expected[path] = x / (x**0.7 / w**0.3)
    TRANSFORMS.read({"kind": "smoothquant", "alpha": 0.7}).change(weights)
    for path, absmax in expected.items():
        assert torch.allclose(weights.statistics[path]["absmax"], absmax, rtol=1e-6)
    assert "mixer.out" not in weights.changed and "feed_forward.down" not in weights.changed


def test_equalization_gives_rows_and_columns_the_same_range(family_folder) -> None:
    _, weights, _ = opened(family_folder("qwen2"))
    TRANSFORMS.read("cross_layer_equalization").change(weights)
    up = weights.weight("feed_forward.gate_up")[96:].abs().amax(1)
    down = weights.weight("feed_forward.down").abs().amax(0)
    assert torch.allclose(up, down, rtol=1e-6)
    v = weights.weight("mixer.qkv")[-32:].abs().amax(1)  # two heads of 16, each read by two query heads
    read = weights.weight("mixer.out").abs().amax(0).view(2, 2, 16).amax(1).flatten()
    assert torch.allclose(v, read, rtol=1e-6)


def test_awq_takes_the_scale_with_the_least_output_error(family_folder) -> None:
    """Against every candidate tried by hand, with the rounded layer's outputs computed from its inputs."""
    step = TRANSFORMS.read({"kind": "awq", "grid_size": 4})
    _, weights, run = opened(family_folder("llama"))
    x = run()[1]["feed_forward.gate_up"]
    plain = weights.weight("feed_forward.gate_up").clone()
    quantizer = weights.storing["feed_forward.gate_up"]

    def lost(scales: torch.Tensor) -> float:
        rounded = quantizer.nearest(plain * scales) / scales
        return float(((x @ (rounded - plain).T) ** 2).sum())

    a = x.abs().mean(0)
    groups = plain.abs().view(len(plain), -1, 32)
    w = (groups / groups.amax(-1, keepdim=True)).view(plain.shape).mean(0)
    tried, candidates = [], []
    for alpha in (0.0, 0.25, 0.5, 0.75):
        for scales in (a**alpha, a**alpha / w ** (1 - alpha)):
            candidates.append(scales / (scales.max() * scales.min()).sqrt())
            tried.append(lost(candidates[-1]))
    step.change(weights)
    reached = (weights.weight("feed_forward.gate_up") / plain)[:96]  # gate: rows of up also take the scale of down
    assert torch.allclose(reached, reached[:1].expand_as(reached), rtol=1e-9)
    # The scales, not what they lose: statistics are float32, and a scale's last bit moves a code that lies on an edge.
    best = candidates[tried.index(min(tried))]
    assert torch.allclose(reached[0], best.to(reached), rtol=1e-5)
    assert not any(
        torch.allclose(reached[0], other.to(reached), rtol=1e-2) for other in candidates if other is not best
    )
    assert min(tried) < 0.99 * tried[0], "the search found nothing better than no scale"


def test_linears_left_dense_keep_their_dtype_and_take_the_scale(family_folder, compress, calibration_text) -> None:
    folder = family_folder("llama")
    made = compress(
        folder,
        {"kind": "smoothquant", "inputs": "all"},
        {"kind": "rtn", "bits": 8, "group_size": 0},
        ignore=("lm_head", "mlp"),
        calibration_text=str(calibration_text),
    )
    tokens = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, whole = load(made.folder)(tokens), load(folder)(tokens)
    assert (ours - transformers_logits(made.folder, tokens)).abs().max() <= 1e-5
    assert 1e-4 < (ours - whole).abs().max() < 0.05 * whole.abs().max()


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([{"kind": "rtn"}, {"kind": "awq"}], "awq needs weights:float, which rtn removes"),
        ([{"kind": "awq"}], "awq is fitted to a quantizer: add one after it"),
        ([{"kind": "magnitude"}, {"kind": "smoothquant"}, {"kind": "rtn"}], "smoothquant comes after magnitude"),
    ],
)
def test_an_order_that_cannot_be_run_is_refused(steps: list, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Compress.read({"steps": steps})


@pytest.mark.parametrize(
    ("steps", "fields", "words"),
    [
        (
            [{"kind": "cross_layer_equalization"}, {"kind": "rtn", "group_size": 0}],
            {},
            "layer 1 uses the values of another",
        ),
        ([{"kind": "rtn", "group_size": 0}], {"calibration_text": "x.txt"}, "layer 1 uses the keys of another layer"),
    ],
)
def test_layers_that_borrow_keys_and_values_are_not_changed_apart(steps: list, fields: dict, words: str) -> None:
    """A scale moved into values would reach the other layers that read them."""
    shape = Shape(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, mixers=("attention", "shared_kv"))
    facts = CheckpointFacts(where="a model", config=shape.config(64), dtype="float32", weights_bytes=1, tokenizer=None)
    with pytest.raises(SpecError, match=words):
        Compress.read({"steps": steps, **fields}).plan({"model": facts}, describe())


@pytest.mark.slow
def test_awq_beats_rounding_on_a_real_model(stories, compress) -> None:
    """At least a fifth of the loss that rounding causes is gone."""
    model, text, rows = stories
    step = {"kind": "rtn", "bits": 4, "group_size": 32, "uneven": "nearest"}
    options = {"calibration_text": str(text), "num_sequences": 40, "seq_len": 128}
    dense = perplexity(model, rows)
    plain = perplexity(compress(model, step, name="plain", **options).folder, rows)
    better = perplexity(compress(model, {"kind": "awq"}, step, name="awq", **options).folder, rows)
    assert better - dense < 0.8 * (plain - dense)
