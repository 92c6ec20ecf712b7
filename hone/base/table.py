"""A slot's table: technique names and their classes, imported on use."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic_core import core_schema

from hone.base.errors import SpecError, did_you_mean
from hone.base.lazy import resolve
from hone.base.spec import Spec, describe_fields

TABLES: tuple[str, ...] = (
    "hone.model.linear:LINEARS",
    "hone.model.mixers:MIXERS",
    "hone.model.feed_forwards:FEED_FORWARDS",
    "hone.model.adapters:ADAPTERS",
    "hone.data:EXTRACTORS",
    "hone.data:FILTERS",
    "hone.data:DEDUPS",
    "hone.data:SCORERS",
    "hone.data:EDITS",
    "hone.data:DECONTAMINATIONS",
    "hone.data:MIXTURES",
    "hone.data:CURRICULA",
    "hone.data:EXECUTORS",
    "hone.train:SCHEDULES",
    "hone.train:OBJECTIVES",
    "hone.train:OPTIMIZERS",
    "hone.train:ACTIVATION_CHECKPOINTINGS",
    "hone.compress:TRANSFORMS",
    "hone.compress:ALLOCATIONS",
    "hone.compress:QUANTIZERS",
    "hone.compress.observers:OBSERVERS",
    "hone.compress:PRUNERS",
    "hone.compress:STRUCTURED_PRUNERS",
    "hone.compress:LOW_RANK",
    "hone.compress:KV_CACHES",
    "hone.serve:DRAFTERS",
)
"""Every slot's table; `hone techniques` and the contract tests read this list."""


def all_tables() -> dict[str, Table]:
    """Slot name to table, for everything in TABLES."""
    tables = {}
    for row in TABLES:
        module, _, attribute = row.partition(":")
        table = getattr(importlib.import_module(module), attribute)
        tables[table.slot] = table
    return tables


class Technique(Spec):
    """One alternative of a slot. Its fields are its options; its first docstring line describes it and cites its paper.

    `kind` is its name in the slot's table (set by the table). `needs`, `gives` and `takes` are facts, never names
    of other techniques: a chain is valid when each step's needs are given by the input or an earlier step, and no step
    in between removes them (`hone.base.plan.check_order`).
    """

    kind: str = Field("", description="Name of the technique in its slot.")
    needs: ClassVar[frozenset[str]] = frozenset()
    gives: ClassVar[frozenset[str]] = frozenset()
    takes: ClassVar[frozenset[str]] = frozenset()
    paper: ClassVar[str] = ""


class Table:
    """Slot `slot`: a literal mapping of technique names to 'module:Class', resolved on lookup."""

    def __init__(self, slot: str, rows: dict[str, str]) -> None:
        self.slot = slot
        self.rows = dict(rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> type[Technique]:
        """The class named `name`. Raises SpecError with the nearest name when it does not exist."""
        if name not in self.rows:
            hint = did_you_mean(name, self.rows)
            raise SpecError(f"unknown {self.slot} '{name}'", fix=f"{hint}the {self.slot}s are: {', '.join(self.rows)}")
        return resolve(self.rows[name])

    def read(self, value: Any, context: dict[str, bool] | None = None) -> Technique:
        """A technique from its name, from a mapping with `kind` and options, or from an instance (returned unchanged).

        `context` as for `Spec.read`. Raises SpecError when the kind is missing or unknown, or an option is wrong.
        """
        if isinstance(value, Technique):
            return value if value.kind else value.model_copy(update={"kind": self.name_of(type(value))})
        if isinstance(value, str):
            value = {"kind": value}
        if not isinstance(value, dict) or not value.get("kind"):
            raise SpecError(
                f"a {self.slot} needs a 'kind', got {value!r}", fix=f"write kind: NAME, one of: {', '.join(self.rows)}"
            )
        return self[value["kind"]].read(value, context)

    def name_of(self, cls: type[Technique]) -> str:
        """The name of `cls` in this table."""
        target = f"{cls.__module__}:{cls.__name__}"
        for name, row in self.rows.items():
            if row == target:
                return name
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
        return self.table.read(value, info.context)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.with_info_plain_validator_function(
            self.read,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda technique: technique.model_dump(mode="json")
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
    tables = all_tables()
    named = [(slot, table) for slot, table in tables.items() if wanted in table.rows]
    if wanted and wanted not in tables and not named:
        known = [*tables, *(name for table in tables.values() for name in table)]
        raise SpecError(f"unknown slot or technique '{wanted}'", fix=f"known: {', '.join(known)}")
    lines = []
    for slot, table in named or tables.items():
        for name in table:
            cls = table[name]
            if wanted in (None, slot, name):
                summary = (cls.__doc__ or "").strip().splitlines()[0]
                work = f" {cls.complexity:36}" if getattr(cls, "complexity", "") else ""
                file = f"{cls.__module__.replace('.', '/')}.py"
                lines.append(f"{slot:14} {name:18} {cls.paper or '-':22}{work} {file}  {summary}")
            if wanted == name and hasattr(cls, "model_fields"):
                for field, kind, default, description in describe_fields(cls):
                    if field != "kind":
                        lines.append(f"    {field}: {kind}  {description} [{default}]")
    return lines
