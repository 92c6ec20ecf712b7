"""Recipes: a list of stages with their parents and branches, made in order and resumed after an interruption."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from hone.base.artifact import MANIFEST, Artifact, finished
from hone.base.durable import write_atomic
from hone.base.errors import DriftError, FitError, HoneError, SpecError, did_you_mean
from hone.base.lazy import resolve
from hone.base.partial import PULL, PUSH, need_local
from hone.base.plan import DISK, Facts, Plan, capacity, facts_of
from hone.base.run import Ending, Run
from hone.base.spec import Spec, dump_yaml, in_file, one_kind, parse_scalar, read_yaml, set_dotted
from hone.base.stage import STAGES, Stage
from hone.measure.machine import Machine, machine_of

_RESERVED = ("stage", "name", "from", "each", "repeats")


def _maker(source: Path, folder: Path | None) -> str:
    """The command of the recipe in `folder` that makes the artifact `source`, .../LINE/STAGE-NAME, as `hone run x.yaml` (its stage y); ''."""
    for path in sorted(folder.glob("*.yaml")) if folder is not None and source.parent.name else ():
        try:
            values = read_yaml(path)
        except SpecError:  # another recipe's mistake is not this one's
            continue
        stages = values.get("stages") if isinstance(values, dict) and values.get("line") == source.parent.name else None
        for entry in stages if isinstance(stages, list) else ():
            if isinstance(entry, dict) and f"{entry.get('stage')}-{entry.get('name')}" == source.name:
                return f"`hone run {path}`, whose stage {source.name} makes it"
    return ""


class Node(Spec):
    """One stage of a recipe after its branches are expanded."""

    stage: str = Field(description="Kind of stage: one of data, train, compress, eval, serve.")
    name: str = Field(description="The artifact's name within its stage; its folder is STAGE-NAME.")
    inputs: dict[str, str] = Field(
        default_factory=dict, description="For each role an earlier stage's folder name, or a folder."
    )
    spec: dict[str, Any] = Field(default_factory=dict, description="The stage's own fields.")

    @property
    def folder(self) -> str:
        return f"{self.stage}-{self.name}"

    def read(self) -> Stage:  # type: ignore[override]
        """The stage with its fields checked. Raises SpecError."""
        return stage_class(self.stage).read(self.spec)

    def within(self, line: Path, nodes: list[Node]) -> Stage:
        """`read`, where a field that names another of `nodes`, such as a tokenizer's path, is that one's folder in `line`."""
        folders = {node.folder: str(line / node.folder) for node in nodes}

        def placed(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: placed(one) for name, one in value.items()}
            if isinstance(value, list):
                return [placed(one) for one in value]
            return folders.get(value, value) if isinstance(value, str) else value

        return stage_class(self.stage).read(placed(self.spec))


class Recipe(Spec):
    """A list of stages, in order, each made from earlier ones or from folders.

    In YAML a stage is a mapping with `stage`, `name`, `from` (role: earlier stage or folder), `each` (one role: a list,
    with a branch per value), `repeats` (how often it is made, each time with the next `seed`) and, beside them, the
    stage's own fields. Neighbours with equal `repeats` are made in turn, round by round, so that a drift of the machine's
    speed affects all of them alike.
    """

    line: str = Field(description="Name of the line; its artifacts go to WORK/LINE/.")
    stages: list[dict[str, Any]] = Field(description="The stages in order.")

    @classmethod
    def load(cls, path: Path | str) -> Recipe:
        """The recipe in a YAML file. Raises SpecError."""
        values = read_yaml(Path(path))
        try:
            recipe = cls.read(values)
            recipe.nodes(beside=Path(path).parent)  # finds mistakes now, not an hour into the run
        except SpecError as error:
            raise in_file(error, Path(path)) from None
        return recipe

    def nodes(self, beside: Path | None = None) -> list[Node]:
        """The stages with branches expanded and references checked; an error names the recipe in `beside` that makes a missing folder."""
        if Path(self.line).name != self.line or self.line in ("", ".", ".."):
            raise SpecError(f"line '{self.line}' is not a folder name", fix="write line: NAME, without slashes")
        found: dict[str, Node] = {}
        for nodes in _in_turn([_rounds(entry, f"stages.{place}") for place, entry in enumerate(self.stages)]):
            for node in nodes:
                if node.folder in found:
                    raise SpecError(f"two stages are named {node.folder}", fix="give one of them another name")
                for role, source in node.inputs.items():
                    if source not in found and not Path(source).is_dir():
                        need_local(source, PULL)
                        if maker := _maker(Path(source), beside):
                            raise SpecError(
                                f"{node.folder}: {role} is '{source}', which is not made yet",
                                fix=f"make it first: {maker}",
                            )
                        hint = did_you_mean(source, found)
                        raise SpecError(
                            f"{node.folder}: {role} is '{source}', which is neither an earlier stage nor a folder",
                            fix=f"{hint}earlier stages: {', '.join(found) or 'none'}",
                        )
                node.read()
                found[node.folder] = node
        return list(found.values())

    def full(self) -> str:
        """The recipe with every field of every stage, as YAML that `load` reads."""
        stages = [
            {
                "stage": node.stage,
                "name": node.name,
                **({"from": node.inputs} if node.inputs else {}),
                **node.read().model_dump(mode="json"),
            }
            for node in self.nodes()
        ]
        return dump_yaml({"line": self.line, "stages": stages})

    def override(self, changes: dict[str, str]) -> Recipe:
        """A copy with changes such as {'data.source': PATH} or {'train-base.steps': '20'}.

        The first part of a path is a kind of stage, if the recipe has only one of it, or a stage's folder name.
        """
        stages = [dict(entry) for entry in self.stages]
        one_kind({path: parse_scalar(text) for path, text in changes.items()}, f"recipe {self.line}")
        for path, text in changes.items():
            where, _, field = path.partition(".")
            entry = self._entry(stages, where, field)
            cls = stage_class(entry["stage"])
            top = field.partition(".")[0]
            if top not in cls.model_fields:
                hint = did_you_mean(top, cls.model_fields)
                raise SpecError(
                    f"{where} has no field '{field}'", fix=f"{hint}its fields: {', '.join(cls.model_fields)}"
                )
            fields = {key: value for key, value in entry.items() if key not in _RESERVED}
            values = cls.read(fields).model_dump(mode="json")
            set_dotted(values, field, parse_scalar(text), where=where)
            entry[top] = values[top]
        changed = Recipe(line=self.line, stages=stages)
        changed.nodes()
        return changed

    def plan(self, work: Path | str = "work", run: Run | None = None, redo: tuple[str, ...] = ()) -> list[Planned]:
        """The plans of all stages, before anything is made; `redo` as in `run`.

        A finished stage gives its facts, every other one those of its plan, from which the next is planned.
        """
        run, nodes = run or Run(), self.nodes()
        line, machine = Path(work) / self.line, machine_of(run)
        redo = self._to_redo(redo, nodes)
        there: dict[str, Artifact] = {}
        facts: dict[str, Facts] = {}
        planned, disk = [], 0.0
        for node in nodes:
            stage, out = node.within(line, nodes), line / node.folder
            try:
                stage.check_roles(node.inputs)
                parents = {role: there.get(name) or _outside(name, nodes) for role, name in node.inputs.items()}
                _wait_for_paths(stage, line, [one.folder for one in nodes])
                wanted = "all" in redo or node.folder in redo or None in parents.values()
                made = None if wanted else _finished(stage, out, parents, run, forgive="drifted" in redo)
                if made is not None:
                    there[node.folder] = made
                    planned.append(Planned(node.folder, "there"))
                    continue
                known = {role: _facts(name, facts, parents[role]) for role, name in node.inputs.items()}
                row = _plan(stage, out, known, machine, taken=disk)
            except _Waits as waits:
                row = Planned(node.folder, f"waits for {waits.source}")
            except HoneError as problem:
                row = Planned(node.folder, "to make", None, problem)
            planned.append(row)
            if row.plan is not None:
                disk += row.plan.estimates[DISK].value if DISK in row.plan.estimates else 0.0
                if row.plan.facts is not None:
                    facts[node.folder] = row.plan.facts.model_copy(update={"where": node.folder})
        return planned

    def _to_redo(self, redo: tuple[str, ...], nodes: list[Node]) -> tuple[str, ...]:
        """The folders to make again. Raises SpecError for an unknown name."""
        known = {node.folder for node in nodes}
        redo = tuple(folder for name in redo for folder in self._repeats(name) or [name])
        for name in redo:
            if name not in known and name not in ("all", "drifted"):
                hint = did_you_mean(name, known)
                raise SpecError(
                    f"--redo={name}: the recipe has no such stage", fix=f"{hint}its stages: {', '.join(sorted(known))}"
                )
        return redo

    def _repeats(self, name: str) -> list[str]:
        """The folders of the entry called `name` if it is repeated, else none."""
        for entry in self.stages:
            if "repeats" in entry and f"{entry['stage']}-{entry.get('name')}" == name:
                return [f"{name}-{repeat}" for repeat in range(entry["repeats"])]
        return []

    def _entry(self, stages: list[dict[str, Any]], where: str, field: str) -> dict[str, Any]:
        if not field:
            raise SpecError(
                f"--{where} names no field of a stage", fix="write --STAGE.FIELD=VALUE, such as --data.source=PATH"
            )
        matches = [entry for entry in stages if where in (entry["stage"], f"{entry['stage']}-{entry.get('name', '')}")]
        names = [f"{entry['stage']}-{entry['name']}" if entry.get("name") else entry["stage"] for entry in stages]
        if not matches:
            hint = did_you_mean(where, names)
            raise SpecError(f"the recipe has no stage '{where}'", fix=f"{hint}its stages: {', '.join(names)}")
        if len(matches) > 1:
            several = [name for name, entry in zip(names, stages) if entry in matches]
            raise SpecError(
                f"'{where}' could be any of {', '.join(several)}", fix=f"name one: --{several[0]}.{field}=VALUE"
            )
        return matches[0]

    def run(
        self,
        work: Path | str = "work",
        run: Run | None = None,
        redo: tuple[str, ...] = (),
        watch: Callable[[int, int, Node, Artifact, bool], None] | None = None,
    ) -> Path:
        """Makes every missing stage and returns the line's folder.

        `redo` names stages to make again; stages made from them follow when they changed. 'all' is every stage,
        'drifted' every one that was made from another spec or other inputs.
        `watch(position, total, node, artifact, made)` is called after each stage; `made` is False when it existed already.
        Raises DriftError when an artifact of the line was made from another spec, Interrupted when Ctrl-C or SIGTERM came in a stage
        that saves its work and ends: at once where the stage is not whole, else after it.
        """
        need_local(work, PUSH)
        run = run or Run()
        nodes = self.nodes()
        line = Path(work) / self.line
        line.mkdir(parents=True, exist_ok=True)
        redo = self._to_redo(redo, nodes)
        recipe_file = line / "recipe.yaml"
        if run.mesh.leads:
            write_atomic(recipe_file, self.to_yaml().encode())
        made: dict[str, Artifact] = {}
        redone: set[str] = set()
        for position, node in enumerate(nodes, 1):
            parents = {
                role: made[source] if source in made else Artifact.read(source) for role, source in node.inputs.items()
            }
            there = (line / node.folder / MANIFEST).exists()
            wanted = "all" in redo or node.folder in redo
            command = f"hone run {recipe_file} --work={work} --redo={node.folder}"
            here = replace(run, redo=wanted, command=command, end=Ending())
            try:
                artifact = node.within(line, nodes).make(line / node.folder, parents, here)
            except DriftError as drift:
                if "drifted" not in redo and not redone.intersection(node.inputs.values()):
                    raise DriftError(
                        drift.what,
                        fix=f"make it and what follows from it again with --redo={node.folder}, "
                        "everything that drifted with --redo=drifted, or keep it all and use another folder with --work=OTHER",
                    ) from None
                here.redo = wanted = True
                artifact = node.within(line, nodes).make(line / node.folder, parents, here)
            if wanted:
                redone.add(node.folder)
            made[node.folder] = artifact
            if watch is not None:
                watch(position, len(nodes), node, artifact, wanted or not there)
            # A signal that came in the last step of a stage finds it whole; any rank may be the one that got it.
            if position < len(nodes) and any(run.mesh.gather(here.end.asked())):
                raise here.end.interrupted(
                    f"ended after {node.folder}, stage {position} of {len(nodes)}, which is saved"
                )
        return line


class _Waits(Exception):
    """No plan gives the facts of stage `source`."""

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.source = source


class Planned(NamedTuple):
    """A stage before it is made: `plan` (None when it exists, or cannot be planned) and its `problem`, if any.

    `state` is 'there', 'to make', or 'waits for NAME' when no plan gives the facts of that input.
    """

    name: str
    state: str
    plan: Plan | None = None
    problem: HoneError | None = None


def mistaken(row: Planned) -> bool:
    """Whether a stage cannot be planned as it is specified, whatever the machine has room for."""
    return row.problem is not None and not isinstance(row.problem, FitError)


def plan_stage(stage: Stage, out: Path, parents: Mapping[str, Artifact], run: Run) -> Planned:
    """The plan of making `out`."""
    try:
        facts = {role: facts_of(parent) for role, parent in parents.items()}
        return _plan(stage, out, facts, machine_of(run), taken=0)
    except HoneError as problem:
        return Planned(out.name, "to make", None, problem)


def _plan(stage: Stage, out: Path, facts: Mapping[str, Facts], machine: Machine, taken: float) -> Planned:
    """A stage's plan; its problem, if any, when earlier stages have `taken` so many bytes of disk."""
    if not stage.every_rank:
        machine = machine.model_copy(update={"num_ranks": 1})
    plan = stage.full_plan(facts, machine)
    has = capacity(machine, out)
    try:
        plan.must_fit({**has, DISK: has[DISK] - taken}, f"{out.name} on {machine.processor}")
    except HoneError as problem:
        return Planned(out.name, "to make", plan, problem)
    return Planned(out.name, "to make", plan)


def _finished(stage: Stage, out: Path, parents: Any, run: Run, *, forgive: bool) -> Artifact | None:
    """The finished artifact of a stage; None when it must be made. With `forgive`, also when it drifted."""
    try:
        return finished(out, kind=stage.stage, spec=stage, parents=parents, files=stage.files(), run=run)
    except DriftError:
        if forgive:
            return None
        raise


def _outside(source: str, nodes: list[Node]) -> Artifact | None:
    """The artifact in a folder given as an input; None for a stage of the recipe."""
    return None if any(node.folder == source for node in nodes) else Artifact.read(source)


def _wait_for_paths(stage: Stage, line: Path, folders: list[str]) -> None:
    """Raises _Waits when a field of `stage`, such as a tokenizer's path, names an artifact of the line that is not made yet."""
    folder = {str(line / one): one for one in folders}
    pending: list[Any] = [stage.model_dump(mode="json")]
    while pending:
        value = pending.pop()
        if isinstance(value, str) and value.rstrip("/") in folder and not (Path(value) / MANIFEST).exists():
            raise _Waits(folder[value.rstrip("/")])
        if isinstance(value, dict | list):
            pending += value.values() if isinstance(value, dict) else value


def _facts(source: str, planned: Mapping[str, Facts], there: Artifact | None) -> Facts:
    """The facts of an input. Raises _Waits when no plan gives them."""
    if there is not None:
        return facts_of(there)
    if source not in planned:
        raise _Waits(source)
    return planned[source]


def _in_turn(entries: list[list[list[Node]]]) -> Iterator[list[Node]]:
    """Every round of every entry; for neighbours with equal numbers of rounds the first of each, then the second of each, ..."""
    for _, group in groupby(entries, key=len):
        for together in zip(*group, strict=True):
            yield from together


def _rounds(entry: dict[str, Any], where: str) -> list[list[Node]]:
    """The nodes of one recipe entry, a list per repeat: one node, or one per value of `each`."""
    if not isinstance(entry, dict) or "repeats" not in entry:
        return [list(_branches(entry, where))]
    repeats, cls = entry["repeats"], stage_class(entry.get("stage", ""))
    if not isinstance(repeats, int) or isinstance(repeats, bool) or repeats < 2:
        raise SpecError(f"{where}.repeats is {repeats!r}", fix="give a whole number from 2 on, or leave repeats out")
    if "seed" not in cls.model_fields:
        raise SpecError(
            f"{where}: a {cls.stage} stage has no seed: every repeat would be the same", fix="leave repeats out"
        )
    seed = entry.get("seed", cls.model_fields["seed"].default)
    return [
        [
            node.model_copy(update={"name": f"{node.name}-{repeat}"})
            for node in _branches({**entry, "seed": seed + repeat}, where)
        ]
        for repeat in range(repeats)
    ]


def _branches(entry: dict[str, Any], where: str) -> Iterator[Node]:
    """The nodes of one recipe entry without its repeats."""
    if not isinstance(entry, dict) or "stage" not in entry:
        raise SpecError(f"{where} has no 'stage'", fix=f"write stage: NAME, one of: {', '.join(STAGES)}")
    stage_class(entry["stage"])
    inputs, each, name = entry.get("from") or {}, entry.get("each"), entry.get("name")
    if not isinstance(inputs, dict) or not _texts([*inputs.values()]):
        raise SpecError(f"{where}.from is {inputs!r}", fix="write from: {role: STAGE OR FOLDER}")
    if name is not None and (not isinstance(name, str | int | float) or "/" in str(name)):
        raise SpecError(f"{where}.name is {name!r}", fix="a name is one word, without /")
    spec = {key: value for key, value in entry.items() if key not in _RESERVED}
    if not each:
        if not entry.get("name"):
            raise SpecError(
                f"{where} ({entry['stage']}) has no 'name'", fix="add name: NAME; its folder will be STAGE-NAME"
            )
        yield Node(stage=entry["stage"], name=str(entry["name"]), inputs=inputs, spec=spec)
        return
    if not isinstance(each, dict) or len(each) != 1 or not _texts(*each.values()):
        raise SpecError(
            f"{where}.each must hold one role with a list", fix="write each: {model: [train-base, compress-int8]}"
        )
    role, sources = next(iter(each.items()))
    for source in sources:
        suffix = Path(source).name.partition("-")[2] or Path(source).name
        name = f"{entry['name']}-{suffix}" if entry.get("name") else suffix
        yield Node(stage=entry["stage"], name=name, inputs={role: source, **inputs}, spec=spec)


def _texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def stage_class(name: str) -> type[Stage]:
    """The stage named `name`. Raises SpecError with the nearest name."""
    if not isinstance(name, str) or name not in STAGES:
        hint = did_you_mean(name, STAGES)
        raise SpecError(f"unknown stage '{name}'", fix=f"{hint}the stages are: {', '.join(STAGES)}")
    return resolve(STAGES[name])


def make(
    stage: str, out: Path | str, *, run: Run | None = None, inputs: dict[str, Path | str] | None = None, **spec: Any
) -> Artifact:
    """Makes one artifact: `hone.make("compress", "work/int4", inputs={"model": FOLDER}, steps=["gptq"])`.

    `inputs` maps a role to an artifact's or Hugging Face folder; `spec` are the stage's fields.
    """
    parents = {role: Artifact.read(folder) for role, folder in (inputs or {}).items()}
    return stage_class(stage).read(spec).make(out, parents, run)
