"""Experts that are merged: equal ones lose nothing, groups are those of other programs, and what is averaged and fitted is what a loop says."""

from __future__ import annotations

from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from hone.base.errors import SpecError
from hone.base.run import Run
from hone.compress import STRUCTURED_PRUNERS
from hone.compress.calibration import Calibration
from hone.compress.capture import Flow
from hone.compress.structured.merging import dominant, hierarchical
from hone.model.decoder import Decoder, build
from hone.model.hf import Checkpoint, load, save
from hone.model.shape import Shape
from hone.model.weights.model import ModelSource
from tests.compress.structured.test_experts import planned
from tests.conftest import byte_tokenizer

TOKENS = torch.arange(6 * 40).reshape(6, 40) * 7 % 250
QUIET = Run(quiet=True)


def mixture(folder: Path, **moe: Any) -> Decoder:
    """A random model of two layers with eight experts, two a token, written to `folder` with a tokenizer."""
    tokenizer = byte_tokenizer()
    moe = {"kind": "moe", "num_experts": 8, "intermediate_size": 16, **moe}
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 16}
    shape = Shape(family="mixtral", max_seq_len=64, feed_forward=(moe,), **sizes)
    model = build(shape.config(len(tokenizer)), seed=3).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    tokenizer.save_pretrained(folder)
    save(model, folder)
    return model


def flow(ids: np.ndarray | None = None) -> Flow:
    return Flow(Calibration(TOKENS.numpy(), ids, {}), 4, "cpu", torch.float32)


def merge(folder: Path, state: Path, calibrated: Flow | None, **options: Any) -> tuple[ModelSource, list]:
    step = STRUCTURED_PRUNERS.read({"kind": "expert_merging", **options})
    made, said = step.rewrite(Checkpoint(folder), calibrated, (), state, QUIET)
    return made, said["groups"]


@torch.no_grad()
def test_equal_experts_lose_nothing(tmp_path: Path, compress, calibration_text: Path) -> None:
    """Copies with their channels in another order; whichever a token visits, it is computed alike. transformers computes the same."""
    model = mixture(tmp_path / "whole", router={"kind": "softmax", "top_k": 1})
    for layer in model.layers:
        block = layer.feed_forward
        for expert in (1, 2, 5, 7):
            order = torch.randperm(16, generator=torch.Generator().manual_seed(expert))
            source = {1: 0, 2: 0, 5: 4, 7: 4}[expert]
            gate, up = block.gate_up.weight[source].split(16)
            block.gate_up.weight[expert] = torch.cat((gate[order], up[order]))
            block.down.weight[expert] = block.down.weight[source][:, order]
            block.router.weight[expert] = block.router.weight[source]
    save(model, tmp_path / "whole")
    step = {"kind": "expert_merging", "num_experts": 0.5}
    with torch.enable_grad():
        made = compress(tmp_path / "whole", step, num_sequences=4, calibration_text=str(calibration_text))
    groups = [{0, 1, 2}, {3}, {4, 5, 7}, {6}]
    assert [[set(group) for group in layer] for layer in made.techniques[0]["groups"]] == [groups, groups]
    merged = load(made.folder, dtype=torch.float32)
    assert [layer.feed_forward.num_experts for layer in merged.config.layers] == [4, 4]
    expected = model(TOKENS)
    assert expected.std() > 0.3
    torch.testing.assert_close(merged(TOKENS), expected, atol=1e-4, rtol=1e-4)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.float32).eval()
    torch.testing.assert_close(theirs(TOKENS).logits, expected, atol=1e-4, rtol=1e-4)
    for name in ("model_bytes", "num_params"):
        assert made.figures[name].value == made.figures[name].estimate.value
    plain, _ = merge(tmp_path / "whole", tmp_path / "state.json", flow(), num_experts=4, align=False)
    assert (plain.build()(TOKENS) - expected).abs().max() > 0.1, (
        "channels that are not aligned are averaged with others"
    )


def test_groups_are_those_of_scipy() -> None:
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    points = np.random.default_rng(0).normal(size=(12, 3))
    distances = np.linalg.norm(points[:, None] - points, axis=-1)
    tree = linkage(squareform(distances, checks=False), "average")
    for count in range(1, 12):
        labels = fcluster(tree, count, "maxclust")
        expected = sorted(np.flatnonzero(labels == one).tolist() for one in set(labels))
        assert hierarchical(distances, np.ones(12), count) == expected
    assert hierarchical(np.zeros((4, 4)), np.ones(4), 2) == [[0, 1, 2], [3]]


def test_others_join_the_most_visited_experts() -> None:
    distances = np.abs(np.subtract.outer([0.0, 9.0, 1.0, 8.0, 4.0], [0.0, 9.0, 1.0, 8.0, 4.0]))
    assert dominant(distances, np.array([5, 1, 2, 9, 0]), 2) == [[0, 2, 4], [1, 3]]
    assert dominant(distances, np.array([1, 1, 0, 0, 0]), 2) == [[0, 2, 4], [1, 3]]
    assert dominant(distances, np.zeros(5), 1) == [[0, 1, 2, 3, 4]]


@pytest.mark.filterwarnings("ignore:Only hone reads this folder")
@torch.no_grad()
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_averages_and_rows_are_those_of_a_loop(kind: str, tmp_path: Path) -> None:
    """Visits weigh the average, padding counts nowhere, and least squares give the rows of groups; those of single experts stay."""
    model = mixture(tmp_path / "whole", router=kind, balance=["bias"])
    block = model.layers[0].feed_forward
    block.router_bias.copy_(torch.linspace(-0.1, 0.1, 8))
    save(model, tmp_path / "whole")
    ids = np.zeros(TOKENS.shape, np.int32)
    ids[::2, 25:] = -1
    kept: dict[str, torch.Tensor] = {}
    block.register_forward_pre_hook(lambda _, args: kept.update(x=args[0]))
    model(TOKENS)
    x = kept["x"][torch.from_numpy(ids) >= 0].double()
    logits = x @ block.router.weight.double().T
    scores = logits.softmax(-1) if kind == "softmax" else logits.sigmoid()
    visits = (scores + block.router_bias).topk(2).indices.flatten().bincount(minlength=8)
    means = []
    for expert in range(8):
        gate, up = (block.gate_up.weight[expert].double() @ x.T).T.split(16, -1)
        means.append((F.silu(gate) * up @ block.down.weight[expert].double().T).mean(0))
    distances = torch.cdist(torch.stack(means), torch.stack(means)).numpy()
    made, groups = merge(
        tmp_path / "whole", tmp_path / "state.json", flow(ids), num_experts=5, align=False, router="fitted"
    )
    first = groups[0]
    assert sorted(map(sorted, first)) == hierarchical(distances, visits.numpy(), 5)
    assert [min(one) for one in first] == sorted(min(one) for one in first)
    merged = made.build().layers[0].feed_forward
    for place, members in enumerate(first):
        assert all(visits[one] >= visits[other] for one, other in pairwise(members))
        share = visits[members] / visits[members].sum()
        for mine, given in ((merged.gate_up, block.gate_up), (merged.down, block.down)):
            expected = torch.einsum("e,eij->ij", share, given.weight[members])
            torch.testing.assert_close(mine.weight[place], expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(merged.router_bias[place], share @ block.router_bias[members])
        if len(members) == 1:
            assert torch.equal(merged.router.weight[place], block.router.weight[members[0]])
            continue
        own = logits[:, members]
        target = own.logsumexp(-1) if kind == "softmax" else (1 / (1 - own.sigmoid()).prod(-1) - 1).log()
        row = np.linalg.lstsq(x.numpy(), target.numpy(), rcond=None)[0]
        torch.testing.assert_close(merged.router.weight[place].double(), torch.from_numpy(row), atol=1e-3, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [{"router": "fitted"}, {"align": False, "similarity": "router", "grouping": "dominant", "router": "dominant"}],
)
def test_what_was_measured_is_read_again(options: dict[str, Any], tmp_path: Path) -> None:
    model = mixture(tmp_path / "whole")
    made, groups = merge(tmp_path / "whole", tmp_path / "state.json", flow(), num_experts=3, **options)
    again, same = merge(tmp_path / "whole", tmp_path / "state.json", None, num_experts=3, **options)
    assert groups == same and len(groups[0]) == 3 and sorted(chain(*groups[1])) == list(range(8))
    for name in made.names():
        assert torch.equal(made.tensor(name), again.tensor(name)) and made.shape(name) == tuple(made.tensor(name).shape)
    if options.get("router") == "dominant":
        for layer, given, own in zip(made.build().layers, model.layers, groups, strict=True):
            leaders = [one[0] for one in own]
            assert torch.equal(layer.feed_forward.router.weight, given.feed_forward.router.weight[leaders])


@pytest.mark.usefixtures("experts_line")
def test_what_cannot_be_merged_is_said(
    experts_folder: Path, tiny_llama: Path, calibration_text: Path, tmp_path: Path, family_folder
) -> None:
    merging = {"kind": "expert_merging"}
    with pytest.raises(SpecError, match="'top_experts', of which hone does not know how experts are merged") as raised:
        planned(experts_folder, calibration_text, **merging)
    assert "kind=experts" in raised.value.fix
    with pytest.raises(SpecError, match="expert_merging: no layer of the model has experts"):
        planned(tiny_llama, calibration_text, **merging)
    gpt_oss = family_folder("gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=16)
    with pytest.raises(SpecError, match="experts of layer 0 have biases or a clamped gate"):
        planned(gpt_oss, calibration_text, **merging)
    mixture(tmp_path / "whole")
    with pytest.raises(SpecError, match="num_experts is 1, and a token of layer 0 visits 2"):
        planned(tmp_path / "whole", calibration_text, num_experts=1, **merging)
    assert planned(tmp_path / "whole", calibration_text, **merging).layers[1].feed_forward.num_experts == 6
