"""A drawing of a net: a box for each layer, with its shape, and lines from what it takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tether.caffe.net import Net, Shape
from tether.errors import UsageError, missing_extra

#: inches between the centres of boxes, and the size of a box
ACROSS, DOWN, WIDTH, LINE = 2.6, 0.95, 2.3, 0.15
#: no figure is larger than this, in inches along an axis; larger nets are drawn smaller
INCHES_MAX = 200.0
COLOURS = {"data": "#cfe3f1", "learns": "#cdeadf", "loss": "#f7d9c4", "other": "#eeeeee"}


@dataclass
class Box:
    """A layer and those that work in place on its top."""

    title: str
    kind: str
    shapes: list[Shape]
    parents: list[int]
    in_place: list[str] = field(default_factory=list)
    row: int = 0
    place: float = 0.0

    @property
    def text(self) -> str:
        shapes = ", ".join("x".join(map(str, shape)) or "1" for shape in self.shapes)
        return "\n".join([self.title, *self.in_place, shapes])


def boxes_of(net: Net) -> list[Box]:
    """The boxes of a net, each in the row behind all that it takes."""
    learns = {blob.module for blob in net.blobs}
    boxes = [Box(f"{s.name} ({s.type})", "data", list(s.shapes), []) for s in net.sources]
    makers = {top: number for number, source in enumerate(net.sources) for top in source.tops}
    for node in net.nodes:
        parents = list(dict.fromkeys(makers[bottom] for bottom in node.bottoms))
        if node.tops == node.bottoms and len(parents) == 1:
            boxes[parents[0]].in_place.append(f"{node.name} ({node.type})")
            continue
        kind = "loss" if any(node.loss_weights) else "learns" if node.module in learns else "other"
        row = 1 + max((boxes[parent].row for parent in parents), default=-1)
        makers.update(dict.fromkeys(node.tops, len(boxes)))
        boxes.append(Box(f"{node.name} ({node.type})", kind, list(node.shapes), parents, row=row))
    _spread(boxes)
    return boxes


def _spread(boxes: list[Box]) -> None:
    """Place the boxes of each row: near what they take, without overlap, around the middle."""
    rows: dict[int, list[Box]] = {}
    for box in boxes:
        rows.setdefault(box.row, []).append(box)
    for number in sorted(rows):
        row = rows[number]
        for box in row:
            above = [boxes[parent].place for parent in box.parents]
            box.place = sum(above) / len(above) if above else 0.0
        row.sort(key=lambda box: box.place)
        wanted = sum(box.place for box in row) / len(row)
        for place, box in enumerate(row):
            box.place = place - (len(row) - 1) / 2 + wanted


def draw(net: Net, path: Path) -> None:
    """Write a drawing of a net to a file that ends in .svg, .png or .pdf."""
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise UsageError(f"{path} has the ending {path.suffix or 'of no format'}; it must be .svg, .png or .pdf")
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyBboxPatch
    except ImportError:
        raise missing_extra("matplotlib", "plot") from None
    boxes = boxes_of(net)
    rows = 1 + max(box.row for box in boxes)
    heights = [0.0] * rows
    for box in boxes:
        heights[box.row] = max(heights[box.row], LINE * (box.text.count("\n") + 1) + 0.12)
    tops = [0.0]
    for height in heights:
        tops.append(tops[-1] + height + DOWN - LINE * 3)
    left, right = min(box.place for box in boxes) - 0.6, max(box.place for box in boxes) + 0.6
    width, height = (right - left) * ACROSS, tops[-1] + 0.4
    scale = min(1.0, INCHES_MAX / max(width, height))
    figure = Figure(figsize=(width * scale, height * scale))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(left * ACROSS, right * ACROSS)
    axes.set_ylim(-height + 0.2, 0.2)
    axes.set_axis_off()
    for box in boxes:
        x, y = box.place * ACROSS, -tops[box.row]
        high = LINE * (box.text.count("\n") + 1) + 0.12
        patch = FancyBboxPatch(
            (x - WIDTH / 2, y - high),
            WIDTH,
            high,
            boxstyle="round,pad=0.02",
            fc=COLOURS[box.kind],
            ec="#4d4d4d",
            lw=0.8,
            zorder=1,
        )
        axes.add_patch(patch)
        axes.text(x, y - high / 2, box.text, ha="center", va="center", fontsize=7 * scale)
        for parent in box.parents:
            above = boxes[parent]
            end = -tops[above.row] - LINE * (above.text.count("\n") + 1) - 0.12
            arrow = {"arrowstyle": "-|>", "color": "#4d4d4d", "lw": 0.8, "shrinkA": 2, "shrinkB": 2}
            # behind the boxes that it passes
            axes.annotate("", (x, y), (above.place * ACROSS, end), arrowprops=arrow, zorder=0.5)
    try:
        # without a date, so that the same net gives the same file
        figure.savefig(path, dpi=max(20, 100 * scale), metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None
