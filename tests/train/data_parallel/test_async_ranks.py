"""Parameter servers and gossip on gloo ranks: each against its definition in one process, with stragglers, killed ranks and resumes."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.ranks import Mesh
from hone.feed.load import PackedTokens
from hone.train import DATA_PARALLEL
from hone.train.data_parallel.asynchronous.shard import Keys
from hone.train.data_parallel.asynchronous.topology import exponential, ring
from tests.ranked import together
from tests.train.conftest import SHAPE, STEADY
from tests.train.data_parallel.async_ranks import unserved, worked
from tests.train.data_parallel.test_data_parallel import on_ranks
from tests.train.ranks import BATCH, SEQ, failing, made, trainer

WORKERS, SLOW = 4, 2
SHORT: dict[str, Any] = {"model": {"num_layers": 1}, "steps": 3}
MIXED: dict[str, Any] = {**SHORT, "optimizer": "muon", "masked": True, "uneven": True, "gradient_accumulation_steps": 2}
LONGER: dict[str, Any] = {**SHORT, "steps": 7, "slow": SLOW}


def kind(name: str, **more: Any) -> dict[str, Any]:
    lossy = {} if name == "ddp" else {"num_workers": WORKERS}
    return {"data_parallel": {"kind": name, **lossy, **more}}


SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {**SHORT, **kind("ddp")},
    "bsp": {**SHORT, **kind("bsp")},
    "ssp 0": {**SHORT, **kind("ssp", staleness=0, sync_every=2), "slow": SLOW},
    "ddp, muon": {**MIXED, **kind("ddp")},
    "bsp, muon": {**MIXED, **kind("bsp")},
    "ddp, bf16": {**SHORT, **kind("ddp"), "precision": "bf16"},
    "bsp, bf16": {**SHORT, **kind("bsp"), "precision": "bf16"},
    "bsp, clipped": {**SHORT, **kind("bsp"), "max_grad_norm": 0.01},
    "ssp 2": {**LONGER, **kind("ssp", staleness=2)},
    "asp": {**LONGER, **kind("asp")},
    "gossip": {**SHORT, "steps": 5, **kind("gossip", sync_every=4)},
    "gossip, exponential": {**SHORT, "steps": 5, **kind("gossip", topology="exponential", sync_every=4)},
}


@pytest.fixture(scope="module")
def found(data_folder, tmp_path_factory) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[Any]]]:
    """By setting, what each rank found, and each rank's weights after each step."""
    out = tmp_path_factory.mktemp("worked")
    results = on_ranks(WORKERS, worked, str(data_folder), str(out), list(SETTINGS.values()))
    weights = {
        name: [torch.load(out / f"{at}-{rank}.pt") for rank in range(WORKERS)] for at, name in enumerate(SETTINGS)
    }
    return {name: [rank[at] for rank in results] for at, name in enumerate(SETTINGS)}, weights


def flat(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.reshape(-1) for name, one in weights.items()}


def assert_near(ours: dict[str, Tensor], theirs: dict[str, Tensor], most: float, said: str) -> None:
    for name, one in flat(theirs).items():
        assert (flat(ours)[name] - one).abs().max() <= most, f"{said}: {name}"


def test_bsp_equals_synchronous_training(found):
    results, weights = found
    for one, other in (("bsp", "ddp"), ("bsp, muon", "ddp, muon")):
        for rank in range(WORKERS):
            for step, (ours, theirs) in enumerate(zip(weights[one][rank], weights[other][0], strict=True)):
                # Muon orthogonalises sums in another order.
                assert_near(ours, theirs, 2e-6 if one == "bsp" else 2e-5, f"{one}, step {step}")
    # A half-precision gradient is rounded as a part of the rank's mean there, of all ranks' here: AdamW moves some weights otherwise.
    ours, theirs, start = (
        torch.cat([*flat(one).values()])
        for one in (weights["bsp, bf16"][3][-1], weights["ddp, bf16"][0][-1], weights["ddp, bf16"][0][0])
    )
    assert (ours - theirs).abs().mean() <= 0.02 * (theirs - start).abs().mean()
    assert (ours - ours.bfloat16()).abs().max() > 0, "masters are float32"
    for rank in range(WORKERS):
        for ours, theirs in zip(weights["ssp 0"][rank], weights["bsp"][0], strict=True):
            assert all(torch.equal(ours[name], values) for name, values in theirs.items()), "to the bit"
    for name in ("bsp", "ssp 0", "bsp, muon", "bsp, bf16"):
        assert all(one["staleness"] == {"0": 3} and one["updates"] == 3 for one in results[name])


def test_staleness_is_never_more_than_asked_for(found):
    """As the clocks say that came with the weights: with a slow rank, the last to begin each step, the others are as far ahead as they may be."""
    results, weights = found
    ssp = [{int(lag): count for lag, count in one["staleness"].items()} for one in results["ssp 2"]]
    asp = [{int(lag): count for lag, count in one["staleness"].items()} for one in results["asp"]]
    for one in (ssp, asp):
        assert all(sum(rank.values()) == LONGER["steps"] for rank in one)
        assert set(one[SLOW]) == {0}, "the slowest worker misses nothing"
    assert max(max(rank) for rank in ssp) == 2
    assert max(max(rank) for rank in asp) == LONGER["steps"] - 1, "without a bound they run ahead to the meeting"
    for name in ("ssp 2", "asp"):
        last = [rank[-1] for rank in weights[name]]
        assert all(torch.equal(last[0][one], other[one]) for other in last for one in last[0]), (
            "the last step is a meeting"
        )
        assert all(one["tokens"] == results[name][0]["tokens"] for one in results[name])
        assert all(one["updates"] > LONGER["steps"] for one in results[name]), "gradients are applied as they come"


class Replayed:
    """A run of parameter servers again in one process, from what the servers logged: AdamW in float64, one weight at a time."""

    def __init__(self, data: PackedTokens, setting: dict[str, Any], logs: list[list[Any]], order: Any) -> None:
        self.model = trainer(data, Mesh(), {**setting, "data_parallel": "ddp"})
        self.data, self.logs = data, logs
        start = {name: one.detach().clone() for name, one in self.model.update.weights.masters.items()}
        # In the order in which ranks have their weights.
        self.keys = Keys({name: tuple(start[name].shape) for name in order}, (), WORKERS)
        self.values = {name: one.double().reshape(-1).numpy() for name, one in start.items()}
        self.moments = [{name: np.zeros_like(one) for name, one in self.values.items()} for _ in range(2)]
        self.counts = [0] * WORKERS
        self.pending: list[list[Any]] = [[] for _ in range(WORKERS)]
        self.read = [[dict(start)] for _ in range(WORKERS)]
        """By worker, the weights that it had before each step."""
        self.parts = [[{} for _ in range(setting["steps"] + 1)] for _ in range(WORKERS)]
        self.gradients: dict[tuple[int, int], dict[str, np.ndarray]] = {}

    def gradient(self, worker: int, clock: int) -> dict[str, np.ndarray]:
        """Of the mean loss of the worker's part of the step's batch."""
        if (worker, clock) not in self.gradients:
            names = self.model.update.weights.masters
            for name, values in self.read[worker][clock - 1].items():
                names[name].data.copy_(values.view(names[name].shape))
            each = BATCH // WORKERS
            first = (clock - 1) * BATCH + worker * each
            part = self.data.sequences(np.arange(first, first + each), SEQ, 0)
            loss, *_ = self.model._loss(part, 1)
            (loss / self.model.objective.count(part.targets)).backward()
            self.gradients[worker, clock] = {name: one.grad.double().reshape(-1).numpy() for name, one in names.items()}
            for one in names.values():
                one.grad = None
        return self.gradients[worker, clock]

    def step(self, server: int) -> None:
        """What a server does with the gradients that have come: their mean by targets, with their share of the learning rate."""
        self.counts[server] += 1
        came, count = self.pending[server], self.counts[server]
        self.pending[server] = []
        targets = sum(weight for *_, weight in came)
        lr = sum(rate for _, _, rate, _ in came) / WORKERS
        for name, start, stop, _ in self.keys.ranges(server):
            at = slice(start, stop)
            mean = sum(self.gradient(worker, clock)[name][at] * weight / targets for worker, clock, _, weight in came)
            m, v = (one[name] for one in self.moments)
            m[at] = 0.9 * m[at] + 0.1 * mean
            v[at] = 0.95 * v[at] + 0.05 * mean**2
            if len(self.read[0][0][name].shape) > 1:
                self.values[name][at] *= 1 - lr * 0.1
            root = np.sqrt(v[at] / (1 - 0.95**count)) + STEADY["eps"]
            self.values[name][at] -= lr * m[at] / (1 - 0.9**count) / root

    def run(self) -> list[list[dict[str, Tensor]]]:
        """By worker, the weights after each step: every server's log is played as far as the workers had got."""
        at = [0] * WORKERS
        while any(at[server] < len(log) for server, log in enumerate(self.logs)):
            before = list(at)
            for server, log in enumerate(self.logs):
                while at[server] < len(log) and len(self.read[log[at[server]][0]]) >= log[at[server]][1]:
                    worker, clock, lr, weight, due = log[at[server]]
                    self.pending[server].append((worker, clock, lr, weight))
                    if due:
                        self.step(server)
                    for one in due:
                        self._reads(server, one)
                    at[server] += 1
            assert at != before, "the logs of the servers do not fit together"
        return [one[1:] for one in self.read]

    def _reads(self, server: int, worker: int) -> None:
        clock = sum(1 for one in self.parts[worker] if server in one) + 1
        part = self.parts[worker][clock]
        part[server] = {name: self.values[name][start:stop].copy() for name, start, stop, _ in self.keys.ranges(server)}
        if len(part) == WORKERS:
            whole = {name: np.empty_like(one) for name, one in self.values.items()}
            for number, pieces in part.items():
                for name, start, stop, _ in self.keys.ranges(number):
                    whole[name][start:stop] = pieces[name]
            shapes = self.read[worker][0]
            self.read[worker].append(
                {name: torch.from_numpy(one).float().view(shapes[name].shape) for name, one in whole.items()}
            )


@pytest.mark.parametrize("name", ["asp", "ssp 2"])
def test_asynchronous_steps_are_those_of_their_definition(name, found, data_folder):
    """Every worker's weights after every step, computed again from nothing but the order in which gradients came."""
    torch.set_num_threads(1)
    results, weights = found
    again = Replayed(
        PackedTokens(data_folder), SETTINGS[name], [one["log"] for one in results[name]], weights[name][0][0]
    ).run()
    for worker, (ours, theirs) in enumerate(zip(weights[name], again, strict=True)):
        for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_near(one, other, 5e-6, f"worker {worker}, step {step + 1}")


def test_each_worker_clips_its_own_gradient(found, data_folder):
    """Their mean by targets is as AdamW's first moment after one step would have it: compared through the weights after it."""
    torch.set_num_threads(1)
    results, weights = found
    data = PackedTokens(data_folder)
    name, setting = "bsp, clipped", SETTINGS["bsp, clipped"]
    replayed = Replayed(data, setting, [one["log"] for one in results[name]], weights[name][0][0])
    plain = replayed.gradient

    def clipped(worker: int, clock: int) -> dict[str, np.ndarray]:
        found = plain(worker, clock)
        norm = np.sqrt(sum((one**2).sum() for one in found.values()))
        return {key: one * min(1.0, 0.01 / norm) for key, one in found.items()}

    replayed.gradient = clipped
    for step, theirs in enumerate(replayed.run()[0]):
        assert_near(weights[name][0][step], theirs, 5e-6, f"step {step + 1}")
        assert any(
            (weights[name][0][step][one] - values).abs().max() > 1e-5 for one, values in weights["bsp"][0][step].items()
        )


def mixed_then(worker: Any, mean: dict[str, Tensor], then: Any, lr: float, factor: Any) -> None:
    """The update of a worker from `mean` on."""
    for name, one in worker.update.weights.masters.items():
        one.detach().view(-1).copy_(mean[name])
    then(lr, factor)


def gossiped(data: PackedTokens, setting: dict[str, Any], mixed: Any, every: int) -> list[list[dict[str, Tensor]]]:
    """Algorithm 1 of arXiv:1705.09056 for workers one after the other, whose weights are averaged every so many steps."""
    workers = [trainer(data, Mesh(), {**setting, "data_parallel": "ddp"}) for _ in range(WORKERS)]
    each, found = BATCH // WORKERS, [[] for _ in workers]
    for worker in workers:
        worker.max_grad_norm = 0.0
    for step in range(setting["steps"]):
        matrix = np.zeros((WORKERS, WORKERS))
        for rank in range(WORKERS):
            sources = mixed(step, rank, WORKERS).sources
            matrix[rank, rank] = 1 - sum(sources.values())
            for peer, share in sources.items():
                matrix[rank, peer] = share
        before = [
            flat({name: one.detach().double() for name, one in worker.update.weights.masters.items()})
            for worker in workers
        ]
        for rank, worker in enumerate(workers):
            first = step * BATCH + rank * each
            mean = {
                name: sum(matrix[rank, other] * before[other][name] for other in range(WORKERS)) for name in before[0]
            }
            update = worker.update.apply
            worker.update.apply = partial(mixed_then, worker, mean, update)
            worker.step(data.sequences(np.arange(first, first + each), SEQ, 0))
            worker.update.apply = update
        masters = [worker.update.weights.masters for worker in workers]
        if (step + 1) % every == 0 or step + 1 == setting["steps"]:
            for name in masters[0]:
                mean = torch.stack([one[name].detach().double() for one in masters]).mean(0)
                for one in masters:
                    one[name].detach().copy_(mean)
        for rank, one in enumerate(masters):
            found[rank].append({name: values.detach().clone() for name, values in one.items()})
    return found


@pytest.mark.parametrize(("name", "mixed"), [("gossip", ring), ("gossip, exponential", exponential)])
def test_gossip_is_as_defined(name, mixed, found, data_folder):
    torch.set_num_threads(1)
    _, weights = found
    theirs = gossiped(PackedTokens(data_folder), SETTINGS[name], mixed, 4)
    for rank in range(WORKERS):
        for step in range(5):
            assert_near(weights[name][rank][step], theirs[rank][step], 5e-6, f"rank {rank}, step {step + 1}")
    apart = [
        max((weights[name][0][step][one] - weights[name][1][step][one]).abs().max() for one in theirs[0][0])
        for step in range(5)
    ]
    assert apart[0] > 1e-4 and apart[3] == apart[4] == 0, "ranks differ, and not after a meeting"


def test_ranks_send_what_the_closed_forms_say(found, data_folder):
    """A worker sends its gradient to the other servers, a server its weights to the other workers: X (n - 1) / n each, beside padding."""
    results, _ = found
    params = SHAPE.model_copy(update={"num_layers": 1}).config(PackedTokens(data_folder).vocab_size).num_params
    dims = SHAPE.model_copy(update={"num_layers": 1}).config(PackedTokens(data_folder).vocab_size).dims()
    for name in ("bsp", "ssp 2", "asp"):
        steps = SETTINGS[name]["steps"]
        divided = DATA_PARALLEL.read(SETTINGS[name]["data_parallel"]).divided(WORKERS)
        planned = steps * sum(one.sent_bytes for one in divided.messages(dims, 4, 1))
        assert planned == pytest.approx(2 * steps * 4 * params * 3 / 4)
        for one in results[name]:
            assert one["sent"].keys() == {"push", "pull"} and one["sent"]["push"] == one["sent"]["pull"]
            assert planned <= sum(one["sent"].values()) <= 1.05 * planned, name
        assert sum(one["held"] for one in results[name]) == params
        assert max(one["held"] for one in results[name]) <= 1.05 * params / WORKERS
    for name, peers in (("gossip", 2), ("gossip, exponential", 1)):
        assert all(one["sent"] == {"gossip": 5 * peers * 4 * params} for one in results[name])


def test_a_restored_training_goes_on(data_folder, tmp_path):
    """bsp, and ssp without staleness, with the bits of one that was never interrupted; the others from equal weights on all ranks."""
    first = {"until": 2, "write": ""}
    settings, kinds, varies = [], ["bsp", "ssp", "asp", "gossip", "ad_psgd"], ("asp", "ad_psgd")
    for name in kinds:
        more = {"bsp": {}, "ssp": {"staleness": 0, "sync_every": 2}}.get(name, {"sync_every": 2})
        one = {**SHORT, "steps": 4, "data_parallel": {"kind": name, **more}}
        folder = str(tmp_path / name)
        settings += [one, {**one, **first, "write": folder}, {**one, "read": folder}]
    results = on_ranks(2, worked, str(data_folder), str(tmp_path), settings)
    for at, name in enumerate(kinds):
        for rank in range(2):
            through, until, again = (torch.load(tmp_path / f"{3 * at + part}-{rank}.pt") for part in range(3))
            assert len(again) == 2
            joined = [*until, *again]
            assert results[rank][3 * at]["tokens"] == results[rank][3 * at + 2]["tokens"]
            for step in range(4):
                same = all(torch.equal(joined[step][one], values) for one, values in through[step].items())
                assert same or name in varies, f"{name}, step {step + 1}"
            if name in varies:  # which gradient or average comes first differs from run to run
                assert_near(joined[3], through[3], 8e-3, name)


SPEC: dict[str, Any] = {
    "model": SHAPE.model_dump(),
    "batch_size": 6,
    "seq_len": 32,
    "steps": 6,
    "validation": {"interval": 2, "sequences": 7},
    "checkpoint": {"interval": 2, "keep": {"best": True, "interval": 2}},
    "optimizer": {"lr": 1e-3},
}


def spec(name: str, **more: Any) -> dict[str, Any]:
    return {**SPEC, "parallelism": {"data_parallel": {"kind": name, "num_workers": 3, **more}}}


SLOWLY = [pytest.param(name, marks=pytest.mark.slow) for name in ("gossip", "ad_psgd")]


@pytest.mark.parametrize("name", ["bsp", "asp", *SLOWLY])
def test_a_killed_rank_is_one_error_and_the_stage_resumes(name, data_folder, tmp_path):
    one = spec(name, **({} if name == "bsp" else {"sync_every": 2}))
    through = on_ranks(3, made, one, str(data_folder), str(tmp_path / "one"))
    ended = together(3, made, one, str(data_folder), str(tmp_path / "two"), 4)
    assert ended[1].returncode == -signal.SIGKILL
    for rank in (0, 2):
        assert ended[rank].returncode == 0 and "Traceback" not in ended[rank].stderr, ended[rank].stderr[-2000:]
        what, fix = ended[rank].result.split("\n")
        assert "lost" in what and "the stage resumes" in fix
    again = on_ranks(3, made, one, str(data_folder), str(tmp_path / "two"))
    varies = name in ("asp", "ad_psgd")
    if not varies:
        assert again == through
    rows = [
        [row.get("loss", row.get("val_loss")) for row in read_jsonl(tmp_path / run / "steps.jsonl")]
        for run in ("one", "two")
    ]
    assert len(rows[0]) == len(rows[1]) == 9
    if varies:  # between two meetings a rank's loss is of whichever gradients or averages have come
        rows = [[one for at, one in enumerate(own) if at % 3 != 1] for own in rows]
    assert rows[1] == pytest.approx(rows[0], abs=0.02 if varies else 0)


@pytest.mark.parametrize("where", ["backward", "update"])
def test_an_error_of_one_rank_is_that_of_all(where, data_folder):
    for name in ("asp", "gossip", "ad_psgd") if where == "backward" else ("bsp",):
        said = on_ranks(2, failing, str(data_folder), {"data_parallel": {"kind": name}}, where)
        assert said == ["MachineError: rank 1 failed: ZeroDivisionError: a bug", "ZeroDivisionError: a bug"], name


def test_an_error_of_one_server_is_that_of_all(data_folder):
    said = on_ranks(3, unserved, str(data_folder))
    assert said[1] == "ZeroDivisionError: a bug of a server"
    assert said[0] == said[2] == "MachineError: rank 1 failed: ZeroDivisionError: a bug of a server"


def test_a_signal_ends_all_in_a_meeting(data_folder, tmp_path):
    one = {**spec("asp", sync_every=4), "steps": 8, "validation": {"sequences": 4}, "checkpoint": {"interval": 4}}
    arguments = (one, str(data_folder), str(tmp_path / "train-x"))
    ended = together(3, made, *arguments, 1, signal.SIGTERM)
    assert [one.result for one in ended] == ["ended after step 4 of 8, which is saved"] * 3
    assert len(set(on_ranks(3, made, *arguments))) == 1
    assert len(read_jsonl(Path(arguments[2]) / "steps.jsonl")) == 9
    staleness = Artifact.read(arguments[2]).figures["staleness"]
    assert 0 <= staleness.value <= 3 and staleness.unit == "steps", "fewer than the steps between two meetings"
