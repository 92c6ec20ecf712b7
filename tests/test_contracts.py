"""Contract tests of every slot: whatever stands in a table must keep them, without being named here."""

from __future__ import annotations

import hashlib
import math
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import hone
from hone.base.errors import SpecError
from hone.base.run import Run
from hone.base.table import Technique, all_tables
from hone.compress import CONVERSIONS, KV_CACHES, LOW_RANK, PRUNERS, QUANTIZERS, STEPS, STRUCTURED_PRUNERS, TRANSFORMS
from hone.compress.low_rank.base import Correction
from hone.compress.stage import Compress
from hone.data import DEDUPS, FILTERS
from hone.data.expression import evaluate
from hone.data.signals import signals
from hone.feed.load import Batch
from hone.model.decoder import build
from hone.model.growth import GROWTHS
from hone.model.growth.base import grown_checkpoint
from hone.model.hf import Checkpoint
from hone.model.incremental import Incremental, generate
from hone.model.mixers import MIXERS
from hone.model.shape import Shape
from hone.serve import DRAFTERS
from hone.train import ACTIVATION_CHECKPOINTINGS, OBJECTIVES, SCHEDULES
from hone.train.activation_checkpointing.base import Sizes
from hone.train.loop import Trainer
from hone.train.optimizers.adamw import AdamW

QUIET = Run(quiet=True)
SPECS = [
    (slot, name)
    for slot, table in all_tables().items()
    for name in table
    if isinstance(table[name], type) and issubclass(table[name], Technique)
]


def required(cls: type[Technique]) -> dict:
    """Values for the fields that have no default: the smallest that can be."""
    plain = {
        "intermediate_size": 8,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
        "window": 4,
        "max_seq_len": 64,
        "keep": "True",
        "languages": ["en"],
        "weights": {"a": 1.0},
        "examples": {"test": "examples.jsonl"},
        "mixtures": "mixtures.csv",
        "losses": "losses.csv",
        "model": "judge",
        "prompt": "{text}",
        "path": "lid.176.ftz",
        "fields": {"score": "number"},
    }
    return {name: plain[name] for name, field in cls.model_fields.items() if field.is_required()}


@pytest.mark.parametrize(("slot", "name"), SPECS)
def test_options_print_and_read_back(slot, name):
    table = all_tables()[slot]
    technique = table.read({"kind": name, **required(table[name])})
    assert technique.kind == name
    assert table.read(technique.model_dump(mode="json")) == technique


@pytest.mark.parametrize(("slot", "name"), SPECS)
def test_a_wrong_option_is_named(slot, name):
    table = all_tables()[slot]
    with pytest.raises(SpecError, match="no_such_option"):
        table.read({"kind": name, **required(table[name]), "no_such_option": 1})


# compress


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir()) if path.is_file()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        *QUANTIZERS,
        *PRUNERS,
        *STRUCTURED_PRUNERS,
        *CONVERSIONS,
        *LOW_RANK,
        *KV_CACHES,
        *(name for name in TRANSFORMS if TRANSFORMS[name].phase == "model"),
    ],
)
def test_compression_keeps_its_word_and_its_input(kind, tiny_llama, experts_line, experts_folder, tmp_path):
    model = experts_folder if kind == "experts" else tiny_llama
    if kind == "expert_merging":  # it knows how the feed-forward `moe` computes
        growth = GROWTHS.read({"kind": "upcycle", "num_experts": 4, "noise_std": 0.5})
        model = tmp_path / "upcycled"
        hone.save(grown_checkpoint(Checkpoint(tiny_llama), [growth]).build(), model, tokenizer_from=tiny_llama)
    before = digests(model)
    text = tmp_path / "calibration.txt"
    text.write_text("the quick brown fox jumps over the lazy dog and the cat sat on the mat. " * 60)
    options = {"group_size": 32, "block_size": 32, "intermediate_size": 0.5}
    step = {
        "kind": kind,
        **required(STEPS[kind]),
        **{name: value for name, value in options.items() if name in STEPS[kind].model_fields},
    }
    if issubclass(STEPS[kind], Correction):
        before_it, step["rank"] = [{"kind": "rtn", "group_size": 32}], 4
    else:
        before_it = []
    spec = Compress.read(
        {"steps": [*before_it, step], "calibration_text": str(text), "num_sequences": 4, "seq_len": 64}
    )
    made = spec.make(tmp_path / "made", {"model": hone.Artifact.read(model)}, QUIET)
    assert digests(model) == before
    figure = made.figures["model_bytes"]
    assert figure.estimate.value == pytest.approx(figure.value, rel=0.01)
    assert [row["kind"] for row in made.techniques] == [*(one["kind"] for one in before_it), kind]
    tokens = torch.arange(40)[None]
    first, again = hone.load(made.folder)(tokens), hone.load(made.folder)(tokens)
    assert torch.isfinite(first).all() and torch.equal(first, again)
    hone.save(hone.load(made.folder), tmp_path / "saved")
    assert torch.equal(hone.load(tmp_path / "saved")(tokens), first)


# data


@pytest.fixture(scope="module")
def columns():
    """Signals of odd texts, as the filters see them."""
    texts = [
        "",
        " ",
        "\n\n\n",
        "a",
        "plain words " * 80,
        "# " * 200,
        "same line\n" * 100,
        "\x00\x01",
        "日本語の文章。" * 50,
        "x" * 5000,
    ]
    rows = [signals(text) for text in texts]
    made = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    made["toxic_words"] = np.linspace(0, 1, len(texts))
    made["kind"] = np.array(["text"] * len(texts), object)
    made["language"] = np.array(["en"] * len(texts), object)
    made["language_score"] = np.ones(len(texts))
    return made


@pytest.mark.parametrize("name", [*FILTERS])
def test_a_filter_gives_a_reason_for_everything_it_drops(name, columns):
    chosen = FILTERS.read({"kind": name, **required(FILTERS[name])})
    keep, reasons = chosen.decide(columns)
    assert keep.dtype == bool and len(keep) == len(columns["bytes"])
    assert ((reasons == "") == keep).all()
    assert set(reasons) - {""} <= {rule.reason for rule in chosen.rules()}
    outside = ~evaluate(chosen.when, columns)
    assert keep[outside].all(), "dropped a document its rules do not apply to"


def test_dedups_name_their_reason():
    reasons = [DEDUPS[name].reason for name in DEDUPS]
    assert len(set(reasons)) == len(reasons)


# model

TINY = {
    "segments": [8, 16],
    "dilations": [1, 2],
    "block": 16,
    "num_buckets": 4,
    "chunk": 4,
    "segment": 8,
    "memory": 8,
    "compressed": 6,
    "ratio": 2,
    "rank": 8,
    "latent_dim": 16,
    "rope_dim": 8,
}
"""Sizes of mixers' options, where they have such fields, at which 48 tokens are many."""


def tiny_model(name: str):
    """Two layers, the second of mixer `name`; the first, too, unless it lives on another's keys."""
    cls = MIXERS[name]
    entry = {"kind": name, **{field: value for field, value in TINY.items() if field in cls.model_fields}}
    if "window" in cls.model_fields and cls.model_fields["window"].is_required():
        entry["window"] = 6
    mixers = ["attention", entry] if cls.reuses_kv else [entry]
    sizes = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48, "max_seq_len": 96}
    return build(Shape.read({**sizes, "num_layers": 2, "mixers": mixers}).config(20), seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MIXERS])
def test_a_mixer_learns(name):
    model = tiny_model(name)
    tokens = np.stack([(np.arange(49) * step + step) % 20 for step in (1, 3, 7, 9)])
    batch = Batch(tokens[:, :-1], tokens[:, 1:], np.zeros((4, 48), np.int32))
    trainer = Trainer(model, steps=30, schedule=SCHEDULES.read("cosine"), optimizer=AdamW(lr=1e-2))
    losses = [trainer.step(batch).loss for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0], losses[:: len(losses) - 1]


@pytest.mark.parametrize("name", [*MIXERS])
def test_a_mixer_says_its_cost(name, tmp_path):
    model = tiny_model(name)
    mixer = model.config.layers[1].mixer
    assert mixer.complexity.startswith("O(") and mixer.paper.startswith("arXiv:")
    assert model.config.num_params == sum(parameter.numel() for parameter in model.parameters())
    dims = model.config.dims()
    assert dims.layers[1].mixing.mixing_flops(48) > 0 and dims.layers[1].widths.total > 0
    assert dims.state_values(47) > 0
    assert pickle.loads(pickle.dumps(dims)) == dims
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that transformers cannot read it
        hone.save(model, tmp_path)
    tokens = torch.arange(30)[None] % 20
    assert torch.equal(hone.load(tmp_path)(tokens), model(tokens))


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", [*MIXERS])
def test_a_mixer_writes_what_whole_passes_would_or_says_that_it_cannot(name):
    model = tiny_model(name).double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(10)  # so that what is most likely is so by far
    prompt = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    if not model.config.layers[1].mixer.causal:
        with pytest.raises(SpecError, match=f"'{name}'"):
            generate(model, prompt, 1)
        return
    tokens = prompt
    for _ in range(40):
        tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(generate(model, prompt, 40), tokens)
    carry: dict = {}
    for place in range(45):
        model.hidden(tokens[:, place : place + 1], Incremental(tokens[:, place : place + 1], place, carry))
    assert numbers(carry) / 2 == pytest.approx(model.config.dims().state_values(45), rel=0.2)


def numbers(state) -> int:
    """Numbers in the tensors of nested containers."""
    if isinstance(state, torch.Tensor):
        return state.numel()
    values = state.values() if isinstance(state, dict) else state if isinstance(state, (tuple, list)) else ()
    return sum(map(numbers, values))


# train


@pytest.mark.parametrize("name", [*SCHEDULES])
@pytest.mark.parametrize("steps", [1, 2, 7, 100])
def test_a_schedule_stays_between_nothing_and_the_peak(name, steps):
    schedule = SCHEDULES.read(name)
    shares = [schedule.share(step, steps) for step in range(steps)]
    assert all(0 <= share <= 1 and math.isfinite(share) for share in shares)
    assert max(shares) > 0.5
    if steps == 100:
        assert shares[-1] < 0.2, "the learning rate never came down"


@pytest.mark.parametrize("name", [*ACTIVATION_CHECKPOINTINGS])
@pytest.mark.parametrize("num_layers", [1, 2, 5, 16, 33])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_remat_policy_covers_every_layer_once(name, num_layers, share):
    """Whatever part of the activations fits the memory."""
    sizes = Sizes.alike(num_layers, max(share * num_layers, 2.0))
    segments = ACTIVATION_CHECKPOINTINGS.read(name).segments(num_layers, sizes)
    covered = [layer for segment in segments for layer in range(segment.start, segment.stop)]
    assert covered == list(range(num_layers))


@pytest.mark.parametrize("name", [*OBJECTIVES])
def test_an_objective_ignores_what_it_is_told_to_and_has_a_gradient(name, tiny_llama):
    model, objective = hone.load(tiny_llama), OBJECTIVES.read(name)
    tokens = torch.arange(24).reshape(2, 12)
    targets = tokens.roll(-1, 1)
    targets[:, -4:] = -100
    from hone.model.context import Packed

    trained = model
    if objective.trains_heads:
        from hone.train.objectives.draft_heads.fits import with_heads

        trained = with_heads(objective, model, None, 0).drafter
    context = Packed((torch.arange(12) // 5).expand(2, 12))  # for a preference the first two are a pair
    context.values = torch.ones(2, 12, 4)  # of a batch that is prepared
    teacher = hone.load(tiny_llama) if objective.from_teacher else None
    taught = teacher.hidden(tokens, context) if teacher is not None else None
    context.taps = context.memo["taps"] = dict.fromkeys(objective.own_taps(len(model.layers)))
    x = model.hidden(tokens, context)
    loss = objective.total_in(model, x, targets, context, teacher, taught)
    changed = x.detach().clone()
    changed[:, -4:] += 1.0
    other = None if taught is None else torch.cat([taught[:, :-4], taught[:, -4:] - 1.0], 1)
    assert torch.allclose(objective.total_in(model, changed, targets, context, teacher, other), loss, rtol=1e-5)
    loss.backward()
    assert all(
        parameter.grad is not None and torch.isfinite(parameter.grad).all() for parameter in trained.parameters()
    )


# serve


@pytest.mark.parametrize("name", [*DRAFTERS])
def test_a_drafter_never_changes_greedy_text(name, tiny_llama, tmp_path):
    params = hone.SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    prompts = ["the quick brown fox", "the cat sat on the mat and the cat", "a"]
    plain = hone.Engine(tiny_llama).generate(prompts, params)
    draft = tiny_llama if "draft" in DRAFTERS[name].needs else None
    if "heads" in DRAFTERS[name].needs:
        from hone.train.objectives.draft_heads.fits import with_heads

        draft, objective, model = tmp_path / name, OBJECTIVES.read(name), hone.load(tiny_llama)
        objective.save(
            with_heads(objective, model, None, 0).drafter, model.config, draft, str(tiny_llama), torch.float32
        )
    from hone.serve.spec import EngineSpec

    engine = hone.Engine(tiny_llama, EngineSpec.read({"drafter": name}), draft=draft)
    assert [one.tokens for one in engine.generate(prompts, params)] == [one.tokens for one in plain]
    stats = engine.stats()
    assert stats["pages_used"] == 0 and stats["pages_free"] == stats["pages_total"]
