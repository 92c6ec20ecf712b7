"""Arms over seeds: artifacts that differ only in their seed, grouped and compared with confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean, stdev
from typing import Any

from hone.base.interval import Difference, half_width, paired, welch
from hone.base.spec import fingerprint
from hone.report import units
from hone.report.collect import Line, Row
from hone.report.compare import short

LESS = {
    "bits_per_byte", "perplexity", "loss", "val_loss", "val_bits_per_byte", "kl_to_reference",
    "relative_output_error", "time_s", "joules_per_token", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s",
}  # fmt: skip
"""Figures of which less is better; so are all that start with 'val_loss_'. The last training loss is not among them, because
it depends on the last batch of text."""
MORE = {
    "top1_agreement", "accuracy", "tokens_per_s", "requests_per_s", "mfu", "acceptance_rate", "prefix_hit_rate",
}  # fmt: skip
"""Figures of which more is better."""
QUALITY = (
    "val_loss", "bits_per_byte", "perplexity", "loss", "val_bits_per_byte", "kl_to_reference", "top1_agreement",
    "accuracy", "relative_output_error", "tokens_per_s",
)  # fmt: skip
"""What a trial compares: the first of these figures that its arms have."""
_SPEED = {
    "time_s",
    "joules_per_token",
    "ttft_p50_s",
    "ttft_p99_s",
    "tpot_p50_s",
    "tokens_per_s",
    "requests_per_s",
    "mfu",
}
_MOST_FIELDS = 3


@dataclass(frozen=True)
class Arm:
    """Artifacts equal but for their seed, in the line's order. `fields` are (field, words) in which the arms of a trial differ."""

    rows: tuple[Row, ...]
    fields: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """The common part of the artifacts' names: 'plain' of plain-0, plain-1 and plain-2."""
        if len(self.rows) == 1:
            return self.rows[0].name
        return stem([row.name for row in self.rows]).rstrip("-_.") or self.rows[0].name

    @property
    def label(self) -> str:
        """'curriculum: staged'; the common part of the artifacts' names when the arms differ in no field."""
        if not self.fields:
            return stem([row.id for row in self.rows]).rstrip("-_.") or self.rows[0].id
        words = [f"{field}: {value}" for field, value in self.fields[:_MOST_FIELDS]]
        rest = len(self.fields) - _MOST_FIELDS
        return ", ".join(words) + (f" and {rest} more field{'s' if rest > 1 else ''}" if rest > 0 else "")

    @property
    def short(self) -> str:
        """The label without the fields' names: 'staged'."""
        return ", ".join(value for _, value in self.fields[:_MOST_FIELDS]) or self.label

    def change_from(self, base: Arm) -> str:
        """The settings in which this serving arm differs from `base`, with its values: 'batching static', 'model int4'."""
        before = dict(base.fields)
        words = [
            f"{field.removeprefix('engine ').removeprefix('enable ')} {value}"
            for field, value in self.fields
            if before.get(field) != value
        ]
        return ", ".join(words) or self.name

    @property
    def model(self) -> str:
        """The id of the model of a serving run or an evaluation; '' without one."""
        parent = self.rows[0].parent("model")
        return parent.id if parent else ""

    def values(self, name: str) -> list[float]:
        """The figure's values over the seeds that have it."""
        return [value for row in self.rows if (value := row.value(name)) is not None]

    def by_seed(self, name: str) -> dict[Any, float]:
        """The figure's value by seed, for the runs that have it."""
        return {row.spec.get("seed"): value for row in self.rows if (value := row.value(name)) is not None}

    def conditions(self, name: str) -> set[tuple[str, str]]:
        """(unit, note) of the figure, over the seeds, which must be equal for values to be compared."""
        return {
            (row.figures[name].unit, "" if name in _SPEED else row.figures[name].note)
            for row in self.rows
            if row.value(name) is not None
        }


@dataclass(frozen=True)
class Effect:
    """One figure of one arm, and its difference from the baseline's; `difference` is None for the baseline, and where the two
    cannot be compared, which `verdict` explains."""

    arm: Arm
    values: tuple[float, ...]
    mean: float
    stdev: float | None
    half: float | None
    difference: Difference | None
    verdict: str


@dataclass(frozen=True)
class Trial:
    """Arms of one stage that were evaluated alike; the first is the baseline. `name` is the data, where there are several."""

    kind: str
    name: str
    arms: tuple[Arm, ...]

    @property
    def title(self) -> str:
        """A heading: 'Evaluated on data-text'."""
        words = {
            "eval": "Evaluated",
            "train": "Trained",
            "compress": "Compressed",
            "serve": "Served",
            "data": "Curated",
        }
        return " on ".join([words.get(self.kind, units.first_upper(self.kind)), *([self.name] if self.name else [])])

    @property
    def figures(self) -> list[str]:
        """Figures with two or more seeds in some arm that measure quality or vary with the seed; the main one first."""
        names = dict.fromkeys(name for arm in self.arms for row in arm.rows for name in row.figures)
        found = [name for name in names if any(len(arm.values(name)) > 1 for arm in self.arms) and self._tells(name)]
        base = self.arms[0]
        return sorted(
            found, key=lambda name: (not base.values(name), QUALITY.index(name) if name in QUALITY else len(QUALITY))
        )

    def _tells(self, name: str) -> bool:
        if name in QUALITY or name.startswith("val_loss_"):
            return True
        if name.endswith(("memory_bytes", "growth_bytes")) or name == "energy_j":
            return False  # of the whole process, including earlier stages
        if name.startswith(("epochs_", "weight_")):
            return False  # a setting, up to one sequence
        return any(len(set(arm.values(name))) > 1 for arm in self.arms)

    def effects(self, name: str) -> list[Effect]:
        """The figure's effect for every arm that has it, the baseline's first."""
        base = self.arms[0]
        found = []
        for arm in self.arms:
            values = arm.values(name)
            if not values:
                continue
            difference, words = None, "baseline"
            if arm is not base:
                difference, words = self._against(base, arm, name)
            several = len(values) > 1
            found.append(
                Effect(
                    arm,
                    tuple(values),
                    fmean(values),
                    stdev(values) if several else None,
                    half_width(values) if several else None,
                    difference,
                    words,
                )
            )
        return found

    def _against(self, base: Arm, arm: Arm, name: str) -> tuple[Difference | None, str]:
        """(difference, verdict) of one arm; no difference where the two cannot be compared."""
        before, after = base.values(name), arm.values(name)
        for who, values in (("the baseline", before), ("this arm", after)):
            if len(values) < 2:
                return None, f"one value of {who} is too few" if values else f"{who} has no such figure"
        if len(base.conditions(name) | arm.conditions(name)) > 1:
            return None, "measured under other conditions"
        found = self._paired(base.by_seed(name), arm.by_seed(name)) or welch(before, after)
        return found, verdict(name, fmean(before), found, len(before), len(after), runs=self.kind == "serve")

    def _paired(self, before: dict[Any, float], after: dict[Any, float]) -> Difference | None:
        """The mean difference of serving runs of equal seed, which answered the same requests, one soon after the other."""
        if self.kind != "serve" or set(before) != set(after) or len(before) < 2:
            return None
        return paired([before[seed] for seed in before], [after[seed] for seed in before])


def stem(ids: Sequence[str]) -> str:
    """The longest common prefix of `ids` that is not the whole of any."""
    letters = zip(*(id[:-1] for id in ids), strict=False)
    return "".join(same[0] for same in takewhile(lambda some: len(set(some)) == 1, letters))


def verdict(name: str, base: float, found: Difference, *seeds: int, runs: bool = False) -> str:
    """A difference in words: 'better: 3.4 % lower', or that this many seeds (or runs) show none."""
    if not found.clear:
        count = seeds[0] if len(set(seeds)) == 1 else "these"
        return f"no difference that {count} {'runs' if runs else 'seeds'} can show"
    way = "higher" if found.by > 0 else "lower"
    change = _size(base, found.by) if base else ""
    good = direction(name) * found.by
    judged = "better: " if good > 0 else "worse: " if good < 0 else ""
    return f"{judged}{change} {way}" if change else f"{judged}{way}"


def _size(base: float, by: float) -> str:
    """A difference as readers compare it: '3.4 %', from half of the larger value up as a factor, '3.57x'."""
    low, high = sorted((abs(base), abs(base + by)))
    if low and high / low >= 2 and base * (base + by) > 0:
        return f"{units.three(high / low)}x"
    return units.signed_percent(abs(by) / abs(base)).lstrip("+")


def direction(name: str) -> int:
    """1 for a figure of which more is better, -1 for one of which less is, 0 for others."""
    return 1 if name in MORE else -1 if name in LESS or name.startswith("val_loss_") else 0


def serving(line: Line) -> list[Arm]:
    """The serving runs; those equal but for their seed are one arm. `fields` are the settings in which the arms differ."""
    key, groups = _grouped(line)
    arms = [rows for rows in groups.values() if rows[0].kind == "serve"]
    seeded = {name for name, group in groups.items() if len(group) > 1}
    fields = varied(line, [rows[0] for rows in arms], key, seeded) if arms else {}
    return [
        Arm(tuple(rows), tuple((field, words[place]) for field, words in fields.items()))
        for place, rows in enumerate(arms)
    ]


def _grouped(line: Line) -> tuple[Callable[[Row], str], dict[str, list[Row]]]:
    """(signature of a row, rows by signature): rows of equal signature differ only in their seed."""
    key = _signatures(line)
    groups: dict[str, list[Row]] = {}
    for row in line.rows:
        group = groups.setdefault(key(row), [])
        if all(other.fingerprint != row.fingerprint for other in group):
            group.append(row)
    return key, groups


def trials(line: Line) -> list[Trial]:
    """Every comparison of arms over seeds in the line, in its order; those of a single arm last.

    An arm is two or more artifacts of one stage whose specs are equal but for `seed`, and whose parents are equal or arms
    over seeds themselves. Arms are compared when they were evaluated on the same data: a training's held-out loss on
    other data is another quantity.
    """
    key, groups = _grouped(line)
    seeded = {name for name, group in groups.items() if len(group) > 1}
    judged: dict[str, list[list[Row]]] = {}
    for name, group in groups.items():
        if name in seeded:
            data = sorted((parent.role, _parent_key(line, key, parent)) for parent in _data(group[0]))
            what = _plain(_without_seeds(group[0].spec)) if group[0].kind == "eval" else None
            judged.setdefault(fingerprint([group[0].kind, data, what]), []).append(group)
    found = []
    for arms in judged.values():
        fields = varied(line, [rows[0] for rows in arms], key, seeded)
        on = " + ".join(_name(line, parent.id) for parent in _data(arms[0][0]))
        made = tuple(
            Arm(tuple(rows), tuple((field, words[place]) for field, words in fields.items()))
            for place, rows in enumerate(arms)
        )
        found.append(Trial(arms[0][0].kind, on, made))
    return sorted((trial for trial in found if trial.figures), key=lambda trial: len(trial.arms) == 1)


def _data(row: Row) -> list[Any]:
    return [parent for parent in row.parents if parent.role == "data" or parent.role.startswith("data.")]


def _name(line: Line, id: str) -> str:
    row = line.get(id)
    return row.id if row else line.label(id)


def _signatures(line: Line) -> Callable[[Row], str]:
    """The signature of an artifact: its spec and its parents' signatures, without seeds."""
    known: dict[str, str] = {}

    def signature(row: Row) -> str:
        if row.id not in known:
            known[row.id] = row.fingerprint  # for hand-made manifests with circular parents
            parents = sorted((parent.role, _parent_key(line, signature, parent)) for parent in row.parents)
            known[row.id] = fingerprint([row.kind, _plain(_without_seeds(row.spec)), parents])
        return known[row.id]

    return signature


def _parent_key(line: Line, key: Callable[[Row], str], parent: Any) -> str:
    row = line.get(parent.id)
    return key(row) if row is not None and not parent.stale else parent.fingerprint


def _without_seeds(value: Any) -> Any:
    """`value` without fields called 'seed', at any depth."""
    if isinstance(value, dict):
        return {key: _without_seeds(entry) for key, entry in value.items() if key != "seed"}
    return [_without_seeds(entry) for entry in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """`value` with numbers that canonical JSON refuses as text."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return repr(value) if isinstance(value, float) else value


def varied(line: Line, rows: Sequence[Row], key: Callable[[Row], str], seeded: set[str]) -> dict[str, list[str]]:
    """The fields in which rows differ, with each row's words: spec fields, inputs, and fields of inputs that
    are arms over seeds themselves."""
    found = _differing([_without_seeds(row.spec) for row in rows])
    roles = dict.fromkeys("data" if parent in _data(row) else parent.role for row in rows for parent in row.parents)
    for role in roles:
        given = [_data(row) if role == "data" else [p for p in row.parents if p.role == role] for row in rows]
        keys = [[_parent_key(line, key, parent) for parent in parents] for parents in given]
        if all(one == keys[0] for one in keys):
            continue
        behind = [line.get(parents[0].id) if len(parents) == 1 else None for parents in given]
        arms = [row for row in behind if row is not None and key(row) in seeded]
        if len(arms) == len(rows):
            for field, words in varied(line, arms, key, seeded).items():
                found[f"{role} {field}" if field in found else field] = words
            continue
        names = [" + ".join(_name(line, parent.id) for parent in parents) or "none" for parents in given]
        twice = [names.count(name) > len([one for one in keys if one == mine]) for name, mine in zip(names, keys)]
        found[role] = [
            f"{name} {mine[0][:6]}" if again and mine else name
            for name, mine, again in zip(names, keys, twice, strict=True)
        ]
    return found


def _differing(values: Sequence[Any], path: str = "") -> dict[str, list[str]]:
    """The dotted fields in which values differ, with each value's words; techniques of different kinds differ as a whole."""
    if all(value == values[0] for value in values):
        return {}
    tables = [value for value in values if isinstance(value, dict)]
    kinds = [value.get("kind") if isinstance(value, dict) else None for value in values]
    if len(tables) == len(values) and all(kind == kinds[0] for kind in kinds):
        found: dict[str, list[str]] = {}
        for field in dict.fromkeys(field for table in tables for field in table):
            where = f"{path} {field}" if path else str(field)
            found |= _differing([table.get(field) for table in tables], where.replace("_", " "))
        return found
    if any(kinds):
        return {path: _by_kind(values, kinds)}
    return {path: [short(value) for value in values]}


def _by_kind(values: Sequence[Any], kinds: Sequence[Any]) -> list[str]:
    """Each technique's kind, with the fields in which it differs from others of its kind."""
    words = []
    for value, kind in zip(values, kinds, strict=True):
        if not kind:
            words.append(short(value))
            continue
        same = [other for other, its in zip(values, kinds, strict=True) if its == kind]
        fields = _differing(same)
        mine = next(place for place, other in enumerate(same) if other == value)
        more = ", ".join(f"{field} {shown[mine]}" for field, shown in fields.items())
        words.append(str(kind).replace("_", " ") + (f" ({more})" if more else ""))
    return words
