"""Typed specs: frozen pydantic models that print as YAML, parse from it, and take dotted overrides."""

from __future__ import annotations

import hashlib
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hone.base.errors import HoneError, SpecError, did_you_mean

_WORDS = {"null": None, "none": None, "true": True, "false": False}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class Circumstance:
    """Marks a field that does not change the result: it is not part of the spec's identity.

    A technique that does change it (`exact` is False) is part of it nevertheless.

    `compile: Annotated[bool, Circumstance()] = Field(False, description="...")`
    """


class Spec(BaseModel):
    """The description of a computation. Frozen; unknown fields are errors; every field has a description, its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _one_is_a_list_of_one(cls, values: Any) -> Any:
        """Accepts `steps: gptq` for `steps: [gptq]` wherever a field is a list of any length."""
        if not isinstance(values, dict):
            return values
        alone = {
            name: (values[name],)
            for name, field in cls.model_fields.items()
            if name in values and isinstance(values[name], (str, int, float, dict)) and _is_open_list(field.annotation)
        }
        return {**values, **alone}

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, field: ValidationInfo) -> Any:
        """Refuses `--steps` without a value (read as true), which would silently mean 1."""
        if isinstance(value, bool) and _is_number(cls.model_fields[str(field.field_name)].annotation):
            raise ValueError("this needs a number")
        return value

    @classmethod
    def read(cls, values: Any) -> Self:
        """A spec from a mapping. Raises SpecError with the field, its value and the nearest known name."""
        if not isinstance(values, dict):
            raise SpecError(
                f"{cls.__name__} must be a mapping of fields, got {values!r}",
                fix=f"write its fields as `name: value`: {', '.join(cls.model_fields)}",
            )
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise _first_mistake(cls, error) from None

    @classmethod
    def from_overrides(cls, changes: dict[str, str], file: Path | None = None) -> Self:
        """A spec from dotted command line values and defaults: {'engine.page_size': '32'}.

        A value is parsed as YAML, so lists and mappings can be written inline. With the YAML `file`, values are its fields
        where `changes` do not set them. Raises SpecError; what is wrong in the file is told with its line and column.
        """
        values = {} if file is None else read_yaml(file) or {}
        if not isinstance(values, dict):
            raise SpecError(f"{file} is no mapping of fields", fix="write its fields as `name: value`, one a line")
        flat = {path: values.pop(path) for path in [*values] if "." in str(path)}  # as on the command line
        given = {path: parse_scalar(changes[path]) for path in sorted(changes, key=lambda one: one.count("."))}
        one_kind(given, cls.__name__)
        one_kind(values | flat, cls.__name__)
        for path, value in [*flat.items(), *given.items()]:
            here = values
            *parents, last = path.split(".")
            for part in parents:
                found = here.setdefault(part, {})
                here[part] = here = {"kind": found} if isinstance(found, str) else found  # a technique by its name
                if not isinstance(here, dict):
                    said = f"{cls.__name__}.{path}: '{part}' is also given as a whole"
                    raise SpecError(said, fix=f"set either {part} or its fields")
            here[last] = value
        try:
            return cls.read(values)
        except SpecError as error:
            raise error if file is None else in_file(error, file, changes) from None

    def override(self, changes: dict[str, str]) -> Self:
        """A copy with dotted `changes` applied: {'quantizer.bits': '3'}. Values are parsed as YAML scalars.

        Raises SpecError for an unknown field or an impossible value.
        """
        values = self.model_dump(mode="json")
        given = {path: parse_scalar(text) for path, text in changes.items()}
        one_kind(given, type(self).__name__)
        for path, value in given.items():
            set_dotted(values, path, value, where=type(self).__name__)
        return type(self).read(values)

    def identity(self) -> dict[str, Any]:
        """The part that determines the result: every field but circumstances, also of nested specs, as JSON values."""
        return _identity(self, self.model_dump(mode="json"))

    def goes_on(self, begun: Self, state: Path) -> bool:
        """Whether unfinished work of `begun`, another spec, begins this one's, as `state` has it. DriftError: it nearly does."""
        return False

    def after(self, finished: Self, folder: Path) -> str:
        """How this work is made by going on from `folder`, made of `finished`, in words for an error; '' when it is not."""
        return ""

    def to_yaml(self) -> str:
        """The spec as YAML; `read` of it gives an equal spec."""
        return dump_yaml(self.model_dump(mode="json"))


def _identity(value: Any, dumped: Any) -> Any:
    """`dumped`, the JSON form of `value`, without the circumstances of the specs in it."""
    if isinstance(value, Spec):
        fields = type(value).model_fields
        marked = {
            name
            for name in fields
            if any(isinstance(one, Circumstance) for one in fields[name].metadata)
            and getattr(getattr(value, name, None), "exact", True)
        }
        return {name: _identity(getattr(value, name, None), one) for name, one in dumped.items() if name not in marked}
    if isinstance(value, list | tuple):
        return [_identity(one, other) for one, other in zip(value, dumped, strict=True)]
    return dumped


def _is_open_list(annotation: Any) -> bool:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    return origin is list or (origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis)


def _is_number(annotation: Any) -> bool:
    kinds = {annotation, *typing.get_args(annotation)} if typing.get_origin(annotation) is not tuple else set()
    return bool(kinds & {int, float}) and bool not in kinds


def _first_mistake(cls: type[BaseModel], error: ValidationError) -> HoneError:
    """The first of pydantic's errors as one message with a fix."""
    # An unknown field comes first: it explains a missing one.
    detail = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    path = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        name = str(detail["loc"][-1])
        here = _model_at(cls, detail["loc"][:-1])
        known = list(here.model_fields)
        meant = f"did you mean '{inner}'? " if (inner := _nested(here, name)) else did_you_mean(name, known)
        return _of_field(path, f"{cls.__name__} has no field '{path}'", f"{meant}known fields: {', '.join(known)}")
    if detail["type"] == "missing":
        return SpecError(f"{cls.__name__} needs the field '{path}'", fix=f"add {path}: VALUE")
    message = detail["msg"].removeprefix("Value error, ")
    return _of_field(
        path,
        f"{cls.__name__}.{path} = {detail['input']!r}: {message}" if path else f"{cls.__name__}: {message}",
        f"give {path or 'it'} a valid value; `hone schema` prints every field with its type",
    )


def _of_field(path: str, what: str, fix: str) -> SpecError:
    error = SpecError(what, fix=fix)
    error.field = path
    return error


def in_file(error: SpecError, file: Path, elsewhere: Iterable[str] = ()) -> SpecError:
    """`error` with the place of its field in the YAML `file`, unless the field is one of `elsewhere` or not in the file."""
    wrong = error.field.split(".") if error.field else []
    if not wrong or any(path.split(".")[-len(wrong) :] == wrong for path in elsewhere):
        return error
    places: list[tuple[int, int]] = []
    pending: list[tuple[list[str], yaml.Node | None]] = [([], yaml.compose(file.read_text(encoding="utf8")))]
    while pending:
        path, node = pending.pop()
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                here = [*path, *str(key.value).split(".")]
                if here[-len(wrong) :] == wrong:
                    places.append((key.start_mark.line + 1, key.start_mark.column + 1))
                pending.append((here, value))
        elif isinstance(node, yaml.SequenceNode):
            pending += [([*path, str(place)], one) for place, one in enumerate(node.value)]
    if not places:
        return error
    where = " or ".join(f"line {line}, column {column}" for line, column in sorted(places))
    return _of_field(error.field, f"{file}, {where}: {error.what}", error.fix)


def _model_at(cls: type[BaseModel], location: tuple) -> type[BaseModel]:
    """The model class found by following `location` from `cls`, as far as the annotations say."""
    for part in location:
        if isinstance(part, int):
            continue
        field = cls.model_fields.get(str(part))
        inner = _model_of(field.annotation) if field is not None else None
        if inner is None:
            break
        cls = inner
    return cls


def _nested(cls: type[BaseModel], name: str) -> str:
    """'engine.dtype' for the field `name` of one spec inside `cls`; '' when none or several have it."""
    inner = {outer: _model_of(field.annotation) for outer, field in cls.model_fields.items()}
    found = [f"{outer}.{name}" for outer, model in inner.items() if model is not None and name in model.model_fields]
    return found[0] if len(found) == 1 else ""


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model inside an annotation such as `X`, `X | None`, `list[X]` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list, tuple, typing.Annotated):
        for argument in typing.get_args(annotation):
            found = _model_of(argument)
            if found is not None:
                return found
    return None


def one_kind(given: Mapping[str, Any], where: str) -> None:
    """Raises SpecError where `given`, values by dotted path, name two techniques for one slot: 'x.kind' and 'x' itself."""
    for path, kind in given.items():
        slot, _, last = str(path).rpartition(".")
        whole = given.get(slot) if last == "kind" else None
        named = whole.get("kind") if isinstance(whole, dict) else whole
        if isinstance(named, str) and named != kind:
            raise SpecError(f"{where}: {path}={kind} and {slot}={named} name two techniques", fix="give one of them")


def set_dotted(values: Any, path: str, value: Any, *, where: str) -> None:
    """Sets `path` ('a.b', 'steps.0.bits') in nested dicts and lists. Raises SpecError when a part of it does not exist."""
    here = values
    parts = path.split(".")
    for position, part in enumerate(parts):
        last = position == len(parts) - 1
        if isinstance(here, list):
            if not part.isdigit() or int(part) >= len(here):
                raise SpecError(
                    f"{where}.{path}: '{part}' is not a position in a list of {len(here)}",
                    fix=f"use a position from 0 to {len(here) - 1}",
                )
            part = int(part)  # type: ignore[assignment]
        elif isinstance(here, dict):
            if part not in here and not last:
                known = ", ".join(map(str, here))
                raise SpecError(f"{where} has no field '{path}'", fix=f"{did_you_mean(part, here)}known here: {known}")
        else:
            raise SpecError(
                f"{where}.{path}: '{'.'.join(parts[:position])}' is {here!r} and has no fields",
                fix=f"set {'.'.join(parts[:position])} itself",
            )
        if last:
            here[part] = value
        else:
            here = here[part]  # type: ignore[index]


def parse_scalar(text: str) -> Any:
    """A command line value: null, true, false, a number, a YAML list or mapping in brackets; anything else is a string."""
    if text.startswith(("[", "{")):
        try:
            return yaml.load(text, Loader=_OneValueAKey)
        except _Twice as error:
            raise SpecError(f"{text!r} gives '{error.key}' twice", fix="keep one of the two") from None
        except (yaml.YAMLError, ValueError) as error:
            raise SpecError(
                f"cannot read {text!r}: {str(error).splitlines()[0]}", fix="close its brackets and quotes"
            ) from None
    if text in _WORDS:
        return _WORDS[text]
    if _NUMBER.fullmatch(text):
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    return text


def read_yaml(path: Path) -> Any:
    """The YAML document in `path`. Raises SpecError when it is missing, not YAML, or gives one key two values."""
    try:
        return yaml.load(path.read_text(encoding="utf8"), Loader=_OneValueAKey)
    except FileNotFoundError:
        raise SpecError(f"no file {path}", fix="check the path") from None
    except _Twice as error:
        first, second = error.lines
        where = f"line {second}" if first == second else f"lines {first} and {second}"
        raise SpecError(f"{path} gives '{error.key}' twice, in {where}", fix="keep one of the two") from None
    except (yaml.YAMLError, ValueError, IsADirectoryError, RecursionError) as error:  # ValueError: no UTF-8, no date
        raise SpecError(f"{path} is not a YAML file: {_where(error)}", fix="correct the file at that place") from None


def _where(error: Exception) -> str:
    """What an error of YAML says, with its line and column, counted from 1."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return str(error).splitlines()[0]
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


class _Twice(yaml.YAMLError):
    """A mapping has `key` on both of `lines`, counted from 1."""

    def __init__(self, key: str, lines: tuple[int, int]) -> None:
        super().__init__(f"'{key}' is given twice")
        self.key = key
        self.lines = lines


class _OneValueAKey(yaml.SafeLoader):
    """Refuses a mapping with a repeated key: YAML forbids it, but the library silently keeps the last value.

    A key from a merge (`<<: *base`) may be overridden: that is the purpose of a merge.
    """

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        return super().construct_object(node, deep=True)  # type: ignore[no-untyped-call]  # refuses what contains itself

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            value = self.construct_object(key)  # type: ignore[no-untyped-call]
            line = key.start_mark.line + 1
            if value in seen:
                raise _Twice(key.value, (seen[value], line))
            seen[value] = line
        return node


def dump_yaml(values: Any) -> str:
    """`values` as YAML in field order."""
    return yaml.dump(values, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=100)


class _Plain(yaml.SafeDumper):
    """Writes repeated values in full: anchors are hard to read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def fingerprint(values: Any) -> str:
    """SHA-256 (first 16 hex digits) of the canonical JSON of `values`. Raises TypeError on values that are not JSON."""
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def describe_fields(cls: type[BaseModel], prefix: str = "") -> list[tuple[str, str, str, str]]:
    """Rows (dotted name, type, default as typed on the command line, description) of all fields, nested specs expanded."""
    rows = []
    for name, field in cls.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Spec) and not _tables(field.metadata):
            rows += describe_fields(inner, f"{prefix}{name}.")
            continue
        value = None if field.is_required() else field.get_default(call_default_factory=True)
        default = "required" if field.is_required() else _typed(value)
        kind = _type_name(field.annotation, _tables(field.metadata))
        rows.append((prefix + name, kind, default, field.description or ""))
    return rows


def _typed(value: Any) -> str:
    """A default as typed on the command line: 'null', 'true', '[exact, minhash]'; a technique is its kind."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(_typed(entry) for entry in value)}]"
    word = next((word for word, meant in _WORDS.items() if value is meant), None)
    return word or getattr(value, "kind", None) or str(value)


def _tables(metadata: Iterable[Any]) -> list[Iterable[str]]:
    """The technique tables in an annotation's metadata (recognized by their attributes, since `Choice` is a module above)."""
    return [item.table for item in metadata if hasattr(item, "table")]


def _type_name(annotation: Any, tables: list[Iterable[str]]) -> str:
    """A type as shown in `--help`: 'int', 'fp32|bf16', 'list of rtn|gptq'."""
    if tables:
        return "|".join(name for table in tables for name in table)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(arguments[0], _tables(annotation.__metadata__))
    if origin is typing.Literal:
        return "|".join(str(argument) for argument in arguments)
    if origin in (typing.Union, types.UnionType):
        return "|".join("null" if argument is type(None) else _type_name(argument, []) for argument in arguments)
    if origin in (list, tuple):
        return f"list of {_type_name(arguments[0], [])}"
    kind = (
        annotation.model_fields.get("kind") if isinstance(annotation, type) and issubclass(annotation, Spec) else None
    )
    if kind is not None and typing.get_origin(kind.annotation) is typing.Literal:
        return _type_name(kind.annotation, [])  # words that are short for it
    return getattr(annotation, "__name__", str(annotation))
