"""docs/reference.md and its picture from a run of benchmarks.reference_run; without one the page says how to make it.

python -m benchmarks.reference_run --page RESULT.json    # also keeps the figures as benchmarks/ledger/reference.json
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from markupsafe import Markup

from benchmarks.train import SHEET_PEAK
from hone.report.charts import smooth, thin
from hone.report.page import standalone
from hone.report.svg import Scale, drawing, group, line, padded_domain, path, text, x_axis, y_axis
from hone.report.svg import dot as circle

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "benchmarks" / "ledger" / "reference.json"
PAGE = ROOT / "docs" / "reference.md"
PICTURE = ROOT / "docs" / "reference.svg"
WINDOW = 20
"""Steps on both sides of the join whose mean losses are compared."""

HEAD = """# A training from start to end

[recipes/reference.yaml](../recipes/reference.yaml) makes everything from text: a tokenizer, packed books and code without duplicates and with a val split each, a
model of {params} weights, and its bits per byte on both. Give it your own folders of text:

```bash
hone plan recipes/reference.yaml --data-tokenizer.source='[BOOKS, CODE]' --data-books.source=BOOKS --data-code.source=CODE --device=cuda
hone run recipes/reference.yaml --data-tokenizer.source='[BOOKS, CODE]' --data-books.source=BOOKS --data-code.source=CODE --device=cuda --nproc_per_node=2
```

Without these options the text is in `texts/books` and `texts/code`. What was chosen, and why:

| choice | reason |
|---|---|
| a tokenizer of its own, 16,384 tokens | its embedding is 12 % of the weights; GPT-2's 50,257 tokens would be 30 % of such a model, Qwen2's 151,936 more than half |
| books in pieces of 20,000 characters | the val split has some pieces of every book; its loss is that of unseen pages of known books, not of unseen books |
| `unimax`, at most 8 epochs | books are few: they are read as often as that allows, code has the rest. Up to 4 epochs cost little (arXiv:2305.16264); beyond that the loss on their val split has to be watched |
| `muon` | by far the lowest loss at equal steps in [optimizers.md](optimizers.md#optimizers), with half of AdamW's state |
| `wsd` | the learning rate does not depend on the length before it decays, so the training can be prolonged from its stable phase |
| bf16, compiled layers, documents masked | what a GPU is fast with; tokens attend to their own document alone |
"""
COMMANDS = """## Making this page
```bash
hone run recipes/reference.yaml --data-tokenizer.source='[BOOKS, CODE]' --data-books.source=BOOKS --data-code.source=CODE --work=work
python -m benchmarks.reference_run --pack work/reference --data .refdata      # the packed tokens, for a machine without the text
python -m benchmarks.reference_run --data .refdata --out OUT --minutes 9      # on the machine with GPUs; --steps=1400: no calibration, no trials
python -m benchmarks.reference_run --page OUT/result.json
```
"""
NO_RUN = """
## The run
There is none yet on this page: the figures, the curve and the predictions beside them are written by the last of the commands below.
"""


def joined(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of the whole training: its steps.jsonl as the second layout left it."""
    return [row for row in result["second"]["rows"] if row.get("loss") is not None]


def overlap(result: dict[str, Any]) -> list[tuple[int, float, float]]:
    """(step, loss in the first layout, loss in the second) of the steps that both made."""
    first = {row["step"]: row["loss"] for row in result["first"]["rows"] if row.get("loss") is not None}
    return [(row["step"], first[row["step"]], row["loss"]) for row in joined(result)
            if row["step"] > result["join"] and row["step"] in first]  # fmt: skip


def jump(result: dict[str, Any], window: int = WINDOW) -> tuple[float, float, int, int]:
    """(change of the mean loss over the join, its standard deviation elsewhere, how many other places change more, number of places).

    A place is a step with `window` steps on both sides, all at the peak learning rate; the second is the standard deviation of
    the changes at the places whose steps are not those of the join.
    """
    rows, join = joined(result), result["join"]
    peak = max(row["lr"] for row in rows)
    losses = {
        row["step"]: row["loss"] for row in rows if row["lr"] >= 0.999 * peak or abs(row["step"] - join) <= window
    }

    def change(at: int) -> float | None:
        after, before = range(at + 1, at + 1 + window), range(at - window + 1, at + 1)
        if any(step not in losses for step in (*after, *before)):
            return None
        return statistics.fmean(losses[step] for step in after) - statistics.fmean(losses[step] for step in before)

    here = change(join)
    if here is None:
        raise ValueError(f"the run has no {window} steps on both sides of step {join}")
    others = [found for at in losses if abs(at - join) > window and (found := change(at)) is not None]
    deviation = statistics.stdev(others) if len(others) > 1 else float("nan")
    return here, deviation, sum(abs(one) >= abs(here) for one in others), len(others)


def picture(result: dict[str, Any], width: float = 760) -> Markup:
    """The training loss (faint: steps, dark: running mean), the validation loss, and the join as a dashed line with both layouts' names."""
    rows, join = joined(result), result["join"]
    train = [(row["step"], row["loss"]) for row in rows]
    val = [(row["step"], row["val_loss"]) for row in result["second"]["rows"] if row.get("val_loss") is not None]
    left, right, top, bottom, height = 44.0, 16.0, 30.0, 34.0, 320.0
    curve = smooth(train, max(3, len(train) // 60))
    late = [loss for step, loss in train if step > len(train) // 25] + [loss for _, loss in val]
    low, high = padded_domain(late, log=False, pad=0.06)
    x, y = Scale(1, train[-1][0], left, width - right), Scale(low, high, height - bottom, top)
    at = lambda points: [(x(a), y(min(max(b, low), high))) for a, b in points]  # noqa: E731
    parts: list[Any] = [x_axis(x, height - bottom), y_axis(y, left, width - right)]
    parts += [text(width - right, height - 4, "step", "tick", "end"), text(left, 12, "loss, nats/token", "tick")]
    parts += [path(at(thin(train, 800)), "raw"), path(at(curve), "curve")]
    if val:
        parts.append(path(at(val), "val"))
        parts += [group(f"step {a}: validation loss {b:.4f}", circle(px, py, 3, "valdot"))
                  for (px, py), (a, b) in zip(at(val), val, strict=True)]  # fmt: skip
        parts.append(text(width - right, top + 30, f"validation {val[-1][1]:.3f}", "vallabel", "end"))
    parts.append(text(width - right, top + 14, f"training {curve[-1][1]:.3f}", "curvelabel", "end"))
    parts.append(line(x(join), top - 8, x(join), height - bottom, "leader"))
    first, second = result["layouts"]
    parts += [text(x(join) - 6, top - 12, f"{first}", "fact", "end"), text(x(join) + 6, top - 12, f"{second}", "fact")]
    said = f"Loss over {train[-1][0]} steps; after step {join} the training goes on in another layout"
    return drawing(width, height, said, *parts)


def _head(params: float | None = None) -> str:
    return HEAD.format(params=f"{params / 1e6:.0f} M" if params else "about 100 M")


def page(result: dict[str, Any] | None) -> str:
    """The text of docs/reference.md."""
    if result is None:
        return "\n".join([_head() + NO_RUN, COMMANDS])
    figures = {one["name"]: one for one in result.get("figures", [])}
    value = lambda name: figures[name]["value"] if name in figures else None  # noqa: E731
    parts = [
        _head(value("num_params")),
        "## The run",
        _what(result, value),
        "![The loss over the join](reference.svg)\n",
    ]
    parts += ["## The join", _join(result), "## Speed, memory, energy", _speed(result)]
    if result.get("evals"):
        parts += ["## What it learned", _learned(result)]
    parts += ["## The data", _data(result), COMMANDS]
    return "\n".join(parts)


def _what(result: dict[str, Any], value: Any) -> str:
    """One paragraph: where, how many steps, how it ended."""
    rows, gpus = joined(result), result["machine"].get("gpus") or []
    where = f"{len(gpus)} x {gpus[0]['name']}" if gpus else result["machine"]["cpu"]
    spec = result["recipe"]
    said = f"On {where}, torch {result['machine']['torch']}, commit {str(result['made'].get('commit'))[:7]}: "
    said += f"{rows[-1]['step']} of {result['steps']} steps of {spec['batch_size']} x {spec['seq_len']} tokens"
    said += (
        f" (the recipe has {result['steps_wanted']}; so many fit into the time)"
        if result["steps"] < result["steps_wanted"]
        else ""
    )
    said += f", {rows[-1]['tokens'] / 1e6:.0f} M tokens"
    if value("epochs") is not None:
        apart = [
            f"{value(f'epochs_{one}'):.1f} of {one}" for one in ("books", "code") if value(f"epochs_{one}") is not None
        ]
        said += f", {value('epochs'):.1f} epochs" + (f" ({', '.join(apart)})" if apart else "")
    if result.get("wall_s"):
        trials = "trials of both layouts, " if result.get("trials") else ""
        said += f". {result['wall_s'] / 60:.1f} minutes with unpacking, {trials}two starts and all evaluations"
    if result["second"]["code"] != 0:
        said += ". **It did not end by itself: its time was over**"
    elif rows[-1]["step"] < result["steps"]:
        said += ". **It ended early, because its time was over: the learning rate did not come down to its floor**"
    failed = result.get("layouts_failed") or []
    said += f". Tried and left out, because their trial failed: {', '.join(failed)}" if failed else ""
    small = (
        "\n\n**This is a trial of the script with a tiny model: no figure of it means anything.**"
        if result["small"]
        else ""
    )
    return said + "." + small + "\n"


def _join(result: dict[str, Any]) -> str:
    """What happened there: the steps that both layouts made, and the change of the mean loss beside other places."""
    both, (first, second), join = overlap(result), result["layouts"], result["join"]
    lines = [f"All ranks ({first}) were killed with SIGKILL after step {result['first']['rows'][-1]['step']}; the same command with another `--parallelism` "
             f"({second}) went on from the checkpoint of step {join}."]  # fmt: skip
    if both:
        gaps = [abs(one - other) for _, one, other in both]
        lines.append(f"The {len(both)} steps between were made in both layouts, of the same sequences and from the same weights: their losses differ by "
                     f"{statistics.fmean(gaps):.2g} nats on average and {max(gaps):.2g} at most, at a loss of {both[0][1]:.3f}.")  # fmt: skip
    window = min(WINDOW, max(join // 3, 2))
    change, deviation, more, places = jump(result, window)
    lines.append(f"The mean loss of the {window} steps after the join is {change:+.4f} nats from that of the {window} before it; over {places} other places at the peak "
                 f"learning rate this change has a standard deviation of {deviation:.4f}, and it is at least as large at {more} of them.")  # fmt: skip
    rows = ["", f"| step | {first} | {second} | difference |", "|---|---|---|---|"]
    shown = both if len(both) <= 6 else [both[0], both[1], both[len(both) // 2], both[-2], both[-1]]
    rows += [f"| {step} | {one:.5f} | {other:.5f} | {other - one:+.5f} |" for step, one, other in shown]
    return "\n".join([*lines, *(rows if both else []), ""])


def _speed(result: dict[str, Any]) -> str:
    """Both layouts, measured beside predicted."""
    gpus = result["machine"].get("gpus") or []
    sheet = next((peak for name, peak in SHEET_PEAK.items() if gpus and name in gpus[0]["name"]), None)
    calibrated = result["calibrated"]
    rate_of = "predicted" if calibrated else "bound"
    lines = ["Medians over the steps of each part; memory and energy are of rank 0's GPU. Predicted: `hone train --plan` on the same machine, "
             + ("calibrated." if calibrated else "not calibrated, so that its rate is a bound, not a prediction."), "",
             f"| layout | steps | tokens/s | {rate_of} | MFU | memory | predicted | J a token |", "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for place, (part, name) in enumerate(zip(("first", "second"), result["layouts"], strict=True)):
        found, told = result[part]["pace"], result["predicted"][name]
        if not found:
            continue
        rate = told["tokens_per_s"]["value"]
        mfu = found.get("mfu")
        if not calibrated and sheet:
            mfu = found["tokens_per_s"] * result["model_flops_per_token"] / (result["ranks"][place] * sheet)
        memory = told.get("memory_growth_bytes") or told.get("peak_memory_bytes")
        cells = [
            name,
            found["steps"],
            f"{found['tokens_per_s']:,.0f}",
            f"{rate:,.0f}",
            f"{mfu:.1%}" if mfu else "",
        ]
        cells += [f"{found['memory_bytes'] / 2**30:.1f} GiB", f"{memory['value'] / 2**30:.1f} GiB" if memory else ""]
        cells += [f"{found['joules_per_token']:.2g}" if found.get("joules_per_token") else ""]
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    measured = "the matmul rate that was measured when the machine was calibrated"
    mfu_of = measured + (f"; the data sheet says {sheet / 1e12:.0f} TFLOP/s" if sheet else "")
    if not calibrated:
        mfu_of = f"the data sheet's {sheet / 1e12:.0f} TFLOP/s" if sheet else "no rate: none was measured"
    lines += [
        "",
        f"Tokens/s are those of steps alone, without evaluations, checkpoints and starts. MFU is relative to {mfu_of}.",
    ]
    figures = [one for one in result.get("figures", []) if one["name"] in ("time_s", "energy_j", "peak_memory_bytes")]
    rows = [f"| {one['name']} | {one['value']:.4g} {one['unit']} | {one['estimate']['value']:.4g} |"
            for one in figures if one.get("value") is not None and one.get("estimate") and not one["estimate"].get("bound")]  # fmt: skip
    if rows:
        lines += [
            "",
            "The finished stage as its record has it, where a plan is that of the second layout for all steps:",
            "",
            "| | measured | predicted |",
            "|---|---|---|",
            *rows,
        ]
    return "\n".join([*lines, ""])


def _learned(result: dict[str, Any]) -> str:
    """Bits per byte of the kept models on both val splits."""
    lines = [
        "| model after step | books, bits/byte | code, bits/byte | books, perplexity (bigram) | code, perplexity (bigram) |",
        "|---|---|---|---|---|",
    ]
    rows = sorted(result["evals"], key=lambda row: result["steps"] if row["step"] == "end" else row["step"])
    for row in rows:
        cells = [str(row["step"])] + [f"{row[one]['bits_per_byte']:.3f}" for one in ("books", "code")]
        cells += [f"{row[one]['perplexity']:.1f} ({row[one]['bigram_perplexity']:.0f})" for one in ("books", "code")]
        lines.append(f"| {' | '.join(cells)} |")
    for one in ("books", "code"):
        best = min(rows, key=lambda row: row[one]["bits_per_byte"])
        if best is not rows[-1]:
            said = f"On {one} the model after step {best['step']} was the best: what is read so often is learnt by heart at last"
            lines += ["", f"{said} (`mixture.max_epochs` is {result['recipe']['mixture'].get('max_epochs', '1')})."]
    return "\n".join([*lines, ""])


def _data(result: dict[str, Any]) -> str:
    """What the data stages read and kept."""
    lines = ["| | documents read | kept | train tokens | val tokens | bytes a token |", "|---|---|---|---|---|---|"]
    for name, one in result["data"].items():
        steps, train, val = one["steps"], one["splits"]["train"], one["splits"]["val"]
        cells = [
            name,
            steps[0]["documents_in"],
            steps[-1]["documents_out"],
            f"{train['tokens']:,}",
            f"{val['tokens']:,}",
        ]
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} | {train['bytes'] / train['tokens']:.2f} |")
    said = [result["text"], ""] if result.get("text") else []
    return "\n".join([*said, *lines, ""])


def write(path: Path, kept: Path = KEPT, target: Path = PAGE, drawn: Path = PICTURE) -> None:
    """The page and its picture from the result in `path`, of which the rows and figures are kept in the ledger's folder."""
    result = json.loads(path.read_text(encoding="utf8"))
    missing = [part for part in ("first", "second", "predicted", "machine") if part not in result]
    if missing:
        raise SystemExit(f"{path} is of a run that did not come so far: it has no {', '.join(missing)}")
    columns = ("step", "loss", "lr", "tokens", "val_loss", "val_bits_per_byte")
    for part in ("first", "second"):
        result[part]["rows"] = [{name: row[name] for name in columns if name in row} for row in result[part]["rows"]]
    target.write_text(page(result), encoding="utf8")
    drawn.write_text(standalone(picture(result)), encoding="utf8")
    kept.write_text(json.dumps(result) + "\n", encoding="utf8")
    print(f"{target}\n{drawn}\n{kept}")


def newest() -> dict[str, Any] | None:
    """The run that the page shows, if there is one."""
    return json.loads(KEPT.read_text(encoding="utf8")) if KEPT.exists() else None


if __name__ == "__main__":
    PAGE.write_text(page(newest()), encoding="utf8")
