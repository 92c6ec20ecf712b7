"""Rotations: the rotated model computes the same, in hone and in transformers; outliers cost less; what is refused."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from hone.base.errors import ArtifactError, SpecError
from hone.base.run import Run
from hone.compress.stage import Compress
from hone.compress.transforms.rotated import random_rotation, rotated, rotated_model
from hone.compress.transforms.rotation import Rotation
from hone.exports.api import export
from hone.measure.machine import describe
from hone.model.context import Causal
from hone.model.decoder import build
from hone.model.facts import CheckpointFacts
from hone.model.hf import Checkpoint, load, save
from hone.model.quantized.dense import dequantized
from hone.model.quantized.hadamard import input_hadamard
from hone.model.shape import Shape
from tests.compress.written.test_export import transformers_logits
from tests.model.mixers.small import prompt, widen
from tests.model.test_linear_spec import VARIANTS, ids, model_of

TOKENS = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
R1, R2, R4 = ({"kind": "rotation", **{one: one == name for one in ("r1", "r2", "r4")}} for name in ("r1", "r2", "r4"))
ALL = {"kind": "rotation", "r4": True}
INT4 = {"kind": "rtn", "bits": 4, "group_size": 0}
W4A4 = {**INT4, "activations": "int4_token"}
INT8 = {"kind": "rtn", "bits": 8, "group_size": 0}
OFTEN = ("llama", "qwen3", "mistral")  # tied, tied with norms of heads, untied
OTHERS = ("qwen2", "phi3", "granite", "smollm3")


@torch.no_grad()
def logits(folder: Path, tokens: torch.Tensor = TOKENS, dtype: torch.dtype | None = None) -> torch.Tensor:
    return load(folder, dtype=dtype)(tokens)


def double(checkpoint: Checkpoint):
    return checkpoint.build(dtype=torch.float64)


@pytest.mark.parametrize("family", [*OFTEN, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)])
def test_a_rotated_model_computes_the_same_here_and_in_transformers(family: str, family_folder, compress) -> None:
    folder = family_folder(family)
    made = compress(folder, {"kind": "rotation"})
    given = logits(folder)
    for found in (logits(made.folder), transformers_logits(made.folder, TOKENS)):
        assert (found - given).abs().max() <= 3e-6 * given.abs().max()
    config = json.loads((made.folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value
    for name in ("model.norm", "model.layers.1.input_layernorm"):
        assert bool((Checkpoint(made.folder).tensor(f"{name}.weight") == 1).all())
    name = next(name for name in Checkpoint(folder).names() if name.endswith("up_proj.weight"))
    before, after = (Checkpoint(one).tensor(name) for one in (folder, made.folder))
    assert (before - after).abs().max() > 0.1, "nothing was rotated"


@pytest.mark.parametrize("step", [R1, R2, R4, ALL], ids=["r1", "r2", "r4", "all"])
@torch.no_grad()
def test_each_rotation_alone_is_exact(step: dict, family_folder) -> None:
    """In float64, from weights that are stored in float32: they differ from the given ones by one rounding."""
    folder, rotation = family_folder("qwen2"), Rotation.read({"seed": 3, **step})
    sizes = {f"layers.{index}.feed_forward.down": 32 for index in range(2)} if rotation.r4 else {}
    turned = double(rotated_model(Checkpoint(folder), rotation, sizes))
    assert [input_hadamard(layer.feed_forward.down) for layer in turned.layers] == [32 if sizes else 0] * 2
    given = logits(folder, dtype=torch.float64)
    assert (turned(TOKENS) - given).abs().max() <= 3e-6 * given.abs().max()


@torch.no_grad()
def test_the_residual_stream_is_rotated_by_one_orthogonal_matrix(family_folder) -> None:
    folder = family_folder("mistral")
    turned = rotated_model(Checkpoint(folder), Rotation(r2=False, seed=5), {})
    matrix = random_rotation(64, 5, "residual")(torch.eye(64, dtype=torch.float64))
    assert torch.allclose(matrix @ matrix.T, torch.eye(64, dtype=torch.float64), atol=1e-12)
    before, after = double(Checkpoint(folder)), double(turned)
    streams = [model.hidden(TOKENS, Causal(TOKENS)) for model in (before, after)]
    assert torch.allclose(streams[1], streams[0] @ matrix, atol=1e-5)
    other = random_rotation(64, 6, "residual")(torch.eye(64, dtype=torch.float64))
    assert (other - matrix).abs().max() > 0.1, "the seed has no effect"


@pytest.mark.parametrize("size", [52, 14])
def test_a_size_without_a_hadamard_matrix_gets_a_random_one(size: int) -> None:
    matrix = random_rotation(size, 0, "residual")(torch.eye(size, dtype=torch.float64))
    assert torch.allclose(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-12)
    assert (matrix.abs() - size**-0.5).abs().max() > 0.01, "all entries of one size: a Hadamard matrix"
    twice = random_rotation(size, 0, "residual")(torch.ones(3, 2 * size, dtype=torch.float64))
    assert torch.allclose(twice[:, :size], twice[:, size:]) and torch.allclose(twice[0, :size], matrix.sum(0))


@torch.no_grad()
def test_norms_that_add_an_offset_become_ones(tmp_path: Path) -> None:
    shape = Shape(hidden_size=52, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=14, intermediate_size=40)
    config = shape.config(50).model_copy(update={"norm_offset": 1.0, "residual_multiplier": 0.7, "logits_scaling": 2.0})
    model = build(config, dtype=torch.float64, seed=1)
    widen(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that transformers cannot read it
        save(model, tmp_path)
    turned = rotated_model(Checkpoint(tmp_path), Rotation(), {})
    assert bool((turned.tensor("model.layers.1.input_layernorm.weight") == 0).all())
    assert turned.values["config"]["tie_embeddings"] is False
    tokens = TOKENS % 50
    assert torch.allclose(double(turned)(tokens), model(tokens), atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", VARIANTS, ids=ids)
@torch.no_grad()
def test_every_mixer_is_rotated_exactly_or_refused(mixer: str | dict, tmp_path: Path) -> None:
    model = model_of(mixer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        save(model, tmp_path)
    tokens, exact = prompt(2, 24, 40), 0
    expected = model(tokens)
    for options in ({"r2": False}, {"r1": False}):
        try:
            turned = rotated_model(Checkpoint(tmp_path), Rotation(**options), {})
        except SpecError as error:
            assert "set r1=false" in error.fix if "r2" in options else "set r2=false" in error.fix
            continue
        exact += 1
        assert torch.allclose(double(turned)(tokens), expected, atol=1e-8), options
    kind = mixer if isinstance(mixer, str) else mixer["kind"]
    assert exact == 2 or kind not in ("attention", "sliding_window")


def with_outliers(folder: Path, to: Path, where: str) -> Path:
    """A model that computes the same as `folder`, with two large channels of the residual stream's norms, or of down's inputs."""
    model = load(folder)
    with torch.no_grad():
        for layer in model.layers:
            if where == "norms":
                for norm, linear in (
                    (layer.mixer_norm, layer.mixer.qkv),
                    (layer.feed_forward_norm, layer.feed_forward.gate_up),
                ):
                    norm.weight[[3, 40]] *= 40
                    linear.weight[:, [3, 40]] /= 40
            else:
                layer.feed_forward.gate_up.weight[[256 + 5, 256 + 77]] *= 10
                layer.feed_forward.down.weight[:, [5, 77]] /= 10
    save(model, to, tokenizer_from=folder)
    return to


@pytest.mark.parametrize(
    ("where", "step", "targets"), [("norms", {"kind": "rotation"}, (r"\.layers\.",)), ("down", R4, ("down_proj",))]
)
def test_outliers_cost_less_after_a_rotation(
    where: str, step: dict, targets: tuple, family_folder, compress, tmp_path: Path
) -> None:
    even = family_folder("mistral", intermediate_size=256)
    folder = with_outliers(even, tmp_path / "outliers", where)
    given = logits(folder)
    assert (given - logits(even)).abs().max() <= 1e-5 * given.abs().max()
    made = {"plain": compress(folder, W4A4, name="plain", targets=targets)}
    made["turned"] = compress(folder, step, W4A4, name="turned", targets=targets)
    lost = {name: (logits(one.folder) - given).norm() / given.norm() for name, one in made.items()}
    assert lost["turned"] < 0.7 * lost["plain"], lost


def test_transform_config_says_what_the_written_model_computes(family_folder, compress, tmp_path: Path) -> None:
    """transformers ignores the block; with compressed-tensors' transforms applied it computes what hone does."""
    import transformers

    transform = pytest.importorskip("compressed_tensors.transform")
    folder = family_folder("llama")
    made = compress(folder, ALL, INT8)
    assert "transformers 5.23 ignores it" in made.techniques[0]["note"]
    model = load(made.folder)
    assert [input_hadamard(layer.feed_forward.down) for layer in model.layers] == [32, 32]
    ours, given = logits(made.folder), logits(folder)
    assert (ours - given).abs().max() <= 0.05 * given.abs().max()
    save(model, tmp_path / "saved")
    assert torch.equal(logits(tmp_path / "saved"), ours)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.float32)
    with torch.no_grad():
        assert (theirs(TOKENS).logits - given).abs().max() > 0.1 * given.abs().max()
        block = json.loads((made.folder / "config.json").read_text())["quantization_config"]["transform_config"]
        transform.apply_transform_config(theirs, transform.TransformConfig.model_validate(block))
        assert (theirs(TOKENS).logits - ours).abs().max() <= 1e-5


@pytest.mark.parametrize("quantizer", [INT8, INT4], ids=["int8", "packed"])
def test_dequantized_weights_are_those_of_inputs_that_are_not_multiplied(
    quantizer: dict, family_folder, compress, tmp_path: Path
) -> None:
    made = compress(family_folder("llama"), ALL, quantizer)
    checkpoint = dequantized(Checkpoint(made.folder))
    assert "quantization_config" not in checkpoint.values
    with torch.no_grad():
        assert torch.allclose(checkpoint.build()(TOKENS), logits(made.folder), atol=1e-4)
    with pytest.raises(ArtifactError, match="which llama"):
        export(made.folder, tmp_path / "model.gguf")


def test_calibration_sees_rotated_inputs(family_folder, compress, calibration_text: Path) -> None:
    """GPTQ of the rotated model is better than rounding it: its Hessians are those of the rotated inputs, down's as well."""
    options = {"calibration_text": str(calibration_text), "check_sequences": 4}
    folder = family_folder("mistral")
    errors = {}
    for kind in ("rtn", "gptq"):
        made = compress(folder, ALL, {**W4A4, "kind": kind}, name=kind, **options)
        rows = [json.loads(line) for line in (made.folder / "layers.jsonl").read_text().splitlines()]
        errors[kind] = {row["name"]: row["error"] for row in rows}
        assert made.figures["kl_to_dense"].value < 1
    for name, error in errors["gptq"].items():
        assert error < 0.95 * errors["rtn"][name], name


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps",
    [
        [{"kind": "depth", "num_layers": 1}, {"kind": "rotation"}, {"kind": "rtn", "bits": 8, "group_size": 0}],
        [{"kind": "rotation"}, {"kind": "awq", "grid_size": 3}, {"kind": "rtn", "bits": 8, "group_size": 32}],
        [ALL, {"kind": "wanda", "sparsity": 0.01}, {"kind": "gptaq", "bits": 8, "group_size": 32}],
    ],
    ids=["after depth", "before awq", "before a pruner"],
)
def test_it_composes_with_other_steps(steps: list, family_folder, compress, calibration_text: Path) -> None:
    options = {"calibration_text": str(calibration_text)}
    folder = family_folder("llama")
    made = compress(folder, *steps, **options)
    if steps[0]["kind"] == "depth":
        folder = compress(folder, steps[0], name="less", **options).folder
    given = logits(folder)
    assert (logits(made.folder) - given).abs().max() <= 0.05 * given.abs().max()
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value


@pytest.mark.slow
def test_a_quantized_folder_is_dequantized_and_rotated(family_folder, compress) -> None:
    first = compress(family_folder("llama"), ALL, INT8, name="first")
    again = compress(first.folder, ALL | {"seed": 1}, INT8, name="again", requantize=True)
    given = logits(first.folder)
    assert (logits(again.folder) - given).abs().max() <= 0.05 * given.abs().max()
    assert again.figures["model_bytes"].value == again.figures["model_bytes"].estimate.value


def test_tensors_of_another_shape_are_named(family_folder, compress, tmp_path: Path) -> None:
    folder = shutil.copytree(family_folder("llama"), tmp_path / "other")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"intermediate_size": 128}))
    with pytest.raises(
        ArtifactError, match=r"gate_proj.weight has shape \[96, 64\], but config.json describes \[128, 64\]"
    ):
        compress(folder, {"kind": "rotation"})


def test_the_head_is_counted_and_said(family_folder, capsys) -> None:
    facts = CheckpointFacts.of(family_folder("llama"))
    plans = [
        Compress.read({"steps": steps}).plan({"model": facts}, describe()) for steps in ([INT8], [R2, INT8], [R1, INT8])
    ]
    sizes = [plan.estimates["model_bytes"].value for plan in plans]
    assert sizes[0] == sizes[1]
    assert 0 <= sizes[2] - sizes[0] - facts.config.vocab_size * facts.config.hidden_size * 4 < 200
    for family, said in (("llama", "which was tied to the embedding, is stored apart: "), ("mistral", "")):
        checkpoint = Checkpoint(family_folder(family))
        capsys.readouterr()
        rotated(checkpoint, Rotation(), {}, Run())
        assert (said in capsys.readouterr().err) if said else not capsys.readouterr().err
    assert "num_params" not in plans[1].estimates
    assert plans[2].estimates["num_params"].value == plans[2].facts.config.num_params
    assert plans[2].facts.config.num_params > facts.config.num_params
    assert plans[1].estimates["time_s"].value > plans[0].estimates["time_s"].value


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([{**R1, "r1": False}], "r1, r2 and r4 are all false"),
        ([{**R4, "block_size": 24}, W4A4], "block_size 24 is no power of two of at least 16"),
        ([ALL], "rotation with r4 multiplies inputs at run time, which gains nothing without a quantizer"),
        ([{"kind": "awq"}, R1, INT4], "rotation comes after awq"),
        ([ALL, {"kind": "awq"}, INT4], "rotation with r4 stands between up and down.*: leave awq out"),
        ([R1, R2, INT4], "rotation comes after rotation"),
        ([INT4, R1], "rotation needs weights:float, which rtn removes"),
    ],
)
def test_orders_and_options_that_cannot_be_run_are_refused(steps: list, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Compress.read({"steps": steps})


@pytest.mark.parametrize(
    ("family", "steps", "fields", "words"),
    [
        ("gemma2", [R1], {}, "r1: layer 0 has norms after its blocks"),
        ("olmo2", [{"kind": "rotation"}, INT4], {}, "r1: layer 0 has norms after its blocks"),
        ("llama", [R4, {**INT4, "layout": "gptq", "group_size": 32}], {}, "gptq cannot say that inputs are multiplied"),
        (
            "llama",
            [{**R4, "block_size": 64}, INT4],
            {},
            "the 96 input features of layers.0.feed_forward.down, and 64 is none",
        ),
        ("llama", [R4, INT4], {"targets": ["self_attn"]}, "inputs of down projections, and none is among the targets"),
    ],
)
def test_models_that_would_not_be_the_same_are_refused(
    family: str, steps: list, fields: dict, words: str, family_folder
) -> None:
    facts = CheckpointFacts.of(family_folder(family))
    with pytest.raises(SpecError, match=words):
        Compress.read({"steps": steps, **fields}).plan({"model": facts}, describe())


def test_widths_without_a_block_are_refused(family_folder) -> None:
    facts = CheckpointFacts.of(family_folder("llama", intermediate_size=172))
    with pytest.raises(SpecError, match=r"blocks of at least 16 columns.*172 input features.*and 4 is none"):
        Compress.read({"steps": [R4, W4A4]}).plan({"model": facts}, describe())


@pytest.mark.parametrize("family", ["gemma2", "olmo2"])
def test_value_heads_and_inputs_of_down_are_rotated_where_the_stream_cannot_be(
    family: str, family_folder, compress
) -> None:
    folder = family_folder(family)
    given = logits(folder)
    made = compress(folder, {"kind": "rotation", "r1": False, "r4": True}, {**INT8, "bits": 8})
    assert (logits(made.folder) - given).abs().max() <= 0.05 * given.abs().max()
