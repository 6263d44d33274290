"""Curves as inline SVG: no script, no library, no network. Colours come from the page's CSS (classes s0, s1, band).

Every text that enters a chart is escaped here, and the result is Markup, which a template inserts as it is.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

# Size of the drawing in SVG units; the page scales it.
WIDTH, HEIGHT = 420, 230
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 38
# Labels on the x axis that fit side by side.
_X_LABELS = 12
_Y_TICKS = 5


@dataclass(frozen=True, slots=True)
class Series:
    """One curve: a value for each position on the x axis, None where there is none."""

    label: str
    values: Sequence[float | None]
    low: Sequence[float | None] | None = None  # ends of an interval around each value
    high: Sequence[float | None] | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One labelled point of a path."""

    label: str
    x: float
    y: float


def line_chart(
    labels: Sequence[str],
    series: Sequence[Series],
    *,
    x_title: str,
    y_title: str,
    band: tuple[float | None, float | None] | None = None,
) -> Markup:
    """Draw curves over equally spaced positions.

    Args:
        labels: Name of each position, [K].
        series: Curves with K values each.
        x_title: Title of the x axis.
        y_title: Title of the y axis, with its unit.
        band: Recommended range, shaded; None at an end leaves that side open.

    Returns:
        An <svg> element, or a note in place of a chart without values.
    """
    values = [value for one in series for part in (one.values, one.low or (), one.high or ()) for value in part]
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return Markup('<p class="nodata">no values yet</p>')
    ticks = axis_ticks(*_domain(known, band))
    bottom, top = ticks[0], ticks[-1]
    parts = [_frame(ticks, x_title, y_title)]
    if band is not None:
        parts.insert(0, _band(band, bottom, top))
    step = math.ceil(len(labels) / _X_LABELS)
    for index, label in enumerate(labels):
        if index % step == 0:
            parts.append(_x_label(_spread(index, len(labels)), label))
    for number, one in enumerate(series):
        parts.append(_curve(labels, one, f"s{number}", bottom, top))
    return _svg(parts, f"{y_title} against {x_title}")


def path_chart(points: Sequence[Point], *, x_title: str, y_title: str) -> Markup:
    """Draw points joined in order, each with its label: one quantity against another.

    Args:
        points: In order; labels are drawn beside them.
        x_title: Title of the x axis, with its unit.
        y_title: Title of the y axis, with its unit.
    """
    if not points:
        return Markup('<p class="nodata">no values yet</p>')
    x_ticks = axis_ticks(*_domain([point.x for point in points], None))
    y_ticks = axis_ticks(*_domain([point.y for point in points], None))
    parts = [_frame(y_ticks, x_title, y_title)]
    for tick, text in zip(x_ticks, tick_labels(x_ticks), strict=True):
        parts.append(_x_label(_x_at(tick, x_ticks[0], x_ticks[-1]), text))
    places = [(_x_at(point.x, x_ticks[0], x_ticks[-1]), _y_at(point.y, y_ticks[0], y_ticks[-1])) for point in points]
    parts.append(Markup('<polyline class="line s0" points="{}"/>').format(_points(places)))
    for point, (x, y) in zip(points, places, strict=True):
        text = f"{point.label}: {number(point.x)}, {number(point.y)}"
        parts.append(_dot(x, y, "s0", text))
        anchor = "end" if x > WIDTH - 60 else "start"
        parts.append(
            Markup('<text class="tick" x="{}" y="{}" text-anchor="{}">{}</text>').format(
                _c(x - 7 if anchor == "end" else x + 7), _c(y - 6), anchor, point.label
            )
        )
    return _svg(parts, f"{y_title} against {x_title}")


def sparkline(values: Sequence[float | None]) -> Markup:
    """Draw a small curve without axes, for a table cell; nothing for fewer than two values."""
    known = [(index, value) for index, value in enumerate(values) if value is not None and math.isfinite(value)]
    if len(known) < 2:
        return Markup("")
    low, high = min(value for _, value in known), max(value for _, value in known)
    span = (high - low) or 1.0
    width, height = 84.0, 22.0
    places = [
        (
            3 + (width - 6) * index / (len(values) - 1),
            height - 3 - (height - 6) * ((value - low) / span if high > low else 0.5),
        )
        for index, value in known
    ]
    return Markup(
        '<svg class="spark" viewBox="0 0 84 22" width="84" height="22" aria-hidden="true">'
        '<polyline class="line s0" points="{}"/><circle class="dot s0" cx="{}" cy="{}" r="2.2"/></svg>'
    ).format(_points(places), _c(places[-1][0]), _c(places[-1][1]))


def axis_ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers, equally spaced, the first at or below low and the last at or above high.

    Args:
        low: Smallest number to show.
        high: Largest; must be above low.
    """
    raw = (high - low) / (_Y_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Counting in whole steps, so that 0 is 0 and not 5e-17.
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def number(value: float | None) -> str:
    """Return a number as people read it: three or four significant digits, no exponent where it can be avoided."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    size = abs(value)
    if float(value).is_integer() and size < 1e6:
        return f"{value:,.0f}"
    if size >= 1e6 or size < 1e-3:
        return f"{value:.2g}"
    decimals = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 10 else 3
    return f"{value:,.{decimals}f}"


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Return axis numbers with as many decimals as tell neighbours apart, and no more."""
    step = abs(ticks[1] - ticks[0])
    if step < 1e-4 or max(map(abs, ticks)) >= 1e6:
        return [number(tick) for tick in ticks]
    decimals = next(count for count in range(7) if abs(round(step, count) - step) < step * 1e-6)
    return [f"{tick:,.{decimals}f}" for tick in ticks]


def _domain(values: Sequence[float], band: tuple[float | None, float | None] | None) -> tuple[float, float]:
    """What the axis must show: all values, and the near edge of a band that they do not reach."""
    low, high = min(values), max(values)
    for edge in band or ():
        # A far edge would press the curve flat; it is shown when it is within one range of the values.
        if edge is not None and low - max(high - low, abs(high)) <= edge <= high + max(high - low, abs(high)):
            low, high = min(low, edge), max(high, edge)
    start = (band or (None, None))[0]
    if start is not None and high < start:
        high = start
    if high == low:
        margin = abs(high) * 0.1 or 1.0
        low, high = low - margin, high + margin
    return low, high


def _frame(ticks: list[float], x_title: str, y_title: str) -> Markup:
    """Grid lines with their numbers, and both titles."""
    lines = []
    for tick, text in zip(ticks, tick_labels(ticks), strict=True):
        y = _c(_y_at(tick, ticks[0], ticks[-1]))
        lines.append(
            Markup(
                '<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>'
                '<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>'
            ).format(LEFT, WIDTH - RIGHT, y, y, LEFT - 6, _c(float(y) + 3.5), text)
        )
    middle = _c(TOP + (HEIGHT - TOP - BOTTOM) / 2)
    lines.append(
        Markup('<text class="axis" x="{}" y="{}" text-anchor="middle">{}</text>').format(
            _c((LEFT + WIDTH - RIGHT) / 2), HEIGHT - 5, x_title
        )
    )
    lines.append(
        Markup('<text class="axis" x="11" y="{}" text-anchor="middle" transform="rotate(-90 11 {})">{}</text>').format(
            middle, middle, y_title
        )
    )
    return Markup("").join(lines)


def _band(band: tuple[float | None, float | None], bottom: float, top: float) -> Markup:
    low = bottom if band[0] is None else min(max(band[0], bottom), top)
    high = top if band[1] is None else max(min(band[1], top), bottom)
    upper, lower = _y_at(high, bottom, top), _y_at(low, bottom, top)
    return Markup('<rect class="band" x="{}" y="{}" width="{}" height="{}"/>').format(
        LEFT, _c(upper), WIDTH - LEFT - RIGHT, _c(max(0.0, lower - upper))
    )


def _curve(labels: Sequence[str], series: Series, style: str, bottom: float, top: float) -> Markup:
    """Line segments between neighbouring values, intervals as whiskers, and a dot with a tooltip at each value."""
    places = [
        None if value is None else (_spread(index, len(labels)), _y_at(value, bottom, top))
        for index, value in enumerate(series.values)
    ]
    parts = [
        Markup('<polyline class="line {}" points="{}"/>').format(style, _points([first, second]))
        for first, second in itertools.pairwise(places)
        if first is not None and second is not None
    ]
    for index, place in enumerate(places):
        if place is None:
            continue
        text = f"{series.label}, {labels[index]}: {number(series.values[index])}"
        low = series.low[index] if series.low is not None else None
        high = series.high[index] if series.high is not None else None
        if low is not None and high is not None:
            text += f" ({number(low)} to {number(high)})"
            parts.append(
                Markup('<line class="whisker {}" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
                    style, _c(place[0]), _c(place[0]), _c(_y_at(low, bottom, top)), _c(_y_at(high, bottom, top))
                )
            )
        parts.append(_dot(*place, style, text))
    return Markup("").join(parts)


def _dot(x: float, y: float, style: str, text: str) -> Markup:
    return Markup('<circle class="dot {}" cx="{}" cy="{}" r="3"><title>{}</title></circle>').format(
        style, _c(x), _c(y), text
    )


def _x_label(x: float, label: str) -> Markup:
    return Markup('<text class="tick" x="{}" y="{}" text-anchor="middle">{}</text>').format(
        _c(x), HEIGHT - BOTTOM + 15, label
    )


def _svg(parts: Sequence[Markup], title: str) -> Markup:
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, HEIGHT, escape(title), Markup("").join(parts)
    )


def _spread(index: int, count: int) -> float:
    """x of a position: equally spaced with half a step at both ends, one alone in the middle."""
    inner = WIDTH - LEFT - RIGHT
    return LEFT + inner * (index + 0.5) / count


def _x_at(value: float, low: float, high: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low)


def _y_at(value: float, low: float, high: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_c(x)},{_c(y)}" for x, y in places)


def _c(value: float) -> str:
    """A coordinate with one decimal."""
    return f"{value:.1f}"
