"""The executor on several gloo ranks: every schedule gives what one process gives, bit for bit."""

from __future__ import annotations

import pytest
import torch

from hone.parallel.pipeline.weight_gradients import WeightGradients
from tests import ranked
from tests.parallel import pipeline_ranks


def _settings(p: int) -> list[tuple[str, int, dict]]:
    names = ["naive", "gpipe", "1f1b", "breadth_first", "zb_h1", "zb_h2", "zb_v", "dualpipe", "dualpipe_v"]
    late = ["pipedream", "pipedream_vertical", "pipedream_2bw"]
    interleaved = [("interleaved", 2 * p, {"stages_per_rank": 2}), ("interleaved", 2 * p + 1, {"stages_per_rank": 3})]
    return [*((name, 2 * p, {}) for name in names), *((name, 4 * p, {}) for name in late), *interleaved]


@pytest.mark.parametrize("p", [2, 4])
def test_every_schedule_equals_one_process(p: int):
    settings = _settings(p)
    ended = ranked.together(p, pipeline_ranks.piped, settings)
    assert all(one.returncode == 0 for one in ended), "\n".join(one.stderr for one in ended)
    for index, (name, count, _) in enumerate(settings):
        each = [one.result[index] for one in ended]
        # DualPipe's two copies of a stage have each half of the microbatches: added in another order than in one process.
        assert max(grad for grad, _, _ in each) <= (1e-7 if name == "dualpipe" else 0), (name, each)
        assert max(loss for _, loss, _ in each) == 0, name
        assert sum(losses for _, _, losses in each) == count, name


def test_a_killed_rank_ends_all():
    ended = ranked.together(4, pipeline_ranks.killed, "1f1b", 8, ["F", 1, 3])
    assert ended[1].returncode == -9
    for rank in (0, 2, 3):
        assert ended[rank].returncode == 0, ended[rank].stderr
        assert f"rank {rank} of the pipeline lost another one in " in ended[rank].result, ended[rank].result
        assert "stage" in ended[rank].result


@pytest.mark.parametrize("slow", [False, True], ids=["lost", "slow"])
def test_a_lost_message_and_a_slow_stage_end_all(slow: bool):
    ended = ranked.together(3, pipeline_ranks.late, "1f1b", 6, ["F", 1, 3], 5.0, slow)
    assert all(one.returncode == 0 for one in ended), "\n".join(one.stderr for one in ended)
    said = [one.result for one in ended]
    assert "has waited 5 s for rank 1 in F of stage 2 of microbatch 3: that rank is slower" in said[2], said
    assert all(one.startswith(("Late: ", "Lost: ")) for one in said), said


def test_an_error_names_its_pass_and_ends_all():
    ended = ranked.together(2, pipeline_ranks.failing, "zb_h1", 4, ["F", 1, 2])
    assert "ZeroDivisionError" in ended[1].result
    assert "in F of stage 1 of microbatch 2 on rank 1 of schedule ZB-H1" in ended[1].result
    assert ended[0].result.startswith(("Lost", "MachineError")), ended[0].result


@pytest.mark.slow
def test_deferred_gradients_survive_compilation():
    stage, whole = pipeline_ranks.model(1)[0], pipeline_ranks.model(1)[0]
    queue = WeightGradients()
    queue.defer([stage.up, stage.down])
    x = pipeline_ranks.data(1)[0][0]
    with queue.later((0, 0)):
        torch.compile(stage, backend="aot_eager")(x).square().sum().backward()
    assert stage.up.weight.grad is None and len(queue) == 1
    assert stage.norm.weight.grad is not None
    queue.compute((0, 0))
    assert len(queue) == 0
    whole(x).square().sum().backward()
    for found, right in zip(stage.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.grad, right.grad)
