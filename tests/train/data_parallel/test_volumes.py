"""What travels: bytes counted on ranks against the closed forms of the papers and of the plan, and ZeRO++ against its definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hone.base.errors import SpecError
from hone.base.ranks import Mesh
from hone.cost.dims import ModelDims
from hone.cost.train.replicas import Divided
from hone.feed.load import PackedTokens
from hone.train import DATA_PARALLEL
from hone.train.parallelism import Parallelism
from tests.train.data_parallel.test_data_parallel import on_ranks
from tests.train.data_parallel.volume_ranks import SIZE, counted, drawn, travelled
from tests.train.ranks import BATCH, SEQ, trainer

MODEL = {"hidden_size": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "intermediate_size": 512}
"""Whose weights are multiples of 256 elements, so that there is almost no padding."""
NEAR = {"kind": "zero3", "reshard_after_forward": 2}
PLUS: dict[str, Any] = {"kind": "zero_plus_plus", "num_workers": 4}
ON_TWO: list[dict[str, Any]] = [
    {"data_parallel": "ddp"},
    {"data_parallel": "zero1"},
    {"data_parallel": "zero2"},
    {"data_parallel": "zero2", "gradient_accumulation_steps": 2},
    {"data_parallel": "zero3"},
    {"data_parallel": "zero3", "gradient_accumulation_steps": 2},
    {"data_parallel": {"kind": "zero3", "reshard_after_forward": "never"}, "gradient_accumulation_steps": 2},
    {"data_parallel": "zero3", "precision": "bf16"},
    {"data_parallel": {**PLUS, "num_workers": 2}},
    {"parallelism": {"tensor_parallel_degree": 2}},
    {"parallelism": {"tensor_parallel_degree": 2, "enable_sequence_parallel": False}},
]
ON_FOUR: list[dict[str, Any]] = [
    {"data_parallel": "zero3", "gradient_accumulation_steps": 2},
    {"data_parallel": NEAR, "gradient_accumulation_steps": 2},
    {"data_parallel": NEAR, "activation_checkpointing": "full"},
    {"data_parallel": {"kind": "zero3", "data_parallel_replicate_degree": 2}},
    {"data_parallel": {**PLUS, "reshard_after_forward": 2}, "precision": "bf16"},
    {"data_parallel": {**PLUS, "zero_quantized_weights": False, "gradient_bits": 8}},
    {"data_parallel": {**PLUS, "zero_quantized_weights": False, "zero_quantized_gradients": False}},
]


@pytest.fixture(scope="module")
def data(data_folder):
    return PackedTokens(data_folder)


@pytest.fixture(scope="module", params=[2, 4])
def moved(request, data_folder, tmp_path_factory):
    """(number of ranks, settings, what each rank found, folder with the weights)."""
    settings = [{**one, "model": MODEL} for one in (ON_TWO if request.param == 2 else ON_FOUR)]
    out = tmp_path_factory.mktemp("moved")
    return request.param, settings, on_ranks(request.param, counted, str(data_folder), str(out), settings), out


def dims_of(data: PackedTokens) -> ModelDims:
    return trainer(data, Mesh(), {"model": MODEL}).model.config.dims()


def test_data_parallel_ranks_send_what_the_closed_forms_say(moved, data):
    """Rajbhandari et al. 2019, section 7: 2 X a step for ddp, zero1 and zero2, 3 X for zero3, of which a ring sends (n - 1) / n."""
    num_ranks, settings, found, _ = moved
    dims = dims_of(data)
    params, share = dims.num_params, (num_ranks - 1) / num_ranks
    ends = (2 - dims.tie_embeddings) * dims.vocab_size * dims.hidden_size + dims.hidden_size
    layers = params - ends
    reduced = 4 * params * share
    coded, four = 1 + 4 / 256, 0.5 + 4 / 256
    expected = {
        2: [
            {"all_reduce": 2 * reduced},
            {"reduce_scatter": reduced, "all_gather": reduced},
            {"reduce_scatter": reduced, "all_gather": reduced},
            {"reduce_scatter": 2 * reduced, "all_gather": reduced},
            {"reduce_scatter": reduced, "all_gather": 4 * share * (ends + 2 * layers)},
            {"reduce_scatter": 2 * reduced, "all_gather": 4 * share * (ends + 4 * layers)},
            {"reduce_scatter": 2 * reduced, "all_gather": 4 * share * (ends + 2 * layers)},
            {"all_to_all": 2 * params * share, "all_gather": 2 * share * (ends + 2 * layers)},
            {"all_to_all": four * share * params, "all_gather": share * (4 * ends + 2 * coded * layers)},
        ],
        4: [
            {"reduce_scatter": 2 * reduced, "all_gather": 4 * share * (ends + 4 * layers)},
            {"reduce_scatter": 2 * reduced, "all_gather": 4 * share * (ends + layers) + 3 * 4 * layers / 2},
            {"reduce_scatter": reduced, "all_gather": 4 * share * (ends + layers) + 4 * layers / 2},
            # Inside a group of two whole gradients, between the groups a half.
            {"reduce_scatter": 2 * params, "all_reduce": 2 * params, "all_gather": 2 * (ends + 2 * layers)},
            # Between neighbours a half of the gradient, between their groups half of a half.
            {"all_to_all": four * params * 3 / 4, "all_gather": share * (2 * ends + coded * layers) + 2 * layers / 2},
            {"all_to_all": coded * params * share, "all_gather": 4 * share * (ends + 2 * layers)},
            {"reduce_scatter": reduced, "all_gather": 4 * share * (ends + 2 * layers)},
        ],
    }[num_ranks]
    for number, forms in enumerate(expected):
        setting = settings[number]
        for rank in found:
            assert rank[number][0].keys() == forms.keys(), setting
            assert rank[number][0] == pytest.approx(forms, rel=0.01), setting
        passes, width = setting.get("gradient_accumulation_steps", 1), 2 if "precision" in setting else 4
        divided = Parallelism.read({"data_parallel": setting["data_parallel"]}).divided(num_ranks)
        if "activation_checkpointing" in setting:  # a layer that is recomputed is gathered once for both
            passes = 1
        planned: dict[str, float] = {}
        for one in divided.messages(dims, width, passes):
            planned[one.op] = planned.get(one.op, 0.0) + one.sent_bytes
        assert {op: size for op, size in planned.items() if size} == pytest.approx(forms, rel=0.01), setting


def test_tensor_parallel_ranks_sum_four_times_a_layer(moved, data):
    """Shoeybi et al. 2019, section 3: two sums of the tokens a layer in each direction, one each for embedding and head.

    Gathers and sums in parts of sequence parallelism are halves of them (Korthikanti et al. 2022, section 4.2.2). Beside them
    two numbers a token are gathered for the loss, and gradients of norms are summed.
    """
    num_ranks, settings, found, _ = moved
    if num_ranks != 2:
        return
    tokens = BATCH * SEQ
    message = 4 * tokens * MODEL["hidden_size"] * (num_ranks - 1) / num_ranks
    sums = 4 * MODEL["num_layers"] + 2
    loss = 2 * 4 * tokens * (num_ranks - 1)
    beside = loss + 2 * 5 * 4 * MODEL["hidden_size"] * (num_ranks - 1) / num_ranks
    for number, forms in ((9, {"reduce_scatter": sums * message, "all_gather": sums * message + loss}), (10, {})):
        sent = found[0][number][0]
        for name, size in forms.items():
            assert sent[name] == pytest.approx(size, rel=1e-6), settings[number]
        rest = sum(sent.values()) - 2 * sums * message
        assert 0 < rest <= 1.1 * beside, settings[number]


def test_when_weights_are_gathered_changes_no_bit(moved):
    num_ranks, settings, found, out = moved
    plain, *others = ([5, 6], [0, 1])[num_ranks == 4]
    expected = torch.load(out / f"{plain}.pt")
    for number in others:
        assert found[0][number][1] == found[0][plain][1], settings[number]
        ours = torch.load(out / f"{number}.pt")
        assert all(torch.equal(ours[name], values) for name, values in expected.items()), settings[number]


def blocks(values: np.ndarray, bits: int) -> np.ndarray:
    """`values` as they arrive: rounded to multiples of their block's largest size / (2^(bits - 1) - 1), in float32."""
    if not bits:
        return values
    top = np.float32(2 ** (bits - 1) - 1)
    padded = np.pad(values.ravel(), (0, -values.size % 256)).reshape(-1, 256)
    scale = np.abs(padded).max(1, keepdims=True) / top
    whole = np.rint(padded / np.where(scale == 0, np.float32(1), scale)) * scale
    return whole.ravel()[: values.size].reshape(values.shape)


def test_gathers_and_sums_of_zero_plus_plus_are_as_defined():
    """Sections 3.1 and 3.3 of arXiv:2306.10209 for all ranks at once."""
    moves = [(4, 8, 4), (2, 8, 4), (2, 0, 8), (4, 8, 0)]
    found = on_ranks(4, travelled, moves)
    own, whole = zip(*(tuple(one.numpy() for one in drawn(rank, 4)) for rank in range(4)), strict=True)
    for number, (near, weight_bits, bits) in enumerate(moves):
        gathered = blocks(np.concatenate(own), weight_bits)
        sums = []
        for first in range(0, 4, near):  # groups of neighbours, whose sums are rounded once more between them
            sums.append(sum(blocks(one, bits).astype(np.float64) for one in whole[first : first + near]))
        if near < 4:
            sums = [blocks(one.astype(np.float32), bits).astype(np.float64) for one in sums]
        total = sum(sums)
        for rank in range(4):
            weights, part = (np.asarray(one) for one in found[rank][number])
            np.testing.assert_array_equal(weights.astype(np.float32), gathered.astype(np.float32))
            mine = slice(rank * SIZE, (rank + 1) * SIZE)
            apart = np.abs(part - total[mine]) > 1e-6 * sum(np.abs(one[mine]) for one in whole)
            # A sum in float32 and one in float64 may be rounded to different neighbours.
            assert apart.mean() <= (0.01 if near < 4 else 0), (number, rank)


def alone(data: PackedTokens, setting: dict[str, Any], num_ranks: int, steps: int) -> dict[str, torch.Tensor]:
    """The weights after steps of ZeRO++ as it is defined, in one process: passes of each rank's sequences with rounded weights of
    layers, then the sum of the rounded gradients for the optimizer."""
    one = trainer(data, Mesh(), setting)
    names = dict(one.model.named_parameters())
    for step in range(steps):
        masters = {name: part.detach().clone() for name, part in names.items()}
        sums = {name: torch.zeros_like(part) for name, part in masters.items()}
        for name, part in names.items():
            if name.startswith("layers."):
                part.data = torch.from_numpy(blocks(masters[name].numpy(), 8)).clone()
        targets = 0
        parts = []
        for rank in range(num_ranks):
            each = BATCH // num_ranks
            rows = np.arange(step * BATCH + rank * each, step * BATCH + (rank + 1) * each)
            parts.append(data.sequences(rows, SEQ, 0))
            targets += one.objective.count(parts[-1].targets)
        for part in parts:
            loss, *_ = one._loss(part, 1)
            (loss * (1.0 / targets)).backward()
            for name, weight in names.items():
                sums[name] += torch.from_numpy(blocks(weight.grad.numpy(), 4))
                weight.grad = None
        for name, weight in names.items():
            weight.data = masters[name]
            weight.grad = sums[name]
        norm = float(one.update.weights.squared_norm().sqrt())
        one.update.apply(one.optimizer.lr * one.schedule.share(step, one.steps), min(1.0, 1.0 / (norm + 1e-6)))
    return {name: part.detach() for name, part in names.items()}


def test_a_training_of_zero_plus_plus_is_as_defined(moved, data):
    num_ranks, _, found, out = moved
    if num_ranks != 2:
        return
    expected, ours = alone(data, {"model": MODEL}, 2, 2), torch.load(out / "8.pt")
    apart = torch.cat([(ours[name] - whole).abs().flatten() for name, whole in expected.items()])
    assert (apart > 2e-6).double().mean() <= 1e-3 and apart.max() <= 4e-3  # a code that falls to its neighbour
    exact = torch.load(out / "4.pt")
    assert torch.cat([(exact[name] - whole).abs().flatten() for name, whole in expected.items()]).mean() > 1e-5
    assert found[0][8][1] == pytest.approx(found[0][4][1], rel=0.02) and found[0][8][1] != found[0][4][1]


def test_without_quantization_zero_plus_plus_is_zero3(moved):
    num_ranks, _, found, _ = moved
    if num_ranks == 4:
        assert found[0][6][1] == pytest.approx(found[0][2][1], rel=2e-6)


def test_memory_of_the_zero_paper():
    """Rajbhandari et al. 2019, figure 1: 7.5 B weights on 64 ranks, 2 bytes a weight and gradient, 12 of state."""
    params, found = 7.5e9, {}
    for name in ("ddp", "zero1", "zero2", "zero3"):
        divided = DATA_PARALLEL.read(name).divided(64)
        parts = 2 / divided.of("weights") + 2 / divided.of("gradients") + 12 / divided.of("optimizer")
        found[name] = params * parts / 1e9
    assert found == pytest.approx({"ddp": 120, "zero1": 31.4, "zero2": 16.6, "zero3": 1.9}, rel=0.02)


def test_weights_that_stay_need_their_memory(data):
    dims, sharded = dims_of(data), DATA_PARALLEL["zero3"].sharded
    layers = dims.num_params - dims.vocab_size * dims.hidden_size * (2 - dims.tie_embeddings)
    always, near, never = (Divided(8, 8, sharded, within=one).weights_bytes(dims, 2) for one in (8, 2, 1))
    assert near - always == pytest.approx(2 * layers / 2)
    assert always <= never <= always + 2 * layers


def test_a_number_of_neighbours_must_divide_the_ranks():
    with pytest.raises(SpecError, match="reshard_after_forward 3 does not divide the 8 ranks") as caught:
        Parallelism.read({"data_parallel": {"kind": "zero3", "reshard_after_forward": 3}}).divided(8)
    assert "always or never" in caught.value.fix
    with pytest.raises(SpecError, match="set to 4 ranks, and 8 started"):
        Parallelism.read({"data_parallel": PLUS}).divided(8)
