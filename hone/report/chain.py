"""The chain as a picture: artifacts as nodes, inputs as lines, laid out from the parents."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

from markupsafe import Markup

from hone.report import arms, units
from hone.report.collect import KINDS, Line, Row
from hone.report.svg import drawing, el, fit, group, line, rect, text, text_width

HEADLINES = {
    "data": ("kept_bytes", "train_tokens"),
    "train": ("num_params", "val_bits_per_byte", "val_loss"),
    "compress": ("model_bytes", "compression_ratio"),
    "eval": ("perplexity", "kl_to_reference"),
    "serve": ("tokens_per_s", "acceptance_rate", "ttft_p50_s"),
}
_MEASURING = ("eval", "serve")
_TALL, _LOW, _GAP = 64.0, 44.0, 10.0


@dataclass
class Node:
    """One box: an artifact or an input from outside. `depth` is its column, `y` the middle of its band."""

    id: str
    kind: str
    name: str
    headlines: list[str]
    row: Row | None = None
    main: str | None = None
    others: list[tuple[str, str]] = field(default_factory=list)
    depth: int = 0
    y: float = 0.0

    @property
    def height(self) -> float:
        return _TALL if self.kind in ("data", "train") else _LOW

    @property
    def tooltip(self) -> str:
        if self.row is None:
            return f"{self.name}: from outside this line"
        inputs = ", ".join(f"{parent.role} {parent.name}" for parent in self.row.parents)
        return f"{self.id}: {', '.join(self.headlines) or 'no figures'}" + (f"; made from {inputs}" if inputs else "")


def headlines(row: Row) -> list[str]:
    """The two most informative figures of an artifact of this kind, in words."""
    words = {
        "kept_bytes": "{} kept",
        "num_params": "{} parameters",
        "compression_ratio": "{} smaller",
        "perplexity": "perplexity {}",
        "kl_to_reference": "KL {}",
        "val_loss": "loss {}",
        "val_bits_per_byte": "{}",
        "acceptance_rate": "{} accepted",
        "ttft_p50_s": "first token {}",
    }
    found = []
    for name in HEADLINES.get(row.kind, tuple(row.figures)):
        value = row.value(name)
        if value is not None and len(found) < 2:
            unit = row.figures[name].unit
            bare = name in ("num_params", "kl_to_reference", "val_loss")
            shown = units.show(value, "" if bare else unit, name).replace("tokens/s", "tok/s")
            found.append("same size" if shown == "1.00x" else words.get(name, "{}").format(shown))
    return found


def _mean_rate(arm: arms.Arm) -> list[str]:
    """The rate of a serving arm with several runs, as the mean of its runs."""
    rates = arm.values("tokens_per_s")
    return [f"{units.show(fmean(rates), 'tokens/s').replace('tokens/s', 'tok/s')} on average"] if rates else []


def layout(line_: Line) -> list[Node]:
    """Nodes with columns (longest path from an input; measurements in the last) and disjoint vertical bands.

    Each node is placed below one main parent: its model, else the first parent without a longer path to it. Of the other
    inputs only those that no longer path implies are kept as `others`. Serving runs of one arm are one node.
    """
    nodes = {
        parent.id: Node(parent.id, "foreign", parent.name.removeprefix("foreign-"), ["from outside"])
        for parent in line_.foreign
    }
    repeats = {arm.rows[0].id: arm for arm in arms.serving(line_) if len(arm.rows) > 1}
    hidden = {row.id for arm in repeats.values() for row in arm.rows[1:]}
    rows = [row for row in line_.rows if row.id not in hidden]
    for row in rows:
        arm = repeats.get(row.id)
        name, words = (f"{arm.name} x{len(arm.rows)}", _mean_rate(arm)) if arm else (row.name, headlines(row))
        nodes[row.id] = Node(row.id, row.kind, name, words, row)
    ancestors: dict[str, set[str]] = {id: set() for id in nodes}
    for row in rows:
        node = nodes[row.id]
        known = [
            parent for parent in row.parents if parent.id in nodes and row.id not in ancestors[parent.id] | {parent.id}
        ]
        for parent in known:
            ancestors[row.id] |= {parent.id} | ancestors[parent.id]
            node.depth = max(node.depth, nodes[parent.id].depth + 1)
        direct = {p.id: p.role for p in known if not any(p.id in ancestors[q.id] for q in known)}
        model = row.parent("model")
        node.main = model.id if model in known and model else next(iter(direct), None)
        node.others = [(id, role) for id, role in direct.items() if id != node.main]
    last = max(node.depth for node in nodes.values())
    for node in nodes.values():
        if node.kind in _MEASURING:
            node.depth = last
    _bands(nodes)
    return list(nodes.values())


def children(nodes: dict[str, Node], id: str | None) -> list[Node]:
    """Nodes whose main parent is `id`: measurements first, then by stage, in the line's order."""
    order = {
        kind: place for place, kind in enumerate((*_MEASURING, *(kind for kind in KINDS if kind not in _MEASURING)))
    }
    below = [node for node in nodes.values() if node.main == id]
    return sorted(below, key=lambda node: order.get(node.kind, len(order)))


def _bands(nodes: dict[str, Node]) -> None:
    """Gives every subtree its own band, so that a line at a node's height crosses no other node."""

    def place(node: Node, top: float) -> float:
        below = children(nodes, node.id)
        bottom = top
        for child in below:
            bottom = place(child, bottom)
        bottom = max(bottom, top + node.height + _GAP)
        node.y = (below[0].y + below[-1].y) / 2 if len(below) > 1 else below[0].y if below else 0.0
        node.y = (
            min(max(node.y, top + (node.height + _GAP) / 2), bottom - (node.height + _GAP) / 2)
            if below
            else (top + bottom) / 2
        )
        return bottom

    top = 0.0
    for root in children(nodes, None):
        top = place(root, top)


def chain(line_: Line, width: float, anchors: dict[str, str] | None = None) -> Markup:
    """The picture, left to right; from top to bottom as an outline for a phone's `width`.

    `anchors` maps artifact ids to the page's anchors, to which their boxes are linked.
    """
    anchors = anchors or {}
    nodes = layout(line_)
    label = f"How the {len(line_.rows)} artifacts of {line_.name} were made from each other"
    if width < 600:
        return _outline({node.id: node for node in nodes}, width, label, anchors)
    columns = max(node.depth for node in nodes) + 1
    gap = 44.0
    box = max(150.0, min(250.0, (width - gap * (columns - 1)) / columns))
    full = box * columns + gap * (columns - 1)
    place = {node.id: (node.depth * (box + gap), node.y) for node in nodes}
    height = max(node.y + node.height / 2 for node in nodes) + 4
    parts = []
    for node in nodes:
        x, y = place[node.id]
        sources = ([(node.main, "")] if node.main else []) + node.others
        for source, role in sources:
            from_x, from_y = place[source]
            parts.append(
                _curve(
                    from_x + box,
                    from_y,
                    x,
                    y,
                    gap,
                    "link aside" if role else "link",
                    f"{node.id} takes {source}" + (f" as {role}" if role else ""),
                )
            )
    parts += [_linked(node, _box(node, *place[node.id], box), anchors) for node in nodes]
    return drawing(full, height, label, *parts, role="group" if anchors else "img")


def _curve(x1: float, y1: float, x2: float, y2: float, gap: float, class_: str, title: str) -> Markup:
    """A curve that bends within the first gap, then runs straight, because the target's band is free up to it."""
    turn = x1 + gap
    d = f"M{x1:.1f} {y1:.1f}C{x1 + gap * 0.6:.1f} {y1:.1f} {turn - gap * 0.6:.1f} {y2:.1f} {turn:.1f} {y2:.1f}L{x2:.1f} {y2:.1f}"
    return el("path", el("title", title), d=d, class_=class_)


def _box(node: Node, x: float, y: float, width: float) -> Markup:
    top, inner = y - node.height / 2, width - 24
    kind_width = text_width(node.kind, 11.5) + 6
    parts = [
        rect(x + 0.5, top + 0.5, width - 1, node.height - 1, f"node {node.kind}", 5),
        rect(x, top, 4, node.height, f"mark {node.kind}", 2),
        text(x + 14, top + 18, node.kind, "kind"),
        text(x + 14 + kind_width, top + 18, fit(node.name, inner - kind_width, 13), "name"),
    ]
    if node.height == _LOW or len(node.headlines) < 2:
        parts.append(text(x + 14, top + 35, fit(" · ".join(node.headlines), inner, 12), "headline"))
    else:
        parts += [
            text(x + 14, top + 36 + 16 * n, fit(words, inner, 12), "headline")
            for n, words in enumerate(node.headlines[:2])
        ]
    return group(node.tooltip, *parts)


def _linked(node: Node, box: Markup, anchors: dict[str, str]) -> Markup:
    """The box, linked to the artifact's figures if `anchors` has it."""
    return el("a", box, href=f"#{anchors[node.id]}", aria_label=node.tooltip) if node.id in anchors else box


def _outline(nodes: dict[str, Node], width: float, label: str, anchors: dict[str, str]) -> Markup:
    """Top to bottom with indents, for a narrow screen without horizontal scrolling."""
    parts: list[Markup] = []
    height = 48.0

    def draw(node: Node, depth: int, y: float) -> float:
        x = depth * 15.0
        bottom = y + height
        inner = width - x - 22
        kind_width = text_width(node.kind, 11.5) + 6
        beside = [f"with {nodes[id].id} as {role}" for id, role in node.others]
        box = group(
            node.tooltip,
            rect(x + 0.5, y + 0.5, width - x - 1, height - 7, f"node {node.kind}", 5),
            rect(x, y, 4, height - 6, f"mark {node.kind}", 2),
            text(x + 13, y + 17, node.kind, "kind"),
            text(x + 13 + kind_width, y + 17, fit(node.name, inner - kind_width, 13), "name"),
            text(
                x + 13, y + 34, fit(" · ".join([*node.headlines[: 1 if beside else 2], *beside]), inner, 12), "headline"
            ),
        )
        parts.append(_linked(node, box, anchors))
        below = children(nodes, node.id)
        for child in below:
            middle = bottom + (height - 6) / 2
            parts.append(line(x + 6, middle, x + 15, middle, "link"))
            last_middle = middle
            bottom = draw(child, depth + 1, bottom)
        if below:
            parts.insert(0, line(x + 6, y + height - 6, x + 6, last_middle, "link"))
        return bottom

    y = 0.0
    for root in children(nodes, None):
        y = draw(root, 0, y)
    return drawing(width, y, label, *parts, role="group" if anchors else "img")
