"""Cached logits: the loss against its definition, the files, and trainings on them beside one with the teacher itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hone.base.artifact import Artifact
from hone.base.errors import ArtifactError, HoneError, SpecError
from hone.base.run import Run
from hone.feed.load import PackedTokens
from hone.measure.machine import machine_of
from hone.model.decoder import build
from hone.model.hf import save
from hone.ops.loss.cached import Kept, cached_loss
from hone.ops.loss.divergence import Divergence
from hone.train.cached_logits import shards
from hone.train.cached_logits.keep import drawn, most_likely
from hone.train.cached_logits.shards import CachedLogits, digests
from hone.train.cached_logits.stage import teach
from hone.train.stage import Train
from tests.train.conftest import SHAPE

T, D, V = 6, 5, 12


def given() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, D], weight [V, D], a teacher's logits [T, V], targets with one that is ignored."""
    draw = torch.Generator().manual_seed(0)
    x, weight, logits = (torch.randn(*shape, generator=draw).double() for shape in ((T, D), (V, D), (T, V)))
    return x.requires_grad_(), weight.requires_grad_(), logits * 2, torch.tensor([1, 0, 3, -100, 11, 2])


def grads(loss: torch.Tensor, *of: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, of)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_the_bucket_is_one_outcome_of_both_distributions(kind):
    x, weight, logits, targets = given()
    ids, log_probs, tails = most_likely(logits, 4, 2.0)
    kept = Kept(ids, log_probs, V, 2.0, tails)
    found = cached_loss(x, weight, targets, kept, alpha=0.7, divergence=Divergence(kind, 0.3))
    own, valid = x @ weight.T, targets != -100

    def merged(values: torch.Tensor) -> torch.Tensor:
        p = (values / 2).softmax(-1)
        few = torch.stack([p[row, ids[row]] for row in range(T)])
        return torch.cat((few, 1 - few.sum(-1, keepdim=True)), -1)

    p, q = merged(logits), merged(own)
    m = 0.3 * p + 0.7 * q
    kl = lambda a, b: (a * (a / b).log()).sum(-1)  # noqa: E731
    apart = {"forward_kl": kl(p, q), "reverse_kl": kl(q, p), "jsd": 0.3 * kl(p, m) + 0.7 * kl(q, m)}[kind]
    wanted = 0.7 * 4 * apart[valid].sum() + 0.3 * F.cross_entropy(own, targets, reduction="sum")
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for one, other in zip(grads(found, x, weight), grads(wanted, x, weight), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_without_a_bucket_the_rest_counts_nothing():
    x, weight, logits, targets = given()
    ids, log_probs, _ = most_likely(logits, 4, 1.0)
    found = cached_loss(x, weight, targets, Kept(ids, log_probs, V), alpha=1.0)
    q, p = (x @ weight.T).log_softmax(-1), logits.softmax(-1)
    wanted = sum((p[t, i] * (p[t, i].log() - q[t, i])) for t in range(T) if targets[t] != -100 for i in ids[t])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_drawn_ids_are_unbiased_where_the_most_likely_are_not():
    """The mean gradient over many draws is that of the whole distribution."""
    x, weight, logits, targets = given()
    q = (x @ weight.T).log_softmax(-1)
    valid = targets != -100
    whole = (logits.softmax(-1) * (logits.log_softmax(-1) - q)).sum(-1)[valid].sum()
    (wanted,) = grads(whole, x)
    ids, log_probs = drawn(logits, 40000, 1.0, torch.Generator().manual_seed(1))
    found = cached_loss(x, weight, targets, Kept(ids, log_probs, V, drawn=True), alpha=1.0)
    (unbiased,) = grads(found, x)
    few, theirs, _ = most_likely(logits, 3, 1.0)
    (biased,) = grads(cached_loss(x, weight, targets, Kept(few, theirs, V), alpha=1.0), x)
    assert float((unbiased - wanted).norm() / wanted.norm()) < 0.02 < float((biased - wanted).norm() / wanted.norm())
    assert float(found.detach()) == pytest.approx(float(whole.detach()), rel=0.03)


@pytest.fixture(scope="module")
def teacher(data_folder, tmp_path_factory):
    """A model folder with the tokenizer of the data, whose predictions are far from uniform."""
    vocab = PackedTokens(data_folder).vocab_size
    made = build(SHAPE.model_copy(update={"num_layers": 2}).config(vocab), seed=3)
    with torch.no_grad():
        made.embedding.mul_(8)
    folder = tmp_path_factory.mktemp("teacher") / "model"
    save(made, folder, tokenizer_from=data_folder)
    return folder


def train(out, data, **fields: Any) -> Artifact:
    inputs = {name: Artifact.read(fields.pop(name)) for name in ("teacher", "logits") if name in fields}
    shape = SHAPE.model_copy(update={"num_layers": 2}).model_dump()
    spec = {"model": shape, "batch_size": 4, "seq_len": 32, "steps": 3, **fields}
    return Train.read(spec).make(out, {"data": Artifact.read(data), **inputs}, Run(quiet=True))


def weights(made: Artifact) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(made.folder / "model.safetensors")


def test_a_cache_of_nearly_all_ids_trains_as_the_teacher_does(teacher, data_folder, tmp_path):
    vocab = PackedTokens(data_folder).vocab_size
    cache = teach(tmp_path / "teach-all", teacher, data_folder, Run(quiet=True), k=vocab - 1, seq_len=32)
    assert cache.figures["kept_probability"].value == pytest.approx(1, abs=0.05)
    disk = sum(one.stat().st_size for one in (cache.folder / "logits").iterdir())
    assert disk == pytest.approx(cache.figures["disk_bytes"].estimate.value, rel=0.02)
    objective = {"kind": "distill", "alpha": 0.8, "temperature": 1.0}
    plain = train(tmp_path / "train-plain", data_folder, teacher=teacher, objective=objective)
    cached = train(
        tmp_path / "train-cached", data_folder, logits=cache.folder, objective={**objective, "teacher": "cached"},
        gradient_accumulation_steps=2,
    )  # fmt: skip
    assert cached.figures["val_loss"].value == pytest.approx(plain.figures["val_loss"].value, rel=1e-3)


def test_a_killed_stage_goes_on_with_the_shards_that_are_there(teacher, data_folder, tmp_path, monkeypatch):
    how = {"k": 4, "seq_len": 32, "keep": "sampled", "batch_size": 8}
    monkeypatch.setattr("hone.train.cached_logits.stage.SHARD_BYTES", 16 * 32 * 40)
    whole = teach(tmp_path / "teach-whole", teacher, data_folder, Run(quiet=True), **how)
    write, written = shards.write_shard, []

    def killed(path, *rest):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path)
        write(path, *rest)

    monkeypatch.setattr(shards, "write_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        teach(tmp_path / "teach-killed", teacher, data_folder, Run(quiet=True), **how)
    monkeypatch.setattr(shards, "write_shard", write)
    again = teach(tmp_path / "teach-killed", teacher, data_folder, Run(quiet=True), **how)
    names = sorted(path.name for path in (whole.folder / "logits").iterdir())
    assert len(names) > 4
    for name in names:
        assert (whole.folder / "logits" / name).read_bytes() == (again.folder / "logits" / name).read_bytes()
    cache, data = CachedLogits(again.folder), PackedTokens(data_folder)
    batch = data.batch(3, 5, 32, seed=9)  # in any order
    assert cache.of(batch).ids.shape == (5, 32, 4) and len(set(digests(batch))) == 5
    with pytest.raises(HoneError, match="has no logits of a sequence"):
        cache.of(type(batch)(batch.tokens[:, ::-1].copy(), batch.targets, batch.document_ids))


def test_a_cache_that_does_not_fit_is_refused(teacher, data_folder, tmp_path):
    from hone.base.plan import facts_of
    from tests.train.conftest import write_data

    run = Run(quiet=True)
    cache = facts_of(teach(tmp_path / "teach-few", teacher, data_folder, run, k=4, seq_len=32, keep="sampled"))
    data = facts_of(Artifact.read(data_folder))
    other = facts_of(Artifact.read(write_data(tmp_path / "data-other", 20, seed=4)))
    spec = {"model": SHAPE.model_dump(), "seq_len": 32, "steps": 2, "batch_size": 4}
    cached = {"kind": "distill", "teacher": "cached"}
    machine = machine_of(run)
    cases: list[tuple[dict, dict, type, str]] = [
        ({"objective": cached}, {"data": data}, SpecError, "needs the input 'logits'"),
        ({"objective": "distill"}, {"data": data, "logits": cache}, SpecError, "needs a teacher"),
        ({"objective": cached}, {"data": other, "logits": cache}, ArtifactError, "of other data than"),
        ({"objective": cached, "seq_len": 64}, {"data": data, "logits": cache}, SpecError, "of seq_len 32"),
        ({"objective": {**cached, "temperature": 2}}, {"data": data, "logits": cache}, SpecError, "of temperature 1"),
        ({"objective": {**cached, "divergence": "jsd"}}, {"data": data, "logits": cache}, SpecError, "no meaning"),
        ({"objective": {**cached, "text": "student"}}, {"data": data, "logits": cache}, SpecError, "in memory"),
        ({"objective": {**cached, "kind": "relations"}}, {"data": data, "logits": cache}, SpecError, "in memory"),
        ({}, {"data": data, "logits": cache}, SpecError, "are not read"),
    ]
    for fields, facts, error, said in cases:
        with pytest.raises(error, match=said):
            Train.read({**spec, **fields}).plan(facts, machine)
    with pytest.raises(SpecError, match="k 4000 is not below"):
        teach(tmp_path / "teach-many", teacher, data_folder, run, k=4000, seq_len=32)


def test_log_probabilities_are_those_of_the_teacher(teacher, data_folder, tmp_path):
    import hone

    cache = CachedLogits(teach(tmp_path / "teach-few", teacher, data_folder, Run(quiet=True), k=3, seq_len=32).folder)
    data = PackedTokens(data_folder)
    batch = next(data.in_order(3, 32))
    found = cache.of(batch)
    model = hone.load(teacher)
    from hone.train.passes import to_device

    tokens, _, context = to_device(batch, torch.device("cpu"))
    with torch.no_grad():
        log_p = model(tokens, context).log_softmax(-1).numpy()
    assert (found.ids[..., 0] == log_p.argmax(-1)).all()
    np.testing.assert_allclose(found.log_probs, np.take_along_axis(log_p, found.ids, -1), rtol=1e-3, atol=1e-3)
    assert found.tails is not None
    np.testing.assert_allclose(np.exp(found.tails) + np.exp(found.log_probs).sum(-1), 1, atol=2e-3)
