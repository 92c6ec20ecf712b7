"""The report as Markdown: the figures as tables, for readers without HTML."""

from __future__ import annotations

from collections.abc import Sequence

from hone.report import charts, compare, origin, units
from hone.report.chain import headlines
from hone.report.collect import Line, Row
from hone.report.findings import findings
from hone.report.green import green
from hone.report.sections.curation import Curation
from hone.report.sections.data import data_set
from hone.report.sections.effects import Effects, TrialTables
from hone.report.sections.mixtures import Mixtures
from hone.report.sections.prices import Prices
from hone.report.sections.quality import Quality
from hone.report.sections.serving import Serving

_EFFECT = (
    "Artifacts that differ only in their seed are one arm; each is compared with the first of its kind in the recipe. "
    "The interval is of the difference of their means (Welch's): where it contains 0, these seeds show no difference."
)

_PAIRED = (
    "Runs of one arm answer different requests, runs of one seed in different arms the same ones, one soon after the other. "
    "The interval is of the mean difference of runs of one seed (paired t): where it contains 0, these runs show no difference."
)
_ONCE = (
    "Each of these ran once. A second run of the same thing differs too: `repeats: 3` in the recipe runs the arms in turn "
    "and says which differences are larger than that."
)


def render(line: Line) -> str:
    """The report of `line` as Markdown text."""
    parts = [f"# {escape(line.name)}", "", escape(origin.summary(line)), ""]
    parts += [f"- **{escape(finding.value)}** {escape(finding.text)}" for finding in findings(line)]
    if line.problems:
        parts += ["", "## Problems", ""]
        parts += [f"- {code(name)}: {escape(what)}" for name, what in line.problems]
    parts += ["", "## The chain", *_chain(line)]
    parts += (
        _effects(line)
        + _experts(line)
        + _quality(line)
        + _speed(line)
        + _serving(line)
        + _prices(line)
        + _estimates(line)
        + _mixtures(line)
        + _data(line)
        + _repeat(line)
        + _machines(line)
    )
    return "\n".join(parts) + "\n"


def escape(text: str) -> str:
    """Plain text with Markdown and HTML escaped, on one line."""
    text = " ".join(text.split())
    for char in "\\`*_[]|~":
        text = text.replace(char, f"\\{char}")
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def code(text: str) -> str:
    """A code span of any `text`."""
    text = " ".join(text.split()).replace("|", "¦")
    longest = max((len(run) for run in "".join(c if c == "`" else " " for c in text).split()), default=0)
    fence, pad = "`" * (longest + 1), " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 1) -> list[str]:
    """A Markdown table; columns from index `numbers` on are right-aligned."""
    bars = ["---" if index < numbers else "---:" for index in range(len(head))]
    return ["", *("| " + " | ".join(cells) + " |" for cells in (head, bars, *rows)), ""]


def _value(row: Row, name: str) -> str:
    figure = row.figures.get(name)
    return units.show(figure.value, figure.unit, name) if figure is not None and figure.value is not None else "-"


def _chain(line: Line) -> list[str]:
    rows = [
        [
            code(row.id),
            escape(", ".join(f"{parent.role} {parent.name}" for parent in row.parents)) or "-",
            escape(", ".join(headlines(row))),
        ]
        for row in line.rows
    ]
    return table(("artifact", "made from", "figures"), rows, numbers=3)


def _effects(line: Line) -> list[str]:
    found = Effects.of(line)
    return ["## Effect over seeds", "", _EFFECT, "", *_trials(found.trials)] if found else []


def _trials(found: list[TrialTables]) -> list[str]:
    """The tables of trials, with the artifacts of each arm below them."""
    parts: list[str] = []
    head = ("arm", "verdict", "seeds", "mean", "standard deviation", "difference", "95 % interval")
    for entry in found:
        for table_ in (entry.main, *entry.others):
            title = ", ".join(filter(None, (units.label(table_.name), table_.unit, table_.better)))
            rows = [
                [
                    escape(row.label),
                    escape(row.verdict),
                    str(row.n),
                    row.mean,
                    row.stdev or "-",
                    row.difference or "-",
                    row.interval or "-",
                ]
                for row in table_.rows
            ]
            parts += [f"### {escape(entry.trial.title)}: {escape(title)}", *table(head, rows, numbers=2)]
        parts += [
            f"- {escape(row.label)}: {', '.join(code(id) for id, *_ in row.artifacts)}" for row in entry.main.rows
        ]
        parts.append("")
    return parts


def _experts(line: Line) -> list[str]:
    """How busy the experts of each training are."""
    parts: list[str] = []
    for row in line.of("train"):
        loads = charts.expert_loads(row)
        cells = [
            [escape(layer), str(len(one)), f"{charts.busiest(one):.2f} x", f"{min(one) * len(one) / sum(one):.2f} x"]
            for layer, one in loads.items()
        ]
        if cells:
            parts += ["", f"## Experts of {escape(row.id)}", "", escape(charts.experts_words(row)) + "."]
            parts += table(("layer", "experts", "busiest / mean", "idlest / mean"), cells)
    return parts


def _quality(line: Line) -> list[str]:
    found = Quality.of(line)
    if not found:
        return []
    metric = found.metric
    best = {point.id for point in compare.quality_points(line)[0] if point.on_line}
    rows = [
        [
            escape(entry.label) + (" ●" if entry.row.id in best else ""),
            escape(entry.words),
            entry.tokens or "-",
            entry.bits or "-",
            units.show_bytes(entry.num_bytes),
            entry.smaller or "-",
            entry.kl or "-",
            _value(entry.row, metric),
            entry.change.words if entry.change else "-",
        ]
        for entry in found.rows
    ]
    few = []
    if found.few:
        model, mine, bigram, why = found.few
        said = f"{escape(model)} is not trained enough for its quality to mean anything: it has a perplexity of {units.three(mine)}"
        few = [
            f"{said}, a bigram model of the same text {units.three(bigram)}.{f' It made {escape(why)}.' if why else ''}",
            "",
        ]
    head = (
        "model",
        "techniques",
        "training tokens",
        "bits per weight",
        "size",
        "smaller",
        "KL, nats/token",
        units.label(metric),
        "change",
    )
    return [
        "## Quality against size",
        "",
        *few,
        "● on the Pareto line: no other model is both smaller and better."
        + (" Better is less KL to the uncompressed model." if found.by_kl else ""),
        *table(head, rows, numbers=2),
        escape(found.note),
        "",
    ]


def _speed(line: Line) -> list[str]:
    rows = [
        [
            code(row.id),
            _value(row, "time_s"),
            _value(row, "peak_memory_bytes"),
            _value(row, "tokens_per_s"),
            _energy(row),
        ]
        for row in line.rows
    ]
    return [
        "## Time, memory, speed and energy",
        *table(("artifact", "time", "peak memory", "tokens/s", "energy"), rows),
        *_green(line),
    ]


def _green(line: Line) -> list[str]:
    """Quality for energy, of artifacts whose energy was measured."""
    rows = [
        [
            code(one.row.id),
            f"{one.kwh:.3g}",
            _number(one.token_j),
            _number(one.quality),
            _number(one.quality_per_kwh),
            _number(one.of_energy),
            _number(one.of_quality),
        ]
        for one in green(line)
    ]
    if not rows:
        return []
    head = ("artifact", "kWh", "J a token", "quality", "quality a kWh", "energy x the first", "quality x the first")
    said = "Quality is the probability of the right token, exp(-loss), or an evaluation's accuracy; the first is that of the same stage."
    return [*table(head, rows), said, ""]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _energy(row: Row) -> str:
    figure = row.figures.get("energy_j")
    if figure is None:
        return "-"
    return units.show(figure.value, figure.unit) if figure.value is not None else escape(figure.note or units.ABSENT)


def _serving(line: Line) -> list[str]:
    found = Serving.of(line)
    if not found:
        return []
    rows = [
        [
            code(entry.arm.name),
            escape(entry.model),
            *map(escape, entry.settings),
            str(len(entry.arm.rows)),
            *(escape(words) or "-" for words in entry.figures),
        ]
        for entry in found.rows
    ]
    head = ("run", "model", *map(escape, found.paths), "runs", *map(units.label, found.figures))
    note = [_PAIRED if found.trials else _ONCE, ""] if found.trials or found.alone else []
    return [
        "## Serving",
        "",
        *note,
        *_trials(found.trials),
        *table(head, rows, numbers=2 + len(found.paths)),
    ]


def _prices(line: Line) -> list[str]:
    found = Prices.of(line)
    if found is None:
        return []
    rows = []
    for bill in found.bills:
        shown = {one.name: one.shown for one in bill.figures}
        rows.append([code(bill.row.id), *(escape(shown.get(name, "-")) for name in found.names)])
    said = escape(f"Time and energy as measured; money and carbon at {found.said}.")
    return ["## Cost", "", said, *table(("artifact", *found.names), rows), *(escape(one) for one in found.unknown)]


def _estimates(line: Line) -> list[str]:
    checks = compare.checks(line)
    if not checks:
        return []
    rows = [
        [
            code(check.row.id),
            escape(units.label(check.figure.name)),
            units.show(check.figure.estimate.value, check.figure.estimate.unit, check.figure.name),
            _value(check.row, check.figure.name),
            compare.error_words(check),
        ]
        for check in checks
        if check.figure.estimate is not None
    ]
    return [
        "## Estimates and measurements",
        *table(("artifact", "figure", "estimate", "measured", "estimate over measured"), rows, numbers=2),
    ]


def _data(line: Line) -> list[str]:
    parts = []
    for row in line.of("data"):
        found = data_set(row)
        reasons = [[escape(reason.name), escape(reason.words)] for reason in found.reasons]
        parts += [
            f"## Data, kept and dropped: {code(row.id)}",
            "",
            escape(found.words),
            *(table(("step and reason", "dropped"), reasons) if reasons else [""]),
        ]
        rules = [[escape(name), escape(reason), code(keep), *sizes] for name, reason, keep, *sizes in found.rules.rows]
        if rules:
            parts += table(
                ("filter", "reason", "a document is kept if", "drops alone", "only it drops"), rules, numbers=3
            )
        parts += _more_data(found.found)
    return parts


def _more_data(found: Curation) -> list[str]:
    """Groups, scorers and evaluation examples of a data artifact."""
    parts = [f"Files of other kinds, not read: {escape(found.skipped)}.", ""] if found.skipped else []
    for groups in found.groups:
        rows = [
            [
                escape(entry.name),
                escape(", ".join(entry.far)) or "-",
                entry.documents,
                entry.dropped,
                *entry.scores,
            ]
            for entry in groups.rows
        ]
        head = ("group", "steps that drop a much larger share of it", "documents read", "dropped")
        head += tuple(f"mean {escape(score)}" for score in groups.scores)
        parts += [f"### Drop rates by {escape(groups.title)}", *table(head, rows, numbers=2)]
    if found.scorers:
        rows = [
            [
                escape(scorer.name),
                code(scorer.column),
                *(escape(words) or "-" for words in (scorer.quality, scorer.learned, scorer.dear)),
            ]
            for scorer in found.scorers
        ]
        head = ("scorer", "column", "on held-out texts", "trained on", "sent to the expensive scorer")
        parts += ["### Scores", *table(head, rows, numbers=5)]
    for step in found.contamination:
        head = (
            "evaluation set",
            "examples",
            "too short",
            "found",
            "of those searched for",
            "documents that contain any",
        )
        rows = [[escape(name), *counts] for name, *counts in step.sets]
        parts += [f"### Evaluation examples found in the text: {escape(step.name)}", *table(head, rows)]
        parts += [f"- {escape(example.name)}: {example.words}" for example in step.examples]
        parts.append("")
    return parts


def _mixtures(line: Line) -> list[str]:
    parts = []
    section = Mixtures.of(line)
    for found in section.mixtures if section else ():
        rows = [
            [
                escape(share.source),
                escape(share.reason),
                *(
                    words or "-"
                    for words in (share.tokens, share.wanted, share.weight, share.epochs, share.utility, share.loss)
                ),
            ]
            for share in found.shares
        ]
        head = ("source", "why", "tokens", "wanted", "given", "epochs", "utility", "validation loss")
        runs = ", ".join(code(run) for run in found.runs)
        parts += [f"## Mixture {escape(found.kind)}: {runs}", *table(head, rows, numbers=2)]
    return parts


def _repeat(line: Line) -> list[str]:
    return [
        "## Repeat a stage",
        "",
        *(f"- {code(row.id)}: {code(row.command) if row.command else 'no command noted'}" for row in line.rows),
        "",
    ]


def _machines(line: Line) -> list[str]:
    parts = ["## Machine and versions", ""]
    for entry in origin.machines(line):
        parts += [
            f"- {escape(entry.title)}: " + escape("; ".join(f"{name} {words}".strip() for name, words in entry.details))
        ]
    return parts
