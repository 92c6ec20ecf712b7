"""A slot's table: technique names and their classes, imported on use."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any, ClassVar

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic_core import core_schema

from hone.base.errors import SpecError, did_you_mean, without_models
from hone.base.lazy import resolve
from hone.base.spec import Spec, describe_fields

TABLES: tuple[str, ...] = (
    "hone.measure.clocks:CLOCKS",
    "hone.model.linear:LINEARS",
    "hone.model.mixers:MIXERS",
    "hone.model.feed_forwards:FEED_FORWARDS",
    "hone.model.routers:ROUTERS",
    "hone.model.balance:BALANCES",
    "hone.model.growth:GROWTHS",
    "hone.model.devices:DEVICES",
    "hone.model.adapters:ADAPTERS",
    "hone.readers:EXTRACTORS",
    "hone.data:IDENTIFIERS",
    "hone.data:FILTERS",
    "hone.data:DEDUPS",
    "hone.data:SCORERS",
    "hone.data:ANNOTATIONS",
    "hone.data:EDITS",
    "hone.data:DECONTAMINATIONS",
    "hone.feed:MIXTURES",
    "hone.feed:CURRICULA",
    "hone.data:EXECUTORS",
    "hone.train:SCHEDULES",
    "hone.train:OBJECTIVES",
    "hone.train.objectives.divergences:DIVERGENCES",
    "hone.train.rollouts:REWARDS",
    "hone.train.teachers:TEACHERS",
    "hone.train.texts:TEXTS",
    "hone.train.quantization_aware:FAKE_QUANTIZERS",
    "hone.train:OPTIMIZERS",
    "hone.train:ACTIVATION_CHECKPOINTINGS",
    "hone.train:FP8_PRECISIONS",
    "hone.train:OFFLOADS",
    "hone.train:DATA_PARALLEL",
    "hone.train:CONTEXT_PARALLEL",
    "hone.train:PIPELINE_SCHEDULES",
    "hone.compress:TRANSFORMS",
    "hone.compress:ALLOCATIONS",
    "hone.compress:QUANTIZERS",
    "hone.compress.observers:OBSERVERS",
    "hone.compress:PRUNERS",
    "hone.compress:STRUCTURED_PRUNERS",
    "hone.compress:CONVERSIONS",
    "hone.compress:LOW_RANK",
    "hone.compress:KV_CACHES",
    "hone.exports:EXPORTS",
    "hone.serve:DRAFTERS",
    "hone.serve:EVICTIONS",
    "hone.serve:KV_POLICIES",
    "hone.serve:AUTOSCALERS",
)
"""Every slot's table; `hone techniques` and the contract tests read this list."""
GROUP = "hone.techniques"
"""The group of entry points in which other packages offer techniques."""


def all_tables(left_out: list[str] | None = None) -> dict[str, Table]:
    """Slot name to table, for everything in TABLES.

    With the list `left_out`, tables that need a package of the extra 'models' which is not installed are named there instead.
    """
    tables = {}
    for row in TABLES:
        module, _, attribute = row.partition(":")
        try:
            table = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if left_out is None or without_models(error) is None:
                raise
            left_out.append(row)
            continue
        tables[table.slot] = table
    return tables


class Technique(Spec):
    """One alternative of a slot. Its fields are its options; its first docstring line describes it and cites its paper.

    `kind` is its name in the slot's table (set by the table). `needs`, `gives` and `takes` are properties, never names
    of other techniques: a chain is valid when each step's needs are given by the input or an earlier step, and no step
    in between removes them (`hone.base.plan.check_order`).
    """

    kind: str = Field("", description="Name of the technique in its slot.")
    needs: ClassVar[frozenset[str]] = frozenset()
    gives: ClassVar[frozenset[str]] = frozenset()
    takes: ClassVar[frozenset[str]] = frozenset()
    paper: ClassVar[str] = ""


def is_foreign(cls: type) -> bool:
    """Whether a technique is of another package than hone."""
    return cls.__module__.partition(".")[0] != __name__.partition(".")[0]


class Table:
    """Slot `slot`: a literal mapping of technique names to 'module:Class', resolved on lookup."""

    def __init__(self, slot: str, rows: dict[str, str], elsewhere: dict[str, str] | None = None) -> None:
        """`elsewhere`: names that users look for here, and what makes them."""
        self.slot = slot
        self.rows = dict(rows)
        self.elsewhere = elsewhere or {}

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> type[Technique]:
        """The class named `name`: a row, else one of an installed package (`installed`), else 'module:Class' of the user's.

        Raises SpecError with the nearest name when it does not exist, or when a class of the user's is none of this slot.
        """
        if name in self.rows:
            return resolve(self.rows[name])
        if ":" in name:
            return self._foreign(name, f"{self.slot} '{name}'")
        installed = self.installed()
        if name in installed:
            return self._foreign(installed[name], f"{self.slot} '{name}' ({installed[name]})")
        if name in self.elsewhere:
            raise SpecError(f"{self.slot} '{name}' is begun by another stage", fix=self.elsewhere[name])
        known = [*self.rows, *installed]
        raise SpecError(
            f"unknown {self.slot} '{name}'",
            fix=f"{did_you_mean(name, known)}the {self.slot}s are: {', '.join(known)}; or module:Class of your own",
        )

    def installed(self) -> dict[str, str]:
        """Name and 'module:Class' of the techniques that installed packages offer for this slot.

        They are entry points of the group 'hone.techniques' named SLOT.NAME, with underscores for spaces in the slot. hone's own
        names cannot be replaced. Raises SpecError when two packages offer one name.
        """
        found: dict[str, str] = {}
        for entry in entry_points(group=GROUP):
            slot, _, name = entry.name.partition(".")
            if slot != self.slot.replace(" ", "_") or not name or name in self.rows:
                continue
            if found.setdefault(name, entry.value) != entry.value:
                raise SpecError(
                    f"two packages offer {self.slot} '{name}': {found[name]} and {entry.value}",
                    fix="uninstall one of them, or name the class itself as module:Class",
                )
        return found

    def _foreign(self, row: str, what: str) -> type[Technique]:
        """The class of another package that `row` names, checked to be of this slot."""
        try:
            cls = resolve(row)
        except Exception as error:  # whatever the module does when it is imported
            raise SpecError(
                f"{what} cannot be imported: {type(error).__name__}: {error}",
                fix="write module:Class of a class that Python finds here (install its package, or set PYTHONPATH)",
            ) from error
        base = self._base()
        if not isinstance(cls, type) or not issubclass(cls, base):
            raise SpecError(f"{what} is no {self.slot}", fix=f"derive the class from {base.__module__}:{base.__name__}")
        return cls

    def shared_bases(self) -> list[type]:
        """The classes from which all techniques of the slot derive, the slot's own before more general ones."""
        classes = [resolve(row) for row in self.rows.values()]
        return [one for one in classes[0].__mro__ if all(issubclass(cls, one) for cls in classes)]

    def _base(self) -> type:
        """The class from which all techniques of the slot derive."""
        classes, shared = [resolve(row) for row in self.rows.values()], self.shared_bases()
        bases = [one for one in shared if one not in classes and issubclass(one, Technique) and one is not Technique]
        return bases[-1] if bases else Technique if Technique in shared else shared[0]

    def read(self, value: Any) -> Technique:
        """A technique from its name, from a mapping with `kind` and options, or from an instance (returned unchanged).

        Raises SpecError when the kind is missing or unknown, or an option is wrong.
        """
        if isinstance(value, Technique):
            return value if value.kind else value.model_copy(update={"kind": self.name_of(type(value))})
        if isinstance(value, str):
            value = {"kind": value}
        if not isinstance(value, dict) or not value.get("kind"):
            raise SpecError(
                f"a {self.slot} needs a 'kind', got {value!r}", fix=f"write kind: NAME, one of: {', '.join(self.rows)}"
            )
        return self[value["kind"]].read(value)

    def name_of(self, cls: type[Technique]) -> str:
        """The name of `cls` in this table."""
        target = f"{cls.__module__}:{cls.__name__}"
        for name, row in self.rows.items():
            if row == target:
                return name
        if is_foreign(cls) and issubclass(cls, self._base()):
            return target
        raise SpecError(
            f"{target} is not in the {self.slot} table", fix=f'add the line "NAME": "{target}" to the table'
        )


class Choice:
    """Marks a spec field as 'one technique of this table': `quantizer: Annotated[Technique, Choice(QUANTIZERS)]`.

    With `default`, a mapping without a kind has the options of that technique.
    """

    def __init__(self, table: Table, default: str | None = None) -> None:
        self.table = table
        self.default = default

    def read(self, value: Any, info: ValidationInfo) -> Technique:
        """As `Table.read`."""
        if isinstance(value, dict) and self.default and not value.get("kind"):
            value = {**value, "kind": self.default}
        try:
            return self.table.read(value)
        except SpecError as error:
            error.field = error.field or info.field_name or ""
            raise

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.with_info_plain_validator_function(
            self.read,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda technique, info: technique.model_dump(mode="json", exclude_defaults=info.exclude_defaults),
                info_arg=True,
            ),
        )

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        options = []
        for name in self.table:
            option = self.table[name].model_json_schema()
            option = _inlined(option, option.pop("$defs", {}))
            option.setdefault("properties", {})["kind"] = {"const": name}
            options.append(option)
        return {"title": self.table.slot, "oneOf": options}


def _inlined(schema: Any, known: dict[str, Any]) -> Any:
    """`schema` with every reference to one of `known` replaced by what it stands for: an option is a part of a larger schema."""
    if isinstance(schema, list):
        return [_inlined(item, known) for item in schema]
    if not isinstance(schema, dict):
        return schema
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    if name in known:
        schema = {**known[name], **{key: value for key, value in schema.items() if key != "$ref"}}
    return {key: _inlined(value, known) for key, value in schema.items()}


def describe(wanted: str | None) -> list[str]:
    """A line a technique: slot, name, paper, work, file, summary; of one slot or name when `wanted`, with a name's fields.

    Raises SpecError when no slot and no technique is named so.
    """
    left_out: list[str] = []
    tables = all_tables(left_out)
    named = [
        (slot, table) for slot, table in tables.items() if wanted and wanted in {**table.rows, **table.installed()}
    ]
    if wanted and wanted not in tables and not named:
        known = [*tables, *(name for table in tables.values() for name in table)]
        more = f"; without torch (pip install 'hone-llm[models]') not: {', '.join(left_out)}" if left_out else ""
        raise SpecError(
            f"unknown slot or technique '{wanted}'",
            fix=f"{did_you_mean(wanted, known)}`hone techniques` lists all; the slots are: {', '.join(tables)}{more}",
        )
    lines = []
    for slot, table in named or tables.items():
        for name in [*table, *table.installed()]:
            if wanted not in (None, slot, name):
                continue
            try:
                cls = table[name]
            except ModuleNotFoundError as error:
                if wanted or without_models(error) is None:
                    raise
                left_out.append(f"{slot} {name}")
                continue
            summary = (cls.__doc__ or "").strip().splitlines()[0]
            work = f" {cls.complexity:36}" if getattr(cls, "complexity", "") else ""
            file = f"{cls.__module__.replace('.', '/')}.py"
            lines.append(f"{slot:14} {name:18} {cls.paper or '-':22}{work} {file}  {summary}")
            if wanted == name and hasattr(cls, "model_fields"):
                for field, kind, default, description in describe_fields(cls):
                    if field != "kind":
                        lines.append(f"    {field}: {kind}  {description} [{default}]")
    if left_out and not wanted:
        lines.append(
            f"not listed, since torch is not installed (pip install 'hone-llm[models]'): {', '.join(left_out)}"
        )
    return lines
