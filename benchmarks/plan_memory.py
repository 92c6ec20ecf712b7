"""Memory that a plan says beside what the work takes, on a CPU: `python -m benchmarks.plan_memory MODEL_FOLDER --text=FILE`.

Each case is a command of its own, as a user calls it, planned before it runs. `plan` is what `hone ... --plan` prints (the whole
process), `value` what the process had at its peak, `ratio` the plan over it; `growth` is both without what the process had
before the work. MODEL_FOLDER is a small model; `--cases` picks some.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.ledger import append, table
from hone.base.artifact import Artifact
from hone.base.lazy import resolve
from hone.base.plan import MEMORY, PEAK, facts_of
from hone.base.stage import STAGES
from hone.measure.machine import describe

COMPRESS = {
    "rtn": "[rtn]",
    "gptq": "[gptq]",
    "awq+gptq": "[awq, gptq]",
    "sparsegpt": "[sparsegpt]",
}
"""Steps of each compression; all but rtn are calibrated."""


def commands(model: str, text: str, data: str, sequences: int) -> dict[str, list[str]]:
    """The command of each case, without its output folder."""
    calibration = [f"--calibration_text={text}", f"--num_sequences={sequences}"]
    made = {
        name: ["compress", model, f"--steps={steps}", *(calibration if name != "rtn" else [])]
        for name, steps in COMPRESS.items()
    }
    made["eval"] = ["eval", model, text, f"--max_tokens={sequences * 512}"]
    if data:
        made["serve"] = ["bench", model, f"--from.data={data}", "--num_requests=16"]
        made["train"] = ["train", data, "--steps=3", "--batch_size=8", "--validation.sequences=8"]
    return made


def measured(name: str, command: list[str], work: Path) -> dict[str, object]:
    """A row of the ledger: one case, planned and run."""
    out = work / f"{command[0]}-{name.replace('+', '-')}"
    quiet = subprocess.run(
        [sys.executable, "-m", "hone", *command, f"--out={out}", "--quiet"], capture_output=True, text=True
    )
    assert quiet.returncode == 0, quiet.stderr
    artifact = Artifact.read(out)
    stage = resolve(STAGES[artifact.kind]).read(artifact.manifest["spec"])
    parents = {one.partition("=")[0]: one.partition("=")[2] for one in command if one.startswith("--from.")}
    roles = {role.removeprefix("--from."): folder for role, folder in parents.items()}
    roles["data" if command[0] == "train" else "model"] = command[1]
    facts = {role: facts_of(Artifact.read(folder)) for role, folder in roles.items()}
    plan = stage.full_plan(facts, describe()).estimates
    peak, growth = artifact.figures[PEAK].value, artifact.figures[MEMORY].value
    return {
        "figure": f"peak memory of {name}, {Path(command[1]).name}",
        "value": peak,
        "unit": "B",
        "n": 1,
        "peer": "plan",
        "peer_value": plan[PEAK].value,
        "ratio": plan[PEAK].value / peak,
        "growth": growth,
        "planned_growth": plan[MEMORY].value,
        "formula": plan[MEMORY].formula,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--text", required=True, help="calibrates and is scored")
    parser.add_argument("--data", default="", help="a data stage's folder in the model's tokens, for serve and train")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--cases", nargs="*")
    parser.add_argument("--dry", action="store_true", help="only print")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="hone-memory-") as work:
        for name, command in commands(args.model, args.text, args.data, args.sequences).items():
            if args.cases and name not in args.cases:
                continue
            rows.append(measured(name, command, Path(work)))
            print(table(rows[-1:]), rows[-1]["growth"], rows[-1]["planned_growth"], rows[-1]["formula"], flush=True)
    if not args.dry:
        append("plan_memory", rows)


if __name__ == "__main__":
    main()
