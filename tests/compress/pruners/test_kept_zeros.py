"""A model that was pruned in an earlier run keeps its zeros in the next one."""

from __future__ import annotations

import json

import pytest
import torch

from hone.compress.matrix import Matrix
from hone.model import hf


def zeros_of(folder) -> dict[str, torch.Tensor]:
    model = hf.load(folder, dtype=torch.float32)
    weight = {}
    for index, layer in enumerate(model.layers):
        for path in ("mixer.qkv", "mixer.out", "feed_forward.gate_up", "feed_forward.down"):
            linear = layer.get_submodule(path)
            dense = linear.weight if hasattr(linear, "weight") else linear.dequantize(torch.float32)
            weight[f"{index}.{path}"] = dense.detach() == 0
    return weight


@pytest.fixture(scope="module")
def pruned(family_folder, tmp_path_factory, calibration_text):
    """{pattern: a folder with zeros}."""
    from hone.base.artifact import Artifact
    from hone.base.run import Run
    from hone.compress.stage import Compress

    made = {}
    for name, options in {"2:4": {"pattern": "2:4"}, "none": {"sparsity": 0.3}}.items():
        spec = Compress.read({"steps": [{"kind": "magnitude", **options}]})
        out = tmp_path_factory.mktemp("pruned") / "compress-pruned"
        made[name] = spec.make(out, {"model": Artifact.read(family_folder("llama"))}, Run(quiet=True)).folder
    return made


@pytest.mark.parametrize("pattern", ["2:4", "none"])
@pytest.mark.parametrize(
    "steps",
    [
        [{"kind": "gptq", "group_size": 32}],
        [{"kind": "gptaq", "group_size": 32}],
        [{"kind": "autoround", "group_size": 32, "iters": 8}],
        [{"kind": "awq"}, {"kind": "gptq", "group_size": 32}],
        [{"kind": "rtn", "group_size": 32}],
        [{"kind": "hqq", "group_size": 32}],
        [{"kind": "fp8", "activations": "none"}],
    ],
    ids=lambda steps: "+".join(step["kind"] for step in steps),
)
def test_a_second_run_keeps_the_zeros_of_the_first(steps, pattern, pruned, compress) -> None:
    before = zeros_of(pruned[pattern])
    made = compress(pruned[pattern], *steps)
    for name, zeros in zeros_of(made.folder).items():
        assert bool(zeros[before[name]].all()), name
        assert 0.25 < float(before[name].float().mean()) < 0.55


def test_what_keeps_zeros_is_said_once(pruned, family_folder, tmp_path, capsys) -> None:
    from hone.base.artifact import Artifact
    from hone.base.run import Run
    from hone.compress.stage import Compress

    spec = Compress.read({"steps": [{"kind": "rtn", "group_size": 32}]})
    for folder, times in ((pruned["2:4"], 1), (family_folder("llama"), 0)):
        spec.make(tmp_path / f"compress-{times}", {"model": Artifact.read(folder)}, Run())
        out = capsys.readouterr()
        assert (out.out + out.err).count("and 7 more: zeros of the given model stay zero") == times


@pytest.mark.parametrize(
    ("first", "options"),
    [
        ([], {}),
        ([], {"targets": [r"\.layers\.", "lm_head"], "ignore": []}),  # a head of its own
        ([{"kind": "rotation", "r1": False}], {}),
        ([{"kind": "depth", "layers": [1]}], {}),
    ],
    ids=["as it is", "untied", "rotated", "cut"],
)
def test_zeros_of_a_quantized_models_grid_do_not_stay(first, options, family_folder, compress) -> None:
    """Whatever is done to its weights before they are quantized again."""
    given = compress(family_folder("llama"), {"kind": "rtn", "bits": 3, "group_size": 32}, name="given").folder
    assert 0.05 < float(zeros_of(given)["1.feed_forward.gate_up"].float().mean()) < 0.4
    made = compress(given, *first, {"kind": "rtn", "bits": 8, "group_size": 32}, requantize=True, **options)
    rows = [json.loads(line) for line in (made.folder / "layers.jsonl").read_text().splitlines()]
    assert rows and [row["notes"] for row in rows] == [[]] * len(rows)


def test_zeros_of_a_grid_are_no_pruning() -> None:
    weights = torch.randint(-2, 3, (16, 32), generator=torch.Generator().manual_seed(0)).float()
    matrix = Matrix("m", weights, torch.float32)
    matrix.keep_zeros(quantized=True)
    assert matrix.keep is None
    weights.view(16, 8, 4)[..., :2] = 0
    matrix.keep_zeros(quantized=True)
    assert matrix.keep is not None and bool((matrix.keep == (weights != 0)).all())
    nothing = Matrix("m", torch.zeros(4, 4), torch.float32)
    nothing.keep_zeros()
    assert nothing.keep is None
