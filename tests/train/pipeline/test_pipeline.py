"""Pipeline parallelism on gloo: every schedule trains as one process does, and reads every layout's checkpoints."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.errors import SpecError
from hone.base.plan import MEMORY, facts_of
from hone.base.run import Run
from hone.cost.steps import pass_seconds
from hone.cost.train.pipeline import layer_seconds
from hone.cost.train.timed import Timed
from hone.measure.machine import describe
from hone.model.hf import load
from hone.report.collect import collect
from hone.report.page import render
from hone.train import PIPELINE_SCHEDULES
from hone.train.pipeline.stages import divide
from hone.train.stage import Train
from tests.ranked import together
from tests.train.conftest import SHAPE
from tests.train.data_parallel.test_data_parallel import SPEC, handed_over, on_ranks, weights_of
from tests.train.ranks import failing, made, sharing, taken_back, trained

PARTS = {"model": {"num_layers": 4, "tie_embeddings": False}, "gradient_accumulation_steps": 4}
"""As few layers as 4 stages take, and as few micro-batches as DualPipe takes on 2 ranks."""
DEEP = {"model": {"num_layers": 8, "tie_embeddings": False}, "gradient_accumulation_steps": 8}
"""The same on 4 ranks."""
SETTINGS: list[dict[str, Any]] = [
    {**PARTS, "validate": True},
    {**DEEP, "precision": "bf16", "activation_checkpointing": {"kind": "layers", "layers": [0, 1, 4, 6]}},
    {**PARTS, "uneven": True, "masked": True, "optimizer": "muon"},
    {**PARTS, "tied": True},
    {**PARTS},
    {**PARTS, "tied": True, "uneven": True, "validate": True},
    {**PARTS, "shared_kv": True, "max_grad_norm": 0.1},
]
SCHEDULES = [
    "naive",
    "gpipe",
    "1f1b",
    "interleaved",
    "breadth_first",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "dualpipe",
    "dualpipe_v",
]


def piped(degree: int, schedule: Any, **others: Any) -> dict[str, Any]:
    """A setting's parallelism."""
    return {
        "parallelism": {"pipeline_parallel_degree": degree, "pipeline_parallel_schedule": schedule, **others},
    }


def of_one_process(settings, data_folder, folder) -> tuple[list, list[dict[str, torch.Tensor]]]:
    """Losses and weights of one process, for every setting."""
    [losses] = on_ranks(1, trained, str(data_folder), str(folder), settings)
    return losses, [weights_of(folder, number, 1)[0] for number in range(len(settings))]


@pytest.fixture(scope="module")
def alone(data_folder, tmp_path_factory) -> tuple[list, list[dict[str, torch.Tensor]]]:
    return of_one_process(SETTINGS, data_folder, tmp_path_factory.mktemp("alone"))


UNEVEN = [[0, 3], [3, 4]]
"""Layers of two stages as no count of operations divides them."""
FEW = [(name, 0) for name in SCHEDULES] + [
    *(
        ("1f1b", 2),
        ("1f1b", 3),
        ("zb_v", 1),
        ("zb_v", 2),
        ("zb_v", 3),
        ("dualpipe", 1),
        ("dualpipe", 2),
        ("dualpipe", 3),
        ("zb_h1", 6),
    )
]
"""On 2 ranks each schedule, and one of each family in the other settings; bfloat16, which takes longest, in the two that defer
gradients or add them in another order. On 4, where stages have two neighbours, every schedule and every setting once or twice."""


@pytest.mark.parametrize(
    ("num_ranks", "chosen"),
    [
        (2, FEW),
        (4, [("zb_v", 0), ("dualpipe", 3)]),
        pytest.param(
            4,
            [
                *(("naive", 0), ("gpipe", 3), ("1f1b", 2), ("interleaved", 3), ("breadth_first", 2)),
                *(("zb_h1", 0), ("zb_h2", 2), ("zb_v", 1), ("dualpipe", 2), ("dualpipe_v", 3)),
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["2", "4-few", "4"],
)
def test_it_trains_as_one_process_does(num_ranks, chosen, request, data_folder, tmp_path):
    """To the bit; the gradients of DualPipe's two copies of a stage and of a tied embedding are added in another order. In
    bfloat16 sums that nearly cancel then differ by percents, and so do those weights' steps of lr 1e-3."""
    numbers = [number for _, number in chosen]
    if num_ranks == 2:
        settings, alone = SETTINGS, request.getfixturevalue("alone")
    else:
        settings = [{**one, **DEEP} for one in SETTINGS[: max(numbers) + 1]]
        alone = of_one_process(settings, data_folder, tmp_path)
    bounds = [
        (1e-4 if "precision" in settings[number] else 2e-6)
        if name == "dualpipe" or settings[number].get("tied")
        else 0.0
        for name, number in chosen
    ]
    settings = [{**settings[number], **piped(num_ranks, name)} for name, number in chosen]
    if (
        num_ranks == 2
    ):  # however the layers are divided, by operations or by measured seconds, and rows of micro-batches
        others = [{**settings[2], "layers": UNEVEN}, {**PARTS, **piped(2, {"kind": "interleaved", "contiguous": 3})}]
        settings, bounds, numbers = [*settings, *others], [*bounds, 0.0, 0.0], [*numbers, numbers[2], 4]
    check(num_ranks, settings, bounds, numbers, alone, data_folder, tmp_path)


CLIPPED, FREE = {"max_grad_norm": 0.1}, {"max_grad_norm": 100.0}
HALF = {"precision": "fp16", "steps": 4, "scale": 2.0**20}


@pytest.mark.parametrize(
    ("num_ranks", "others"),
    [(2, {}), pytest.param(4, {"data_parallel": "zero1"}, marks=pytest.mark.slow)],
    ids=["2", "2-zero1"],
)
def test_an_update_before_the_norm_is_taken_back_to_the_bit(num_ranks, others, data_folder):
    """Clipped gradients and fp16's overflows: weights and optimizer states are those of the update that waits."""
    cases = [
        ("zb_h2", FREE),
        ("zb_h2", CLIPPED),
        ("zb_v", {**CLIPPED, "optimizer": "muon"}),
        ("zb_h1", {**FREE, **HALF}),
    ]
    settings = [
        {**PARTS, **case, **piped(2, {"kind": kind, "post_validation": early}, **others)}
        for kind, case in cases
        for early in (False, True)
    ]
    for found in on_ranks(num_ranks, taken_back, str(data_folder), settings):
        pairs = list(zip(found[::2], found[1::2], strict=True))
        for (kind, case), ((rows, bits, _), (early_rows, early_bits, _)) in zip(cases, pairs, strict=True):
            assert rows == early_rows and bits == early_bits, (kind, case)
        assert [early[2] for _, early in pairs][:3] == [0, 1, 1]  # after one that was taken back the next waits
        assert pairs[3][0][0][0][2] and pairs[3][1][2] >= 1, "the first step overflows and is taken back"
        assert not pairs[3][0][0][-1][2], "the last one does not"


PRODUCTS: dict[int, list[tuple[dict[str, Any], int]]] = {
    4: [
        (piped(2, "1f1b", data_parallel="zero1"), 4),
        (piped(2, "zb_v", tensor_parallel_degree=2), 4),
        (piped(2, "dualpipe", tensor_parallel_degree=2, enable_sequence_parallel=False), 5),
        (piped(2, "interleaved", context_parallel_degree=2), 5),
    ],
    8: [
        (piped(2, "zb_v", tensor_parallel_degree=2, data_parallel="zero1"), 5),
        (piped(2, "dualpipe", context_parallel_degree=2, tensor_parallel_degree=2), 4),
        (piped(4, "1f1b", data_parallel="zero1"), 5),
    ],
}


@pytest.mark.parametrize("num_ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_products_with_other_axes_train_as_one_process_does(num_ranks, alone, data_folder, tmp_path):
    chosen = PRODUCTS[num_ranks]
    settings = [{**SETTINGS[number], **layout} for layout, number in chosen]
    check(num_ranks, settings, [2e-6] * len(chosen), [number for _, number in chosen], alone, data_folder, tmp_path)


def check(num_ranks, settings, bounds, numbers, alone, data_folder, tmp_path) -> None:
    """That each of `settings` gives the losses and weights of setting `numbers[i]` in one process, within `bounds[i]`: absolute
    differences, on average at most 1e-5, to which bfloat16 adds a rounding of each weight and, of a sum of many, an eighth."""
    losses, weights = alone
    every = on_ranks(num_ranks, trained, str(data_folder), str(tmp_path), settings)
    assert all(one == every[0] for one in every), "ranks differ in losses"
    for at, (setting, bound, number) in enumerate(zip(settings, bounds, numbers, strict=True)):
        average = min(bound, 1e-5)
        rounding = torch.finfo(torch.bfloat16).eps if bound and "precision" in setting else 0.0
        for ours, theirs in zip(every[0][at], losses[number], strict=True):
            torch.testing.assert_close(
                torch.tensor(ours),
                torch.tensor(theirs),
                rtol=average + rounding / 8,
                atol=average,
                msg=lambda said, one=setting: f"{one}: {said}",
            )
        for one in weights_of(tmp_path, at, num_ranks):
            for key, whole in weights[number].items():
                off = (one[key] - whole).float().abs()
                assert (off <= bound + rounding * whole.abs()).all() and off.mean() <= average, f"{setting} {key}"


def test_every_layout_reads_the_checkpoints_of_every_other(data_folder, tmp_path):
    layouts: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (2, piped(2, "dualpipe")),
        (4, piped(2, "zb_v", data_parallel="zero1")),
        (4, piped(2, "1f1b", tensor_parallel_degree=2)),
        (2, {"data_parallel": "zero3"}),
    ]
    layouts = [(num_ranks, {**layout, "gradient_accumulation_steps": 4}) for num_ranks, layout in layouts]
    pairs = [((writer + way) % 5, writer) for writer in range(5) for way in (1, 2)]  # every two meet once
    (whole, final), *found = handed_over(layouts, pairs, data_folder, tmp_path)
    assert len(found) == len(pairs)
    for steps, weights in found:
        assert len(steps) == 1 and steps[0] == pytest.approx(whole[-1], rel=4e-6)
        for name, one in weights.items():
            assert (one - final[name]).abs().max() <= 4e-6, name


LAYOUT = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "zb_v"}


def test_the_stage_trains_is_killed_and_resumes_on_others(data_folder, tmp_path):
    base = {**SPEC, "batch_size": 8, "gradient_accumulation_steps": 4}
    one = Train.read({**base, "parallelism": {}}).make(
        tmp_path / "one", {"data": Artifact.read(data_folder)}, Run(quiet=True)
    )
    ended = together(2, made, {**base, "parallelism": LAYOUT}, str(data_folder), str(tmp_path / "two"), 3)
    assert ended[1].returncode == -signal.SIGKILL
    assert "lost" in ended[0].result and "the stage resumes" in ended[0].result
    spec = {**base, "parallelism": {**LAYOUT, "data_parallel": "zero1"}}
    assert len(set(on_ranks(4, made, spec, str(data_folder), str(tmp_path / "two")))) == 1
    two = Artifact.read(tmp_path / "two")
    ours, theirs = load(two.folder).state_dict(), load(one.folder).state_dict()
    assert ours.keys() == theirs.keys()
    assert all((ours[name] - theirs[name]).abs().max() < 1e-5 for name in theirs)
    for mine, other in zip(read_jsonl(two.folder / "steps.jsonl"), read_jsonl(one.folder / "steps.jsonl"), strict=True):
        assert mine == pytest.approx(other, rel=1e-4)
    assert two.fingerprint == one.fingerprint
    assert "2 pipeline ranks (zb_v)" in two.figures["num_ranks"].note
    page = render(collect(tmp_path))
    assert page.count('aria-label="pipeline schedule ZB-V"') == 2  # for wide and for narrow screens
    assert "I of stage 3 of microbatch 0" in page and "two: pipeline schedule" in page


@pytest.mark.parametrize("where", ["backward", "update"])
def test_a_failing_rank_ends_all_with_its_error(where, data_folder):
    setting = {**piped(2, "interleaved"), "gradient_accumulation_steps": 4}
    first, second = on_ranks(2, failing, str(data_folder), setting, where)
    assert second == "ZeroDivisionError: a bug"
    assert first == "MachineError: rank 1 failed: ZeroDivisionError: a bug"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"parallelism": {**LAYOUT, "data_parallel": "zero2"}}, "zero2 works without pipeline stages"),
        ({"parallelism": {"pipeline_parallel_degree": 3}}, "pipeline_parallel_degree 3 does not divide 2 ranks"),
        ({"parallelism": {**LAYOUT, "pipeline_parallel_schedule": {"kind": "interleaved", "stages_per_rank": 4}}}, "make no 8 pipeline"),
        ({"parallelism": {**LAYOUT, "pipeline_parallel_schedule": "dualpipe"}, "gradient_accumulation_steps": 1}, "dualpipe: "),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_an_error_that_names_the_way_out(spec, said, data_folder):
    facts, two = {"data": facts_of(Artifact.read(data_folder))}, describe("cpu").model_copy(update={"num_ranks": 2})
    with pytest.raises(SpecError, match=said):
        Train.read({**SPEC, "gradient_accumulation_steps": 4, **spec}).plan(facts, two)


def test_numbers_that_a_schedule_is_proposed_make_a_table():
    """Micro-batches that divide the batch, fewer ranks, or 1f1b: each was tried, and none is proposed that would not work."""
    bidirectional = PIPELINE_SCHEDULES.read("dualpipe")
    with pytest.raises(SpecError) as caught:
        bidirectional.table(4, 2, 24)
    assert caught.value.fix.startswith("set gradient_accumulation_steps to 8; or ") and caught.value.fix.endswith(
        "1f1b"
    )
    bidirectional.table(4, 8)
    with pytest.raises(SpecError) as caught:
        bidirectional.table(4, 2, 2)  # single sequences already
    assert "gradient_accumulation_steps" not in caught.value.fix and "1f1b" in caught.value.fix


def test_layers_are_divided_by_measured_seconds(data_folder):
    """A machine whose head takes as long as two layers gives the stage with it two layers less."""
    config = SHAPE.model_copy(update={"num_layers": 8, "tie_embeddings": False}).config(512)
    assert divide(config, 2, 32, Timed((1.0,) * 8, 0.0, 2.0)) == [range(5), range(5, 8)]
    assert divide(config, 2, 32, Timed((1.0,) * 8, 2.0, 0.0)) == [range(3), range(3, 8)]
    calibrated = describe("cpu")
    sizes = {"tokens": 64, "seq_len": 32, "dtype": "float32"}
    found = layer_seconds(config.dims(), calibrated, **sizes)
    assert found is not None and len(set(found.layers)) == 1 and min(*found.layers, found.embedding, found.head) > 0
    whole = pass_seconds(config.dims(), calibrated, batch_tokens=64, seq_len=32, dtype="float32").value
    assert sum(found.layers) + found.head == pytest.approx(whole, rel=0.1)
    assert layer_seconds(config.dims(), calibrated.model_copy(update={"calibration": None}), **sizes) is None
    facts, two = {"data": facts_of(Artifact.read(data_folder))}, calibrated.model_copy(update={"num_ranks": 2})
    spec = {**SPEC, "gradient_accumulation_steps": 4}
    by_seconds = ("their seconds as calibrated", "the simulated seconds of a step")  # which, this machine's rates say
    for kind, said in (("1f1b", by_seconds), ("pipedream", ("operations",))):
        others = {"model": {**SPEC["model"], "tie_embeddings": False}, "max_grad_norm": 0}
        plan = Train.read({**spec, **others, **piped(2, kind)}).plan(facts, two)
        assert any(f"layers divided by {one}" in line for line in plan.notes for one in said), kind
        layers, drawn = plan.pipeline
        assert [index for part in layers for index in part] == list(range(4)) and len(drawn["ranks"]) == 2


def test_layers_that_share_keys_stay_in_a_stage():
    own = SHAPE.model_copy(update={"num_layers": 4}).config(512)
    assert divide(sharing(own), 2, 32) == [range(2), range(2, 4)]
    with pytest.raises(SpecError, match="of which 3 stay with the one before, make no 2 pipeline stages"):
        divide(sharing(own, every=4), 2, 32)


def test_plans_count_the_bubble_and_what_a_rank_holds(data_folder):
    facts = {"data": facts_of(Artifact.read(data_folder))}
    two = describe("cpu").model_copy(update={"num_ranks": 2})
    big = {**SPEC, "batch_size": 16, "gradient_accumulation_steps": 8, "seq_len": 64}
    big["model"] = {**big["model"], "hidden_size": 512, "intermediate_size": 2048, "num_layers": 8}

    def estimates(schedule: str | None, **others: Any) -> dict[str, Any]:
        shared = {} if schedule is None else piped(2, schedule)["parallelism"]
        return dict(Train.read({**big, **others, "parallelism": shared}).plan(facts, two).estimates)

    found = {name: estimates(name) for name in ("naive", "gpipe", "1f1b", "zb_h1")}
    seconds = {name: one["time_s"].value for name, one in found.items()}
    memory = {name: one[MEMORY].value for name, one in found.items()}
    assert (
        seconds["zb_h1"] < seconds["1f1b"] == pytest.approx(seconds["gpipe"])
        and seconds["1f1b"] < 0.7 * seconds["naive"]
    )
    assert memory["naive"] < memory["1f1b"] < memory["gpipe"] < estimates(None)[MEMORY].value + memory["gpipe"]
    assert "bubble" in found["1f1b"]["time_s"].formula
    assert len({one["num_params"].value for one in found.values()}) == 1
    four = two.model_copy(update={"num_ranks": 4})
    untied, sent = {"max_grad_norm": 0, "model": {**big["model"], "tie_embeddings": False}}, {}
    for name in ("1f1b", "pipedream"):
        plan = Train.read({**big, **untied, **piped(2, name, data_parallel="ddp")}).plan(facts, four)
        line = next(line for line in plan.notes if line.startswith("transfers of a rank"))
        sent[name] = float(line.split()[4])
    assert sent["pipedream"] == pytest.approx(8 * sent["1f1b"], rel=0.01), "gradients travel before each of its updates"
    dropped = estimates("gpipe", activation_checkpointing={"kind": "every_nth", "n": 1})
    assert dropped[MEMORY].value < memory["gpipe"] and dropped["time_s"].value > seconds["gpipe"]
