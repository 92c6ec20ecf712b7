"""Compression on several ranks: what one process makes, but for the order of sums; equal bytes in equal runs; no hang."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hone.base.ranks import Mesh
from hone.compress.capture import share
from hone.compress.stage import Compress
from hone.cost.work import Work, share_out
from hone.measure.machine import describe
from hone.model.facts import CheckpointFacts
from tests.compress.test_resume import contents
from tests.forking import forking

GPTQ = {"kind": "gptq", "bits": 4, "group_size": 32}
STATIC = {"kind": "rtn", "bits": 8, "group_size": 0, "activations": "int8_tensor"}
LLAMA3 = {  # rows and columns of the linears of a layer
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}


@pytest.fixture(scope="module")
def ranked():
    """ranked(number of ranks, spec, model, out, trouble='', rank=0): the content or error that every rank reports."""
    with forking("tests.compress.ranks:compress") as call:

        def run(*arguments) -> list:
            ended = call(*arguments)
            assert ended.returncode == 0, ended.stderr
            return [result if code == 0 else (code, errors) for code, result, errors in ended.result]

        yield run


def spec_of(calibration_text: Path, *steps: dict, **more) -> dict:
    given = {"num_sequences": 11, "seq_len": 32, "batch_size": 2, "check_sequences": 5}
    return {"steps": list(steps), "calibration_text": str(calibration_text), **given, **more}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for path in sorted(folder.glob("*.safetensors")) for name, one in load_file(path).items()}


def figures(folder: Path) -> dict[str, float]:
    return {row["name"]: row["value"] for row in json.loads((folder / "hone.json").read_text())["figures"]}


def assert_alike(one: Path, other: Path, *, rounded: bool = False) -> None:
    """The same tensors but for codes at the edge between two, and figures within what they change.

    Where inputs are `rounded`, too, such a code moves some of them by a whole step, and with them what later layers are
    calibrated with: there only the first layer's tensors are compared, the others by the figures.
    """
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    compared = [name for name in first if not rounded or ".layers.0." in name]
    assert compared
    for name in compared:
        if first[name].is_floating_point():
            torch.testing.assert_close(second[name], first[name], rtol=2e-3, atol=1e-6, msg=name)
        else:
            codes = [part[name].contiguous().view(torch.uint8) for part in (first, second)]
            assert (codes[0] != codes[1]).float().mean() < (2e-2 if rounded else 5e-3), name
    for name in ("relative_output_error", "relative_weight_error", "kl_to_dense", "perplexity_ratio"):
        wanted = pytest.approx(figures(one)[name], rel=5e-2 if rounded else 5e-3)
        assert figures(other)[name] == wanted, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "counts"),
    [
        ([{"kind": "awq", "grid_size": 4}, GPTQ], (2, 3)),
        ([{"kind": "smoothquant"}, {**STATIC, "kind": "gptq", "observer": "entropy"}], (3,)),
        ([{"kind": "gptaq", "bits": 4, "group_size": 32}], (2,)),
        ([{"kind": "sparsegpt", "pattern": "2:4"}], (2,)),
        ([{"kind": "rotation", "r4": True}, {**STATIC, "kind": "gptq"}, {"kind": "kv_cache", "per": "head"}], (2,)),
        ([GPTQ, {"kind": "eora", "rank": 4}], (2,)),
    ],
    ids=["awq", "entropy", "gptaq", "sparsegpt", "rotation", "eora"],
)
def test_ranks_make_what_one_process_makes(
    steps: list, counts: tuple, ranked, tiny_llama, calibration_text, tmp_path
) -> None:
    spec = spec_of(calibration_text, *steps)
    ranked(1, spec, tiny_llama, tmp_path / "compress-1")
    assert "num_ranks" not in figures(tmp_path / "compress-1")
    for count in counts:
        out = tmp_path / f"compress-{count}"
        found = ranked(count, spec, tiny_llama, out)
        assert len(found) == count and set(found) == {found[0]} and isinstance(found[0], str), found
        assert_alike(tmp_path / "compress-1", out, rounded=any("activations" in step for step in steps))
        assert figures(out)["num_ranks"] == count
    again = ranked(counts[-1], spec, tiny_llama, tmp_path / "again" / "compress-2")
    assert again == found, "equal runs make equal bytes"


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps", [[{"kind": "experts", "num_experts": 3}, GPTQ], [{"kind": "awq", "grid_size": 4}, STATIC]]
)
def test_ranks_share_the_matrices_of_experts(steps: list, ranked, experts_folder, calibration_text, tmp_path) -> None:
    spec = spec_of(calibration_text, *steps)
    ranked(1, spec, experts_folder, tmp_path / "compress-1")
    found = ranked(2, spec, experts_folder, tmp_path / "compress-2")
    assert set(found) == {found[0]} and isinstance(found[0], str), found
    first, second = tensors(tmp_path / "compress-1"), tensors(tmp_path / "compress-2")
    assert first.keys() == second.keys()
    for name in first:  # a code that rounds the other way may send a token of layer 1 to another expert
        if ".layers.0." in name and first[name].is_floating_point():
            torch.testing.assert_close(second[name], first[name], rtol=2e-3, atol=1e-6, msg=name)


@pytest.mark.slow
def test_ranks_merge_the_same_experts(ranked, family_folder, calibration_text, tmp_path) -> None:
    folder = family_folder("mixtral", num_local_experts=6, num_experts_per_tok=2)
    spec = spec_of(calibration_text, {"kind": "expert_merging", "num_experts": 3, "align": True})
    ranked(1, spec, folder, tmp_path / "compress-1")
    found = ranked(2, spec, folder, tmp_path / "compress-2")
    assert set(found) == {found[0]} and isinstance(found[0], str), found
    first, second = tensors(tmp_path / "compress-1"), tensors(tmp_path / "compress-2")
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(second[name], first[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.slow
def test_sums_are_the_only_difference(ranked, tiny_llama, calibration_text, tmp_path) -> None:
    # Nothing here adds over batches: ranges of inputs and nearest codes.
    static = [{"kind": "smoothquant"}, {**STATIC, "observer": "moving_average"}]
    nearest = {"steps": [{"kind": "rtn", "bits": 4, "group_size": 32}]}
    specs = [
        spec_of(calibration_text, *static, batch_size=4),
        spec_of(calibration_text, *static, batch_size=16),  # two of three ranks have no batch
        nearest,
    ]
    for number, spec in enumerate(specs):
        alone = ranked(1, spec, tiny_llama, tmp_path / f"compress-{number}")
        assert ranked(3, spec, tiny_llama, tmp_path / f"compress-{number}-3") == alone * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "allocation"),
    [
        ([{"kind": "depth", "importance": "loss"}, GPTQ], None),
        ([{"kind": "depth"}], None),
        ([{"kind": "width", "num_heads": 2, "hidden_size": 32, "intermediate_size": 96}], None),
        ([GPTQ], "hessian"),
        ([GPTQ], "kl"),
        ([GPTQ], "fisher"),
        ([{"kind": "magnitude", "scope": "global"}, GPTQ], None),
    ],
    ids=["loss", "influence", "width", "hessian", "kl", "fisher", "global"],
)
def test_ranks_decide_what_one_process_decides(
    steps: list, allocation: str | None, ranked, tiny_llama, calibration_text, tmp_path
) -> None:
    given = {"kind": allocation, "bits": [3, 4, 8], "bits_per_weight": 4.7}
    more = {"allocation": {**given, "probe_sequences": 2} if allocation == "kl" else given} if allocation else {}
    spec = spec_of(calibration_text, *steps, **more)
    ranked(1, spec, tiny_llama, tmp_path / "compress-1")
    found = ranked(3, spec, tiny_llama, tmp_path / "compress-3")
    assert set(found) == {found[0]} and isinstance(found[0], str), found
    folders = [tmp_path / "compress-1", tmp_path / "compress-3"]
    one, three = ((folder / "config.json").read_text() for folder in folders)
    assert one == three, "the same layers, sizes and bits"
    kept, made = map(tensors, folders)
    assert kept.keys() == made.keys()
    for name, tensor in kept.items():
        if name.endswith("embed_tokens.weight") or steps[-1] is not GPTQ:
            assert torch.equal(tensor, made[name]), name


@pytest.mark.slow
def test_an_error_of_one_rank_ends_all_of_them(ranked, tiny_llama, calibration_text, tmp_path) -> None:
    spec, out = spec_of(calibration_text, GPTQ), tmp_path / "compress-a"
    finite = ranked(3, spec, tiny_llama, out, "nan", 2)
    assert set(finite) == {finite[0]}
    assert finite[0].startswith("ArtifactError: calibration: the inputs of model.layers.1.")
    first, (code, errors), third = ranked(3, spec, tiny_llama, out, "bug", 1)
    assert first == third == "MachineError: rank 1 failed: ZeroDivisionError: a bug"
    assert code == 1 and "ZeroDivisionError: a bug" in errors, "the rank itself shows where"
    full = ranked(2, spec, tiny_llama, tmp_path / "compress-b", "full", 0)
    assert len(set(full)) == 1 and full[0].startswith("FitError: no space left")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_others_and_any_number_resumes(
    rank: int, ranked, tiny_llama, calibration_text, tmp_path
) -> None:
    spec, out = spec_of(calibration_text, {"kind": "awq", "grid_size": 5}, GPTQ), tmp_path / "compress-torn"
    whole = ranked(2, spec, tiny_llama, tmp_path / "compress-whole")
    ended = ranked(2, spec, tiny_llama, out, "killed", rank)
    assert ended[rank][0] == -9 and ended[1 - rank].startswith(f"Lost: rank {1 - rank} lost the other ranks")
    partial = out.with_name("compress-torn.partial")
    assert (partial / "state" / "layer-00000.json").exists() and not out.exists()
    shard = "model-00002-of-00003.safetensors"
    before = (partial / shard).stat().st_mtime_ns
    assert ranked(2, spec, tiny_llama, out) == whole
    assert (out / shard).stat().st_mtime_ns == before, "resumed after the first layer"
    assert contents(out) == contents(tmp_path / "compress-whole")
    other = tmp_path / "other" / "compress-torn"
    ranked(2, spec, tiny_llama, other, "killed", rank)
    assert len(ranked(3, spec, tiny_llama, other)) == 3
    assert_alike(tmp_path / "compress-whole", other)


def test_a_share_is_whole_batches_in_order() -> None:
    for count, size, ranks in ((128, 8, 4), (11, 2, 3), (3, 8, 4), (1, 1, 2)):
        parts = [share(count, size, Mesh(rank, rank, ranks)) for rank in range(ranks)]
        rows = [list(range(count))[part] for part in parts]
        assert list(chain(*rows)) == list(range(count))
        assert all(not part or part[0] % size == 0 for part in rows)
        batches = [-(-len(part) // size) for part in rows]
        assert max(batches) - min(batches) <= 1 and batches == sorted(batches, reverse=True)


def test_solves_are_spread_by_their_work() -> None:
    works = [[Work(flops=2.0 * n * k * k + k**3, num_bytes=100.0 * n * k)] for n, k in LLAMA3.values()]
    cost = [one.flops + 12 * one.num_bytes for (one,) in works]
    assert share_out(works, 1, "cpu") == [0] * 4
    two = share_out(works, 2, "cpu")
    loads = [sum(value for value, rank in zip(cost, two, strict=True) if rank == one) for one in range(2)]
    assert max(loads) == cost[3], "the longest alone, the others together"
    assert sorted(share_out(works, 4, "cpu")) == [0, 1, 2, 3] and max(share_out(works, 9, "cpu")) <= 8
    assert share_out([], 3, "cpu") == []


def test_a_plan_counts_the_rank_with_most_to_do(tiny_llama, calibration_text) -> None:
    facts = {"model": CheckpointFacts.of(tiny_llama)}
    spec = Compress.read(spec_of(calibration_text, GPTQ, num_sequences=24, batch_size=4, check_sequences=0))
    one, four = (spec.plan(facts, describe().model_copy(update={"num_ranks": count})).estimates for count in (1, 4))
    states, room = 24 * 32 * 64 * 4, 4 * 4 * 160**2
    whole, shared = (estimates["memory_growth_bytes"].value for estimates in (one, four))
    assert whole - shared == pytest.approx(states * 4 / 6 - room), "of six batches a rank has two at most"
    assert four["model_bytes"] == one["model_bytes"] and "between ranks" not in one["time_s"].formula
    whole, shared = (parts(estimates["time_s"].formula) for estimates in (one, four))
    for name in ("statistics", "second pass"):
        assert shared[name] == pytest.approx(whole[name] / 3, rel=0.02), name
    assert whole["solvers"] / 4 < shared["solvers"] < whole["solvers"] and shared["between ranks"] > 0


def parts(formula: str) -> dict[str, float]:
    """Seconds by the words before them."""
    found = [re.fullmatch(r"(.*) (\S+) s", part) for part in formula.split(" + ")]
    return {one[1]: float(one[2]) for one in found}
