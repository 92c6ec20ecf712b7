"""Low-rank steps: their factors against the papers' own formulas, and what they write against the model that is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.compress import LOW_RANK, QUANTIZERS
from hone.compress.calibration import from_text
from hone.compress.matrix import Matrix
from hone.compress.stage import Compress
from hone.eval.score import score
from hone.measure.machine import describe
from hone.model.decoder import Decoder
from hone.model.facts import CheckpointFacts
from hone.model.folder import weights_bytes
from hone.model.hf import Checkpoint, load, save
from hone.model.quantized.dense import dequantized
from hone.model.weights.tensors import layer_modules
from hone.serve.engine import Engine
from hone.serve.request import SamplingParams
from hone.serve.spec import EngineSpec
from hone.solvers import factors

RTN = {"kind": "rtn", "bits": 2, "group_size": 32}
GPTQ = {"kind": "gptq", "bits": 2, "group_size": 32}
TOKENS = torch.arange(60)[None] % 50


def problem(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """An error [N, K] and H [K, K] of inputs that are correlated and of very different size, float64."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = (
        random(8 * columns, columns) * torch.logspace(1, -2, columns, dtype=torch.float64) @ random(columns, columns)
    )
    return random(rows, columns), inputs.T @ inputs / len(inputs)


def lost(error: torch.Tensor, product: torch.Tensor, hessian: torch.Tensor | None = None) -> float:
    left = error - product
    return float(((left if hessian is None else left @ hessian) * left).sum())


def truncated(weights: torch.Tensor, rank: int) -> torch.Tensor:
    """The truncated SVD, by the library's own."""
    left, sizes, right = torch.linalg.svd(weights, full_matrices=False)
    return left[:, :rank] * sizes[:rank] @ right[:rank]


def eora(error: torch.Tensor, hessian: torch.Tensor, rank: int) -> torch.Tensor:
    """Algorithm 1 of arXiv:2410.21271: the SVD of the error in the scaled eigenspace, projected back by the inverse."""
    values, vectors = torch.linalg.eigh(hessian)
    scaled = vectors * values.sqrt()
    return truncated(error @ scaled, rank) @ torch.linalg.inv(scaled)


def svd_llm(weights: torch.Tensor, hessian: torch.Tensor, rank: int) -> torch.Tensor:
    """Section 3 of arXiv:2403.07378: whitened by the Cholesky factor of X X^T."""
    factor = torch.linalg.cholesky(hessian)
    return truncated(weights @ factor, rank) @ torch.linalg.inv(factor)


@pytest.mark.parametrize(("rows", "columns"), [(24, 40), (40, 24), (32, 32)])
@pytest.mark.parametrize("rank", [1, 5, 20])
def test_factors_are_those_of_the_papers(rows: int, columns: int, rank: int) -> None:
    error, hessian = problem(rows, columns)
    down, up = factors.best(error, hessian, rank)
    assert down.shape == (rank, columns) and up.shape == (rows, rank)
    for paper in (eora, svd_llm):
        torch.testing.assert_close(up @ down, paper(error, hessian, rank), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(down.norm(dim=1), up.norm(dim=0))
    plain = factors.best(error, None, rank)
    torch.testing.assert_close(plain[1] @ plain[0], truncated(error, rank))


def test_no_other_factors_lose_less() -> None:
    error, hessian = problem(24, 40)
    down, up = factors.best(error, hessian, 6)
    least = lost(error, up @ down, hessian)
    scales = hessian.diagonal().sqrt()
    others = [
        truncated(error, 6),
        truncated(error * scales, 6) / scales,
        truncated(error * scales.sqrt(), 6) / scales.sqrt(),
    ]
    for other in others:
        assert least < 0.95 * lost(error, other, hessian)
    generator = torch.Generator().manual_seed(1)
    for size in (1e-3, 1e-1):
        moved = [
            one + size * one.std() * torch.randn(one.shape, generator=generator, dtype=one.dtype) for one in (up, down)
        ]
        assert lost(error, moved[0] @ moved[1], hessian) > least
    best_b = error @ hessian @ down.T @ torch.linalg.inv(down @ hessian @ down.T)
    torch.testing.assert_close(best_b, up)  # neither factor alone can do better
    assert lost(error, truncated(error, 6)) < lost(error, up @ down)


@pytest.mark.parametrize("rows", [24, 60])
def test_inputs_that_do_not_span_the_space_are_no_problem(rows: int) -> None:
    """EoRA as in the paper divides by the root of an eigenvalue, which is zero here."""
    error, hessian = problem(rows, 40)
    seen = torch.randn(40, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    hessian = seen @ seen.T
    for rank in (5, 9):
        down, up = factors.best(error, hessian, rank)
        assert bool(torch.isfinite(down).all()) and bool(torch.isfinite(up).all())
        expected = torch.linalg.svdvals(error @ seen)[rank:].square().sum()
        assert lost(error, up @ down, hessian) == pytest.approx(float(expected), rel=1e-5, abs=1e-5)
    zero = factors.best(error, torch.zeros_like(hessian), 3)
    assert all(bool(torch.isfinite(one).all()) for one in (*zero, *factors.best(torch.zeros(8, 40), hessian, 3)))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("rows", "columns", "rank"), [(256, 224, 8), (208, 320, 8)])
def test_an_iteration_is_within_half_a_percent_of_the_exact_factors(
    rows: int, columns: int, rank: int, weighted: bool
) -> None:
    """On noise, the hardest spectrum, and in float32."""
    error, hessian = problem(rows, columns)
    hessian = hessian if weighted else None
    assert not factors.is_exact(rows, columns, rank)
    exact = factors.exact(error, hessian, rank)
    best = lost(error, exact @ (exact.T @ error), hessian)
    down, up = factors.best(error.float(), None if hessian is None else hessian.float(), rank)
    found = lost(error, up @ down, hessian)
    assert best * (1 - 1e-6) <= found < 1.005 * best
    again = factors.best(error.float(), None if hessian is None else hessian.float(), rank)
    assert torch.equal(again[0], down) and torch.equal(again[1], up)


def loftq(weights: np.ndarray, rank: int, turns: int) -> list[float]:
    """Algorithm 1 of arXiv:2310.08659 with rounding to nearest and factors in float16: the error after each turn."""
    added, found = np.zeros_like(weights), []
    for _ in range(turns):
        matrix = Matrix("w", torch.from_numpy(weights - added), torch.float32)
        QUANTIZERS.read(RTN).apply(matrix)
        rounded = matrix.weight.numpy()
        left, sizes, right = np.linalg.svd(weights - rounded, full_matrices=False)
        roots = np.sqrt(sizes[:rank])
        up, down = ((left[:, :rank] * roots).astype(np.float16), (roots[:, None] * right[:rank]).astype(np.float16))
        added = up.astype(np.float64) @ down.astype(np.float64)
        found.append(float(np.linalg.norm(weights - rounded - added)))
    return found


def corrected(step: dict, quantizer: dict, weights: torch.Tensor, statistics: dict[str, torch.Tensor]) -> Matrix:
    chosen = QUANTIZERS.read(quantizer)
    matrix = Matrix("w", weights, torch.float32, statistics, quantize=chosen.apply)
    chosen.apply(matrix)
    LOW_RANK.read(step).apply(matrix)
    return matrix


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_loftq_is_the_alternation_of_its_paper(turns: int) -> None:
    weights, _ = problem(48, 64)
    expected = loftq(weights.numpy(), 4, turns)
    matrix = corrected({"kind": "loftq", "rank": 4, "iterations": turns}, RTN, weights, {})
    found = float((matrix.weight - weights).norm())
    assert found == pytest.approx(min(expected), rel=1e-9)
    assert turns == 1 or found < 0.99 * expected[0]
    assert float((matrix.base - weights).norm()) > found


@pytest.mark.parametrize("quantizer", [RTN, GPTQ], ids=["rtn", "gptq"])
def test_eora_loses_less_where_inputs_are(quantizer: dict) -> None:
    weights, hessian = problem(48, 64)
    steps = {
        "loftq": {"kind": "loftq", "rank": 6},
        "eora": {"kind": "eora", "rank": 6},
        "again": {"kind": "eora", "rank": 6, "iterations": 4},
    }
    found = {name: corrected(step, quantizer, weights, {"hessian": hessian}) for name, step in steps.items()}
    outputs = {name: matrix.errors().output for name, matrix in found.items()}
    assert outputs["eora"] < 0.8 * outputs["loftq"] and outputs["again"] < outputs["eora"]
    assert found["eora"].errors().weight > found["loftq"].errors().weight
    base = found["eora"].base
    expected = base + eora(weights - base, hessian, 6)
    assert lost(weights, found["eora"].weight, hessian) == pytest.approx(lost(weights, expected, hessian), rel=1e-3)


def test_each_module_of_a_fused_matrix_has_factors_of_its_own() -> None:
    weights, hessian = problem(48, 64)
    for kind, exact in (("svd", None), ("asvd", hessian)):
        matrix = Matrix("w", weights, torch.float64, {"hessian": hessian}, modules=(32, 8, 8))
        LOW_RANK.read({"kind": kind, "ratio": 0.75}).apply(matrix)
        assert [len(down) for down, _ in matrix.factors] == [16, 5, 5]  # 0.75 N K / (N + K)
        for part, whole, (down, up) in zip(matrix.weight.split([32, 8, 8]), weights.split([32, 8, 8]), matrix.factors):
            expected = truncated(whole, len(down)) if exact is None else svd_llm(whole, exact, len(down))
            torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(part, up @ down)


def test_ranks_keep_the_fraction_that_was_asked_for() -> None:
    step = LOW_RANK.read({"kind": "svd", "ratio": 0.8})
    for rows, columns in ((4096, 4096), (1024, 4096), (14336, 4096), (64, 172)):
        rank = step.rank_of(rows, columns)
        assert 0.8 * rows * columns - 8 * (rows + columns) < rank * (rows + columns) <= 0.8 * rows * columns
        assert rank % 8 == 0 or rank < 16
    assert LOW_RANK.read({"kind": "svd"}).rank_of(4096, 4096) == step.rank_of(4096, 4096) == 1632


def served(model: Decoder) -> list[int]:
    """Six tokens by the engine."""
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    one = Engine(model, EngineSpec(num_pages=16, block_size=8))
    return list(one.generate([TOKENS[0, :9].tolist()], params)[0].tokens)


@torch.no_grad()
def greedy(model: Decoder) -> list[int]:
    """The same by whole forward passes."""
    text = TOKENS[:, :9]
    for _ in range(6):
        text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
    return text[0, 9:].tolist()


CORRECTED = [
    ([GPTQ, {"kind": "eora", "rank": 4}], {}),
    ([{**RTN, "activations": "int8_token"}, {"kind": "loftq", "rank": 4, "iterations": 2}], {}),
    ([{"kind": "wanda"}, {"kind": "eora", "rank": 4}], {"ignore": ["lm_head", "down_proj"]}),
]
CORRECTED = [
    pytest.param(*case, id=name, marks=() if name == "gptq" else pytest.mark.slow)
    for name, case in zip(("gptq", "rounded", "pruned"), CORRECTED)
]


@pytest.mark.parametrize("family", ["llama", pytest.param("phi3", marks=pytest.mark.slow)])  # q_proj ...; one qkv_proj
@pytest.mark.parametrize(("steps", "options"), CORRECTED)
def test_a_corrected_folder_is_its_base_and_the_adapter(
    family: str, steps: list[dict], options: dict, family_folder, compress, calibration_text: Path
) -> None:
    options = {"calibration_text": str(calibration_text), "check_sequences": 4, **options}
    made = compress(family_folder(family), *steps, **options)
    config = json.loads((made.folder / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 4)
    tensors = load_file(made.folder / "adapter" / "adapter_model.safetensors")
    assert all(one.dtype == torch.float16 for one in tensors.values())
    size = made.figures["model_bytes"]
    assert size.value == size.estimate.value == weights_bytes(made.folder)
    assert size.value == sum(path.stat().st_size for path in made.folder.rglob("*.safetensors"))
    # The loaded model is that of the checkpoint's weights plus B A, written out by hand.
    model, checkpoint = load(made.folder, dtype=torch.float32), Checkpoint(made.folder)
    dense = dequantized(Checkpoint(made.folder)) if checkpoint.quantization is not None else checkpoint
    count = 0
    for index, layer in enumerate(model.layers):
        for module in layer_modules(checkpoint.config, index):
            weight = dense.tensor(f"{module.name}.weight").float()
            up, down = (tensors.get(f"base_model.model.{module.name}.lora_{part}.weight") for part in "BA")
            if up is not None:
                weight, count = weight + up.float() @ down.float(), count + 1
            found = layer.get_submodule(module.path).dequantize(torch.float32)[module.rows]
            torch.testing.assert_close(found, weight, rtol=1e-4, atol=1e-5)
    assert 2 * count == len(tensors)
    # The engine's figures are those of that model: its second pass and its check ran the adapter.
    samples = from_text(calibration_text, family_folder(family), num_sequences=16, seq_len=32, seed=0, num_spare=4)
    tokens = samples.spare.tokens
    starts = np.arange(0, tokens.size + 1, 32)
    scored = score(model, tokens.ravel(), starts, window=32, reference=load(family_folder(family)))
    assert made.figures["kl_to_dense"].value == pytest.approx(scored.mean_kl, rel=2e-3)
    if "activations" not in steps[0]:  # rounding of inputs makes other codes of sums in another order
        assert served(model) == greedy(model)
    without = compress(family_folder(family), steps[0], name="without", **options)
    name = "relative_output_error"
    assert made.figures[name].value < 0.97 * without.figures[name].value
    assert made.figures["kl_to_dense"].value < without.figures["kl_to_dense"].value
    assert made.techniques[-1]["slot"] == "low rank" and "adapter" in made.techniques[-1]["note"]
    assert CheckpointFacts.of(made.folder).config == model.config
    with pytest.raises(SpecError, match="has adapters around its linears"):
        compress(made.folder, {"kind": "rtn", "group_size": 0}, name="twice", requantize=True)


@pytest.mark.parametrize("kind", [pytest.param("svd", marks=pytest.mark.slow), "asvd"])
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)])  # without and with biases
def test_a_factored_folder_is_read_by_hone_alone(
    kind: str, family: str, family_folder, compress, calibration_text: Path, tmp_path: Path
) -> None:
    import transformers

    given = family_folder(family)
    options = {"calibration_text": str(calibration_text), "check_sequences": 4}
    made = compress(given, {"kind": kind, "ratio": 0.5}, **options)
    size = made.figures["model_bytes"]
    assert size.value == size.estimate.value == weights_bytes(made.folder) < 0.75 * weights_bytes(given)
    checkpoint, model = Checkpoint(made.folder), load(made.folder)
    found = model.layers[0].get_submodule("mixer.qkv").dequantize(torch.float32)
    part = {name: checkpoint.tensor(f"model.layers.0.self_attn.q_proj.{name}") for name in ("factor_a", "factor_b")}
    torch.testing.assert_close(found[:64], part["factor_b"] @ part["factor_a"])
    tokens = from_text(calibration_text, given, num_sequences=16, seq_len=32, seed=0, num_spare=4).spare.tokens
    starts = np.arange(0, tokens.size + 1, 32)
    scored = score(model, tokens.ravel(), starts, window=32, reference=load(given))
    assert made.figures["kl_to_dense"].value == pytest.approx(scored.mean_kl, rel=1e-3)
    with pytest.raises(ValueError, match="hone"):  # rather than random weights for those that it does not find
        transformers.AutoModelForCausalLM.from_pretrained(made.folder)
    with pytest.warns(RuntimeWarning, match="low-rank factors"):
        save(model, tmp_path / "again")
    assert torch.equal(load(tmp_path / "again")(TOKENS), model(TOKENS))
    with pytest.raises(SpecError, match="stores low-rank factors"):
        compress(made.folder, {"kind": "rtn", "group_size": 0}, name="twice", requantize=True)


@pytest.mark.slow
def test_whitening_pays_on_the_outputs(family_folder, compress, calibration_text: Path) -> None:
    options = {"calibration_text": str(calibration_text)}
    made = {kind: compress(family_folder("llama"), {"kind": kind}, name=kind, **options) for kind in ("svd", "asvd")}
    outputs, weights = (
        {kind: one.figures[f"relative_{what}_error"].value for kind, one in made.items()}
        for what in ("output", "weight")
    )
    assert outputs["asvd"] < 0.8 * outputs["svd"] and weights["asvd"] > weights["svd"]


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "compressed-tensors"])
def test_peft_computes_the_same_logits(packed: bool, family_folder, compress, calibration_text: Path) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    first = {**GPTQ, "bits": 4} if packed else {"kind": "wanda"}
    options = {"calibration_text": str(calibration_text), "ignore": ["lm_head", "down_proj"]}
    made = compress(family_folder("llama"), first, {"kind": "eora", "rank": 4}, **options)
    base = transformers.AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.float32).eval()
    with torch.no_grad():
        before = base(TOKENS).logits
        adapted = peft.PeftModel.from_pretrained(base, str(made.folder / "adapter")).eval()
        found, expected = adapted(TOKENS).logits, load(made.folder, dtype=torch.float32)(TOKENS)
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())
    assert float((before - expected).abs().max()) > 1e-2 * float(expected.abs().max())


WRONG = [
    ([{"kind": "eora"}], "put one before it"),
    ([{"kind": "eora"}, GPTQ], "eora comes before gptq"),
    ([GPTQ, {"kind": "eora"}, {"kind": "loftq"}], "eora comes before loftq"),
    ([{"kind": "wanda"}, {"kind": "loftq", "iterations": 2}], "put a quantizer before it"),
    ([{"kind": "wanda"}, {"kind": "svd"}], "loses what wanda did"),
    ([GPTQ, {"kind": "asvd"}], "loses what gptq did"),
    ([{"kind": "svd"}, GPTQ], "svd comes before gptq"),
    ([{"kind": "svd", "ratio": 0.5, "rank": 4}], "give ratio or rank"),
    ([{"kind": "svd", "ratio": 1.0}], "ratio"),
    ([{"kind": "svd", "rank": 64}], "q_proj, 64 x 64, are not smaller"),
    ([{"kind": "svd", "ratio": 0.01}], "keep nothing"),
    ([GPTQ, {"kind": "eora", "rank": 32}], "rank 32 of .* are not smaller than its weight"),
    ([GPTQ, {"kind": "eora", "rank": 0}], "rank"),
]


@pytest.mark.parametrize(("steps", "says"), WRONG)
def test_wrong_lists_are_refused(steps: list[dict], says: str, family_folder, compress, calibration_text: Path) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        compress(family_folder("llama"), *steps, calibration_text=str(calibration_text))
    assert caught.value.fix


def test_what_cannot_be_combined_is_said(family_folder, compress, calibration_text: Path) -> None:
    text = {"calibration_text": str(calibration_text)}
    with pytest.raises(SpecError, match="needs hessian"):
        compress(family_folder("llama"), RTN, {"kind": "eora", "rank": 4}, calibration_text=None)
    with pytest.raises(SpecError, match="budgets weights alone, not the adapter of eora"):
        allocation = {"kind": "hessian", "bits_per_weight": 3.5}
        compress(family_folder("llama"), GPTQ, {"kind": "eora", "rank": 4}, allocation=allocation, **text)


def test_a_plan_knows_the_adapter_before_there_is_one(family_folder) -> None:
    model = Artifact.read(family_folder("llama"))
    plan, plain = (
        Compress.read({"steps": steps}).plan({"model": CheckpointFacts.of(model.folder)}, describe())
        for steps in ([RTN, {"kind": "loftq", "rank": 4}], [RTN])
    )
    (adapter,) = plan.facts.config.adapters
    assert (adapter.rank, adapter.scale) == (4, 1.0) and "q_proj" in adapter.target_modules
    added = plan.facts.weights_bytes - plain.facts.weights_bytes
    params = plan.facts.config.num_params - plain.facts.config.num_params
    assert params == 2 * 4 * (2 * 128 + 2 * 96 + 3 * 160) and added == pytest.approx(2 * params, abs=4096)
    assert plan.estimates["model_bytes"].value - plain.estimates["model_bytes"].value == added
    assert plan.estimates["time_s"].value > plain.estimates["time_s"].value


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("rows", "rank"), [(96, 24), (300, 24), (512, 8)])  # both sides, then the iteration
def test_a_gpu_loses_as_little(rows: int, rank: int) -> None:
    error, hessian = problem(rows, 256)
    error, hessian = error.float(), hessian.float()
    products = []
    for device in ("cpu", "cuda"):
        down, up = factors.best(error.to(device), hessian.to(device), rank)
        products.append(lost(error.double(), (up @ down).cpu(), hessian.double()))
    assert products[1] == pytest.approx(products[0], rel=1e-3)
