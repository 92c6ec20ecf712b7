"""Arms over seeds: what is grouped, what is set against what, under which label, and what the page says of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from scipy.stats import ttest_ind, ttest_rel

from hone.report import markdown, page, write
from hone.report.arms import Effect, Trial, trials
from hone.report.chain import layout
from hone.report.collect import collect
from hone.report.findings import findings
from tests.report.lines import LineMaker
from tests.report.markup import Walk

RANDOM = {"kind": "random"}
STAGED = {"kind": "staged", "signal": "flesch", "num_stages": 5}
LOSSES = {"random": (4.335, 4.267, 4.209), "staged": (4.064, 4.137, 4.179), "warmup": (4.59, 4.42, 4.38)}


class Maker(LineMaker):
    """A line of any artifacts, one call each."""

    def make(self, kind: str, name: str, spec: dict[str, Any], figures: dict[str, Any], **parents: str) -> str:
        """An artifact with `figures`: name to a value, or to (value, unit, note); the parents' roles may have '_' for '.'."""
        draft = self.begin(kind, name, spec, **{role.replace("_", "."): parent for role, parent in parents.items()})
        for figure, value in figures.items():
            value, unit, note = value if isinstance(value, tuple) else (value, "nats/token", "all of val")
            draft.record(figure, value, unit, note=note)
        self.made[draft.target.name] = draft.commit()
        return draft.target.name

    def seeds(self, arm: str, spec: dict[str, Any], values: tuple, figure: str = "val_loss", **parents: str) -> None:
        """A training of every value, with seeds from 0."""
        for seed, value in enumerate(values):
            figures = {figure: value, "model_bytes": (1e6, "B", "")}
            self.make("train", f"{arm}-{seed}", {**spec, "steps": 600, "seed": seed}, figures, **parents)


def curricula(folder: Path, **losses: tuple) -> Maker:
    """Random order, stages and a warm-up on one data artifact; losses by arm, those of LOSSES unless given."""
    line = Maker(folder)
    line.make("data", "text", {"source": "python"}, {})
    specs = {"random": RANDOM, "staged": STAGED, "warmup": {**STAGED, "kind": "warmup_then_random", "num_stages": None}}
    for arm, values in (LOSSES | losses).items():
        line.seeds(arm, {"curriculum": specs[arm]}, values, data="data-text")
    return line


def only(found: list[Trial]) -> Trial:
    (trial,) = found
    return trial


def by_label(trial: Trial, name: str) -> dict[str, Effect]:
    return {effect.arm.label: effect for effect in trial.effects(name)}


def test_arms_are_grouped_labelled_and_set_against_the_first(tmp_path: Path) -> None:
    trial = only(trials(collect(curricula(tmp_path / "line").folder)))
    assert (trial.kind, trial.name, trial.figures) == ("train", "data-text", ["val_loss"])
    assert [[row.id for row in arm.rows] for arm in trial.arms] == [
        [f"train-{arm}-{seed}" for seed in range(3)] for arm in ("random", "staged", "warmup")
    ]
    assert [arm.short for arm in trial.arms] == ["random", "staged", "warmup then random"]
    found = by_label(trial, "val_loss")
    for label, arm in (("curriculum: staged", "staged"), ("curriculum: warmup then random", "warmup")):
        interval = ttest_ind(LOSSES[arm], LOSSES["random"], equal_var=False).confidence_interval()
        difference = found[label].difference
        assert difference is not None
        assert difference.by - difference.half == pytest.approx(interval.low)
        assert difference.by + difference.half == pytest.approx(interval.high)
    assert found["curriculum: random"].difference is None and found["curriculum: random"].verdict == "baseline"
    assert found["curriculum: staged"].verdict == "better: 3.4 % lower"
    assert found["curriculum: warmup then random"].verdict == "no difference that 3 seeds can show"


def test_the_first_arm_is_the_recipes_first(tmp_path: Path) -> None:
    folder = curricula(tmp_path / "line").folder
    stages = [
        {"stage": "train", "name": f"{arm}-{seed}"} for arm in ("warmup", "staged", "random") for seed in range(3)
    ]
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"line": "line", "stages": stages}))
    assert [arm.short for arm in only(trials(collect(folder))).arms] == ["warmup then random", "staged", "random"]
    for broken in ("- 1", "stages: 7", "a: [", "stages: [7, {stage: train}]"):
        (folder / "recipe.yaml").write_text(broken)
        assert only(trials(collect(folder))).arms[0].short == "random"


def curation(folder: Path) -> Maker:
    """Models of two data artifacts, three seeds each, every one judged on the text of both."""
    line = Maker(folder)
    for name in ("raw", "curated"):
        line.make("data", name, {"source": "python", "filters": [name]}, {})
        line.seeds(name, {}, (4.0, 4.1, 4.2), data=f"data-{name}")
    for on in ("raw", "curated"):
        for arm, base in (("raw", 2.0), ("curated", 1.9)):
            for seed in range(3):
                figures = {"bits_per_byte": (base + seed / 100, "bits/byte", "window 512")}
                parents = {"model": f"train-{arm}-{seed}", "data": f"data-{on}"}
                line.make("eval", f"on-{on}-{arm}-{seed}", {"split": "val"}, figures, **parents)
    return line


def test_evaluations_of_seeds_are_arms_named_by_their_models(tmp_path: Path) -> None:
    found = trials(collect(curation(tmp_path / "line").folder))
    assert [(trial.kind, trial.name, len(trial.arms)) for trial in found] == [
        ("eval", "data-raw", 2),
        ("eval", "data-curated", 2),
        ("train", "data-raw", 1),
        ("train", "data-curated", 1),
    ]
    assert {trial.title for trial in found[:2]} == {"Evaluated on data-raw", "Evaluated on data-curated"}
    for trial in found[:2]:
        assert [arm.label for arm in trial.arms] == ["data: data-raw", "data: data-curated"]
        assert by_label(trial, "bits_per_byte")["data: data-curated"].verdict == "better: 5.0 % lower"
    # A loss on one's own held-out text says nothing against one on another's.
    assert all(effect.difference is None for trial in found[2:] for effect in trial.effects("val_loss"))
    assert [arm.label for trial in found[2:] for arm in trial.arms] == ["train-raw", "train-curated"]


def test_sources_that_are_mixed_are_one_field(tmp_path: Path) -> None:
    line = Maker(tmp_path / "line")
    for name in ("base", "hard", "plain"):
        line.make("data", name, {"source": name}, {})
    line.seeds("control", {"mixture": None}, (1.0, 1.1), data="data-base")
    for name in ("hard", "plain"):
        mixed = {"data_base": "data-base", "data_candidate": f"data-{name}"}
        line.seeds(name, {"mixture": {"kind": "fixed", "weights": {"base": 0.7}}}, (1.0, 1.2), **mixed)
    for arm in ("control", "hard", "plain"):
        for seed in range(2):
            figures = {"perplexity": 20.0 + seed}
            line.make("eval", f"{arm}-{seed}", {}, figures, model=f"train-{arm}-{seed}", data="data-base")
    trial = trials(collect(line.folder))[0]
    assert [arm.label for arm in trial.arms] == [
        "mixture: none, data: data-base",
        "mixture: fixed, data: data-base + data-hard",
        "mixture: fixed, data: data-base + data-plain",
    ]


def test_labels_say_as_much_as_tells_the_arms_apart(tmp_path: Path) -> None:
    line = Maker(tmp_path / "line")
    line.make("data", "text", {}, {})
    for name, spec in {
        "a": {"curriculum": RANDOM, "optimizer": {"kind": "adamw", "lr": 0.001}},
        "b": {"curriculum": STAGED, "optimizer": {"kind": "adamw", "lr": 0.002}},
        "c": {"curriculum": {**STAGED, "signal": "length"}, "optimizer": {"kind": "adamw", "lr": 0.002}},
    }.items():
        line.seeds(name, {**spec, "sampler": {"seed": 3}}, (1.0, 2.0), data="data-text")
    trial = only(trials(collect(line.folder)))
    assert [arm.label for arm in trial.arms] == [
        "curriculum: random, optimizer lr: 0.001",
        "curriculum: staged (signal flesch), optimizer lr: 0.002",
        "curriculum: staged (signal length), optimizer lr: 0.002",
    ]


def test_many_fields_are_counted_not_listed(tmp_path: Path) -> None:
    line = Maker(tmp_path / "line")
    for name, value in (("a", 1), ("b", 2)):
        line.seeds(name, {f"field_{number}": value for number in range(5)}, (1.0, 2.0))
    label = only(trials(collect(line.folder))).arms[1].label
    assert label == "field 0: 2, field 1: 2, field 2: 2 and 2 more fields"


def test_compressions_of_each_seeds_model_are_arms(tmp_path: Path) -> None:
    line = Maker(tmp_path / "line")
    line.seeds("base", {}, (1.0, 2.0, 3.0))
    for bits in (8, 4):
        for seed in range(3):
            spec = {"steps": [{"slot": "quantizer", "kind": "rtn", "bits": bits}]}
            figures = {"relative_output_error": (0.01 * seed + bits / 100, "fraction", "")}
            line.make("compress", f"int{bits}-{seed}", spec, figures, model=f"train-base-{seed}")
    trial = next(trial for trial in trials(collect(line.folder)) if trial.kind == "compress")
    assert [arm.label for arm in trial.arms] == ["steps: rtn 8-bit", "steps: rtn 4-bit"]
    text = page.render(collect(line.folder))
    assert '<td class="n">-4.00</td>' in text, "fractions are shown in percent"


def test_one_seed_an_arm_shows_nothing(tmp_path: Path, whole: Path) -> None:
    line = curricula(tmp_path / "line", random=(4.3,), staged=(4.1,), warmup=(4.5,))
    for folder in (line.folder, whole):
        seen = collect(folder)
        assert trials(seen) == [] and write.rows(seen)["effects"] == []
        assert "Effect over seeds" not in page.render(seen) + markdown.render(seen)
        assert "effect" not in {finding.about for finding in findings(seen)}


def test_the_same_artifact_twice_is_one_seed(tmp_path: Path) -> None:
    line = Maker(tmp_path / "line")
    for name in ("once", "again"):
        line.make("train", name, {"seed": 0}, {"val_loss": 1.0})
    assert trials(collect(line.folder)) == []


def test_missing_figures_and_numbers_that_are_none(tmp_path: Path) -> None:
    nan = float("nan")
    line = curricula(tmp_path / "line", staged=(4.1, nan, None), warmup=(nan, nan, None))
    trial = only(trials(collect(line.folder)))
    found = by_label(trial, "val_loss")
    assert found["curriculum: staged"].values == (4.1,) and found["curriculum: staged"].difference is None
    assert found["curriculum: staged"].verdict == "one value of this arm is too few"
    assert set(found) == {"curriculum: random", "curriculum: staged"}
    walk = Walk(page.render(collect(line.folder)))
    assert "one value of this arm is too few" in walk.text and "nan" not in walk.text.split()
    json.dumps(write.rows(collect(line.folder)), allow_nan=False)


def test_a_baseline_without_the_figure(tmp_path: Path) -> None:
    line = curricula(tmp_path / "line", random=(None, None, None))
    found = by_label(only(trials(collect(line.folder))), "val_loss")
    assert {effect.verdict for effect in found.values()} == {"the baseline has no such figure"}
    Walk(page.render(collect(line.folder)))


def test_figures_taken_under_other_conditions_are_not_compared(tmp_path: Path) -> None:
    other = tuple((value, "nats/token", "first 64 rows of val") for value in LOSSES["staged"])
    found = by_label(only(trials(collect(curricula(tmp_path / "line", staged=other).folder))), "val_loss")
    assert found["curriculum: staged"].verdict == "measured under other conditions"
    assert found["curriculum: staged"].difference is None


def test_equal_values_have_no_interval(tmp_path: Path) -> None:
    line = curricula(tmp_path / "line", random=(4.0, 4.0), staged=(4.0, 4.0), warmup=(5.0, 5.0))
    found = by_label(only(trials(collect(line.folder))), "val_loss")
    assert found["curriculum: staged"].verdict == "no difference that 2 seeds can show"
    assert found["curriculum: warmup then random"].verdict == "worse: 25 % higher"
    Walk(page.render(collect(line.folder)))


def test_a_figure_of_unknown_worth_is_only_higher_or_lower(tmp_path: Path) -> None:
    line = Maker(tmp_path / "line")
    for arm, base in (("a", 1.0), ("b", 3.0)):
        for seed in range(3):
            figures = {"novelty": base + seed / 10, "val_loss": 2.0 + seed, "peak_memory_bytes": (seed * 1e6, "B", "")}
            line.make("train", f"{arm}-{seed}", {"arm": arm, "seed": seed}, figures)
    trial = only(trials(collect(line.folder)))
    assert trial.figures == ["val_loss", "novelty"], "judged figures first; memory is of the whole process"
    assert by_label(trial, "novelty")["arm: b"].verdict == "2.82x higher"


def test_arms_of_unlike_numbers_of_seeds(tmp_path: Path) -> None:
    found = by_label(only(trials(collect(curricula(tmp_path / "line", staged=(4.3, 4.2)).folder))), "val_loss")
    assert found["curriculum: staged"].verdict == "no difference that these seeds can show"


def test_page_markdown_json_and_findings_say_the_same(tmp_path: Path) -> None:
    line = collect(curricula(tmp_path / "line").folder)
    walk = Walk(page.render(line))
    section = walk.text[walk.text.index("Artifacts that differ only in") :]
    assert "Trained on data-text: validation loss, lower is better" in section
    cells = "curriculum: staged better: 3.4 % lower 3 4.1267 0.0582 -0.1437 -0.2816 to -0.0058 train-staged- 0 , 1 , 2"
    assert cells in section
    labels = [value for name, value in walk.attributes if name == "aria-label"]
    assert "validation loss of 3 arms over their seeds, with 95 % intervals" in labels
    assert {f"train-staged-{seed}" for seed in range(3)} <= set(labels)
    said = markdown.render(line)
    assert "| curriculum: staged | better: 3.4 % lower | 3 | 4.1267 | 0.0582 | -0.1437 | -0.2816 to -0.0058 |" in said
    effect = write.rows(line)["effects"][0]["figures"]["val_loss"][1]
    assert effect["difference"] == pytest.approx(-0.1437, abs=5e-5) and effect["values"] == list(LOSSES["staged"])
    first = findings(line)[0]
    assert (first.value, first.about) == ("-3.4 %", "effect")
    assert first.text == "curriculum: staged against random: validation loss -0.144 ± 0.138 nats/token, 3 seeds"


def test_without_a_clear_effect_the_head_of_the_page_says_so(tmp_path: Path) -> None:
    found = findings(collect(curricula(tmp_path / "line", staged=(4.3, 4.25, 4.2)).folder))[0]
    assert found.value == "no clear effect" and found.text.startswith("curriculum: staged against random")


RATES = {"plain": (1000.0, 1400.0, 800.0), "static": (940.0, 1310.0, 760.0), "no-prefix": (1010.0, 1380.0, 805.0)}
"""Tokens/s of three runs each on a machine whose speed changes from round to round."""


def served(folder: Path, **rates: tuple) -> Path:
    """Three serving arms, a run of each seed; rates by arm, those of RATES unless given."""
    line = Maker(folder)
    line.make("data", "text", {"source": "python"}, {})
    line.make("train", "base", {"steps": 3}, {"num_params": (1e6, "parameters", "")}, data="data-text")
    engines: dict[str, dict] = {
        "plain": {},
        "static": {"batching": "static"},
        "no-prefix": {"enable_prefix_caching": False},
    }
    for arm, engine in engines.items():
        settings = {"batching": "continuous", "enable_prefix_caching": True} | engine
        values = (RATES | rates)[arm]
        for seed, rate in enumerate(values):
            spec = {"num_requests": 32, "engine": settings, "seed": seed}
            figures = {"tokens_per_s": (rate, "tokens/s", ""), "ttft_p50_s": (30 / rate, "s", "")}
            figures["ttft_p99_s"] = (90 / rate, "s", "")
            name = f"{arm}-{seed}" if len(values) > 1 else arm
            line.make("serve", name, spec, figures, model="train-base", data="data-text")
    return line.folder


def test_serving_runs_are_compared_in_pairs_of_one_seed(tmp_path: Path) -> None:
    trial = only(trials(collect(served(tmp_path / "line"))))
    assert trial.kind == "serve" and [arm.name for arm in trial.arms] == ["plain", "static", "no-prefix"]
    effects = {effect.arm.name: effect for effect in trial.effects("tokens_per_s")}
    interval = ttest_rel(RATES["static"], RATES["plain"]).confidence_interval()
    difference = effects["static"].difference
    assert difference is not None
    assert difference.by - difference.half == pytest.approx(interval.low)
    assert difference.by + difference.half == pytest.approx(interval.high)
    assert effects["static"].arm.change_from(trial.arms[0]) == "batching static"
    assert effects["no-prefix"].verdict == "no difference that 3 runs can show"


def test_findings_have_clear_differences_only(tmp_path: Path) -> None:
    def head(name: str, **rates: tuple) -> Any:
        line = collect(served(tmp_path / name, **rates))
        return next(finding for finding in findings(line) if finding.about == "serving")

    clear = head("clear", static=(500.0, 702.0, 399.0))
    assert clear.value == "2.00x tokens/s"
    assert clear.text == "serving plain instead of static (batching static)"
    noise = head("noise", static=(700.0, 1700.0, 900.0), **{"no-prefix": (1300.0, 1000.0, 700.0)})
    assert (noise.value, noise.text) == ("1,067 tokens/s", "generated by plain, mean of 3 runs")
    once = head("once", plain=(1000.0,), static=(500.0,), **{"no-prefix": (1010.0,)})
    assert (once.value, once.text) == ("1,000 tokens/s", "generated by plain"), "one run each says nothing"


def test_repeated_runs_are_one_box_and_one_row(tmp_path: Path) -> None:
    line = collect(served(tmp_path / "line"))
    boxes = [node.name for node in layout(line) if node.kind == "serve"]
    assert boxes == ["plain x3", "static x3", "no-prefix x3"]
    walk = Walk(page.render(line))
    assert "static: batching static" in walk.text
    assert "1,067 ± 306" in walk.text and "| 1,067 ± 306 |" in markdown.render(line)


def test_runs_that_were_not_repeated_are_said_to_be_one_each(tmp_path: Path) -> None:
    line = collect(served(tmp_path / "line", **{arm: rates[:1] for arm, rates in RATES.items()}))
    assert trials(line) == []
    for text in (page.render(line), markdown.render(line)):
        assert "Each of these ran once" in text and "0.94x" not in text


def test_charts_stay_inside(tmp_path: Path) -> None:
    text = page.render(collect(curricula(tmp_path / "line", warmup=(4.2, 9.9)).folder))
    drawn = [svg for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL) if "arms over their seeds" in svg]
    assert len(drawn) == 2, "for wide and for narrow screens"
    for svg in drawn:
        width = float(re.search(r'viewBox="0 0 (\S+)', svg).group(1))  # type: ignore[union-attr]
        places = [float(x) for x in re.findall(r' (?:x1|x2|cx|x)="([^"]+)"', svg)]
        assert min(places) >= 0 and max(places) <= width


def test_parents_in_a_circle_end(tmp_path: Path) -> None:
    line = curricula(tmp_path / "line")
    path = line.folder / "data-text" / "hone.json"
    manifest = json.loads(path.read_text())
    other = line.made["train-random-0"]
    manifest["parents"] = [{"role": "model", "name": "train-random-0", "fingerprint": other.fingerprint}]
    path.write_text(json.dumps(manifest))
    Walk(page.render(collect(line.folder)))
