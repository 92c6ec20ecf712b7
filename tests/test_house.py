"""The house rules, checked: floors, circles, names, docstrings, sizes, light imports."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from hone.base.table import TABLES

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hone"
FLOORS = {
    "base": 1, "measure": 2, "report": 2, "cost": 3, "text": 3, "ops": 4, "parallel": 5, "solvers": 5, "model": 6, "feed": 7, "readers": 8,
    "eval": 8, "serve": 8, "data": 9, "train": 9, "exports": 9, "compress": 10, "plan": 11, "recipe": 12, "cli": 12, "": 13, "__main__": 13,
}  # fmt: skip
"""Data stands above model: a quality model may be an encoder of the model room's layers, and no model reads a corpus. Feed stands below
data, which writes what feed reads; readers, which open files as feed does, stand between them. Solvers stand on ops, whose grids and sweeps they use, and below training. Compression says which
folders other programs can read, so it stands above exports."""
WITHOUT_DATA = {"eval", "serve", "train", "compress", "exports", "plan"}
"""Rooms that read a data artifact or texts by `hone.feed` alone: what makes them meets them on disk."""
TOP = {"recipe", "cli"}
"""They know each other."""
REGISTRIES = {
    "hone.base.artifact": {"HUB_FOLDER", "NO_FOLDER"},  # what a parent's path may be besides a folder of hone's
    "hone.base.plan": {"FACTS"},  # who says what a finished artifact is
    "hone.base.stage": {
        "STAGES",
        "GOALS",
        "MACHINE",
    },  # who makes an artifact, who finds the spec of a goal, who describes the machine
    "hone.base.table": {"TABLES"},  # where the slots are
}
"""Names of base that name modules of higher floors: base holds the lists in which rooms meet, and resolves a row on use."""
NAMED = re.compile(r"hone(\.\w+)+(:\w+)?")
FORBIDDEN = {"utils", "common", "helpers", "misc", "core"}
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}


def room(module: str) -> str:
    """The room of a module: 'hone.train.loop' -> 'train', 'hone.cli' -> 'cli', 'hone' -> ''."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports(source: str, module: str) -> set[str]:
    """Every hone module that a file imports anywhere: at the top, in functions, for types, and by name on use.

    By name: the string of a `lazy("hone.x")`, a table's row, or any other that is the name of a module. A package that
    names itself to find its files imports nothing.
    """
    return _imports(ast.parse(source), module)


def _imports(tree: ast.Module, module: str) -> set[str]:
    found = set()
    listed = {
        id(node)
        for statement in (tree.body if module in REGISTRIES else ())
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        and {one.id for one in ast.walk(statement) if isinstance(one, ast.Name)} & REGISTRIES[module]
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in listed:
            name = node.value.partition(":")[0]
            if NAMED.fullmatch(node.value) and name in MODULES and not module.startswith(f"{name}."):
                found.add(name)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "hone"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            if node.module and node.module.split(".")[0] == "hone":
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    found.add(full if full in MODULES else node.module)
    return found


def joined_imports(source: str) -> list[str]:
    """Calls of import_module, lazy and resolve with a name that is put together there: an f-string or a sum."""
    return _joined_imports(ast.parse(source))


def _joined_imports(tree: ast.Module) -> list[str]:
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None))
        in ("import_module", "lazy", "resolve", "__import__")
        and any(isinstance(one, ast.JoinedStr | ast.BinOp) for one in node.args)
    ]


class File(NamedTuple):
    """What the rules ask of one file; each is read and parsed once."""

    path: str
    lines: int
    docstring: str | None
    imports: set[str]
    joined_imports: list[str]
    long_functions: list[str]


@functools.cache
def files_of_hone() -> dict[str, File]:
    """Every module's."""
    found = {}
    for module, path in MODULES.items():
        text = path.read_text(encoding="utf8")
        tree = ast.parse(text)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        found[module] = File(
            path=str(path.relative_to(ROOT)),
            lines=text.count("\n"),
            docstring=ast.get_docstring(tree),
            imports=_imports(tree, module),
            joined_imports=_joined_imports(tree),
            long_functions=[node.name for node in functions if node.end_lineno - node.lineno > 90],
        )
    return found


@functools.cache
def graph_of_hone() -> dict[str, set[str]]:
    """What every module of hone imports of it."""
    return {
        module: {target for target in file.imports if target in MODULES} for module, file in files_of_hone().items()
    }


def broken_floors(graph: dict[str, set[str]]) -> list[str]:
    """Imports that run up, or sideways into another room of the same floor."""
    return [
        f"{module} -> {target}"
        for module, targets in graph.items()
        for target in targets
        if room(module) != room(target)
        and FLOORS[room(target)] >= FLOORS[room(module)]
        and not (room(module) in TOP and room(target) in TOP)
    ]


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one import circle, or nothing."""
    state: dict[str, int] = {}

    def walk(module: str, path: list[str]) -> list[str]:
        state[module] = 1
        for target in sorted(graph[module]):
            if target == module:
                continue
            if state.get(target) == 1:
                return [*path[path.index(target) :], target] if target in path else [module, target]
            if target not in state:
                found = walk(target, [*path, target])
                if found:
                    return found
        state[module] = 2
        return []

    for module in graph:
        if module not in state:
            found = walk(module, [module])
            if found:
                return found
    return []


def test_every_room_has_a_floor():
    assert {room(module) for module in MODULES} <= set(FLOORS)


def test_no_import_runs_up():
    assert broken_floors(graph_of_hone()) == []


def test_only_feed_reads_what_data_makes():
    graph = graph_of_hone()
    assert [
        f"{module} -> {target}"
        for module, targets in graph.items()
        for target in targets
        if room(module) in WITHOUT_DATA and room(target) in ("readers", "data")
    ] == []
    assert {room(module) for module, targets in graph.items() if any(room(one) == "feed" for one in targets)} >= {
        "data",
        "eval",
        "train",
    }


def test_kernels_of_text_know_no_specs_and_no_artifacts():
    """The room is numpy in, numpy out: of the rooms below it takes the compiler's setup and imports on use alone."""
    allowed = {"hone.base.lazy", "hone.measure.compilers"}
    assert {
        target
        for module, targets in graph_of_hone().items()
        if room(module) == "text"
        for target in targets
        if room(target) != "text"
    } <= allowed


def test_no_import_circle():
    assert circle(graph_of_hone()) == []


def test_the_checks_can_fail():
    up = {"hone.base.spec": {"hone.train.loop"}, "hone.train.loop": set()}
    assert broken_floors(up) == ["hone.base.spec -> hone.train.loop"]
    assert broken_floors({"hone.model.decoder": {"hone.feed.load"}}) == ["hone.model.decoder -> hone.feed.load"]
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    late = 'grid = lazy("hone.ops.rounding.integer_grid")\nROWS = Table("x", {"a": "hone.train.loop:Trainer"})\nSTAGES = ["hone.cli"]'
    assert imports(late, "hone.model.decoder") == {"hone.ops.rounding.integer_grid", "hone.train.loop", "hone.cli"}
    assert imports(late, "hone.base.stage") == {"hone.ops.rounding.integer_grid", "hone.train.loop"}
    assert imports('files("hone.report")', "hone.report.page") == set()
    hidden = 'importlib.import_module(f"hone.text.{name}"), lazy("hone." + name), import_module(name), lazy("hone.ops")'
    assert joined_imports(hidden) == ["importlib.import_module(f'hone.text.{name}')", "lazy('hone.' + name)"]


def test_no_file_has_a_name_that_says_nothing():
    assert [path for path in FILES if path.stem in FORBIDDEN] == []


def test_every_file_says_what_it_is():
    """In its docstring, whose first line is one sentence."""
    files = files_of_hone().values()
    assert [file.path for file in files if not file.docstring] == []
    first = {file.path: file.docstring.splitlines()[0].rstrip() for file in files}
    assert {path: line for path, line in first.items() if not line.endswith((".", "?"))} == {}


def test_files_are_short():
    assert {file.path: file.lines for file in files_of_hone().values() if file.lines > 450} == {}, "split them"


def test_modules_are_imported_by_their_whole_names():
    """A name put together where it is imported is an import that no check above sees."""
    assert {file.path: file.joined_imports for file in files_of_hone().values() if file.joined_imports} == {}


def test_functions_fit_a_screen():
    assert {file.path: file.long_functions for file in files_of_hone().values() if file.long_functions} == {}


def test_folders_are_small():
    for folder in {path.parent for path in FILES}:
        assert len(list(folder.glob("*.py"))) <= 17, folder


def test_public_api_resolves():
    import hone

    for name in hone.__all__:
        assert getattr(hone, name) is not None


def test_specs_and_stages_load_without_torch():
    code = (
        "import sys, hone, hone.cli, hone.recipe\n"
        "from hone.base.stage import STAGES\n"
        "from hone.recipe import Recipe, stage_class\n"
        "for name in STAGES: stage_class(name)\n"
        "Recipe.load('recipes/tiny.yaml')\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_table_is_listed():
    literal = re.compile(r"^(\w+) = Table\(", re.MULTILINE)
    found = {
        f"{'.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__')}:{name}"
        for path in FILES
        for name in literal.findall(path.read_text(encoding="utf8"))
    }
    assert found == set(TABLES)


@pytest.mark.slow
def test_techniques_and_stages_load_without_extras():
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in EXTRAS: raise ModuleNotFoundError(f'{name} is not installed')\n"
        "EXTRAS = 'pyarrow numba tiktoken fastwarc resiliparse trafilatura zstandard fsspec huggingface_hub clarabel openai ray fastapi starlette uvicorn prometheus_client httpx'.split()\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from hone.base.table import all_tables\n"
        "from hone.base.stage import STAGES\n"
        "from hone.recipe import stage_class\n"
        "assert all(table[name] for table in all_tables().values() for name in table)\n"
        "for name in STAGES: stage_class(name).model_json_schema()\n"
        "import hone.serve.http\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_spec_field_is_described():
    from hone.base.spec import describe_fields
    from hone.base.stage import STAGES
    from hone.recipe import stage_class
    from hone.serve.http import ServerSpec

    for cls in [*(stage_class(name) for name in STAGES), ServerSpec]:
        rows = describe_fields(cls)
        assert len(cls.model_fields) <= 22, cls
        for name, _, _, description in rows:
            assert description, f"{cls.__name__}.{name} has no description"


def test_every_technique_says_what_it_is():
    from hone.base.table import all_tables

    for slot, table in all_tables().items():
        for name in table:
            cls = table[name]
            assert cls.__doc__ and cls.__doc__.strip().splitlines()[0].endswith("."), f"{slot} {name}"
            assert isinstance(cls.paper, str), f"{slot} {name}"
            for field, info in getattr(cls, "model_fields", {}).items():  # a linear is a module, not a spec
                assert info.description, f"{slot} {name}.{field} has no description"
