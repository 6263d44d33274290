"""Several line charts as one SVG file, for docs/."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rlhf_core.report.plots import HEIGHT, WIDTH, Series, line_chart

COLOURS = ("#111827", "#2563eb", "#dc2626", "#16a34a", "#d97706")
GAP, TITLE = 20, 24  # pixels between charts, and above each for the names of its lines


@dataclass(frozen=True)
class Chart:
    """Lines over the same points."""

    title: str  # what is measured, with its unit
    x_title: str
    labels: Sequence[str]
    series: Sequence[Series]


def svg(charts: Sequence[Chart]) -> str:
    """Return the charts in two columns."""
    parts = [Markup("<style>{}</style>").format(Markup(_style()))]
    for index, one in enumerate(charts):
        x, y = (WIDTH + GAP) * (index % 2), (HEIGHT + TITLE) * (index // 2)
        drawn = line_chart(list(one.labels), list(one.series), x_title=one.x_title, y_title=one.title, band=(0, None))
        size = f'<svg x="{x}" y="{y + GAP}" width="{WIDTH}" height="{HEIGHT}" class="chart"'
        parts.append(Markup(str(drawn).replace('<svg class="chart"', size, 1)))
        for at, line in enumerate(one.series):
            parts.append(
                Markup('<text class="l{}" x="{}" y="{}">{}</text>').format(at, x + 56 + 72 * at, y + 14, line.label)
            )
    width, height = 2 * WIDTH + GAP, (len(charts) + 1) // 2 * (HEIGHT + TITLE)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return f"{head}{Markup().join(parts)}</svg>\n"


def _style() -> str:
    lines = ["svg { font-family: sans-serif; font-size: 11px; background: #fff }"]
    lines.append(".grid { stroke: #ddd } .tick, .axis { fill: #555 } .band { fill: none } .line { fill: none }")
    for index, colour in enumerate(COLOURS):
        lines.append(
            f".line.s{index} {{ stroke: {colour}; stroke-width: 1.8 }} .dot.s{index}, .l{index} {{ fill: {colour} }}"
        )
    return " ".join(lines)
