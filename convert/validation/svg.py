"""Two pictures as inline SVG: a heat map of layers by modules, and lines over positions.

Drawn by hand: a report must be one file that needs no network and no plotting library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, isfinite, log10

_CELL = 18
_LABEL = 190
_CHARACTER = 6.2
_WIDTH, _HEIGHT = 720, 220
_LEFT, _BOTTOM, _TOP = 58, 34, 12
_COLOURS = ("#1f5fa8", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#0e7490", "#be123c")


def heat_map(values: Mapping[tuple[str, int], float | None], title: str) -> str:
    """Cells of layers (columns) by modules (rows), darker for larger values, on a log scale.

    Args:
        values: (module, layer) to a value of 0 or more; None for one that is not known.
        title: For those who cannot see it.
    """
    modules = list(dict.fromkeys(module for module, _ in values))
    layers = sorted({layer for _, layer in values})
    known = [v for v in values.values() if v and isfinite(v)]
    low, high = (min(known), max(known)) if known else (1.0, 1.0)
    scale = (
        f"layer; white is 0, lightest {low:.2g}, darkest {high:.2g}"
        if known
        else "layer; white is 0"
    )
    if any(v is not None and not isfinite(v) for v in values.values()):
        scale += ", red not finite"
    width = _LABEL + max(_CELL * len(layers) + 10, ceil(_CHARACTER * len(scale)))
    height = _CELL * (len(modules) + 2)
    parts = [_open(width, height, title)]
    for row, module in enumerate(modules):
        y = _CELL * (row + 1)
        parts.append(_text(_LABEL - 6, y + 13, _fitted(module), "end"))
        for column, layer in enumerate(layers):
            if (module, layer) not in values:
                continue
            value = values[module, layer]
            told = "unknown" if value is None else f"{value:.3g}"
            parts.append(
                f'<rect x="{_LABEL + _CELL * column}" y="{y}" width="{_CELL - 1}" '
                f'height="{_CELL - 1}" fill="{_shade(value, low, high)}" stroke="#d4d4d8" '
                f'stroke-width="0.5"><title>{escape(module)}, layer {layer}: {told}</title></rect>'
            )
    step = max(1, ceil(len(layers) / 16))
    for column, layer in enumerate(layers):
        if column % step == 0:
            x = _LABEL + _CELL * column + _CELL / 2
            parts.append(_text(x, _CELL - 5, str(layer), "middle"))
    parts.append(_text(_LABEL, height - 4, scale, "start"))
    return "".join([*parts, "</svg>"])


def line_chart(
    series: Mapping[str, Sequence[tuple[float, float]]], title: str, x_label: str, y_label: str
) -> str:
    """Lines on a logarithmic y axis; values of 0 stand on the floor.

    Args:
        series: Name to (x, y) points, y of 0 or more.
        title: For those who cannot see it.
        x_label: What the x axis shows.
        y_label: What the y axis shows.
    """
    points = [point for line in series.values() for point in line]
    positive = [y for _, y in points if 0 < y < float("inf")]
    low = floor(log10(min(positive))) if positive else 0
    high = max(ceil(log10(max(positive))) if positive else 1, low + 1)
    right = max((x for x, _ in points), default=1.0) or 1.0
    plot_width, plot_height = _WIDTH - _LEFT - 12, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> str:
        level = log10(y) if 0 < y < float("inf") else (high if y else low)
        up = (min(max(level, low), high) - low) / (high - low)
        return f"{_LEFT + plot_width * x / right:.1f},{_TOP + plot_height * (1 - up):.1f}"

    legend_rows = ceil(len(series) / 4)
    parts = [_open(_WIDTH, _HEIGHT + 18 * legend_rows, title)]
    for level in range(low, high + 1, max(1, (high - low) // 5)):
        y = _TOP + plot_height * (1 - (level - low) / (high - low))
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e7"/>'
        )
        parts.append(_text(_LEFT - 6, y + 4, f"1e{level}", "end"))
    for tick in sorted({round(right * share) for share in (0, 0.25, 0.5, 0.75, 1)}):
        x = _LEFT + plot_width * tick / right
        parts.append(_text(x, _HEIGHT - _BOTTOM + 16, str(tick), "middle"))
    parts.append(_text(_LEFT + plot_width / 2, _HEIGHT - 4, f"{x_label}; {y_label}", "middle"))
    for i, (name, line) in enumerate(series.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        path = " ".join(place(x, y) for x, y in line)
        if len(line) == 1:
            path = f"{path} {path}"
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.3" '
            'stroke-linecap="round"/>'
        )
        x, y = _LEFT + 160 * (i % 4), _HEIGHT + 12 + 18 * (i // 4)
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 14, y, name, "start"))
    return "".join([*parts, "</svg>"])


def _open(width: float, height: float, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'style="min-width:{min(width, 420)}px;max-width:{width * 1.4:.0f}px" role="img" '
        f'aria-label="{escape(title)}" font-size="11" font-family="sans-serif" fill="#27272a">'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _fitted(text: str) -> str:
    most = int((_LABEL - 10) / _CHARACTER)
    return text if len(text) <= most else "…" + text[-most + 1 :]


def _shade(value: float | None, low: float, high: float) -> str:
    if value is None:
        return "#a1a1aa"
    if value == 0:
        return "#ffffff"
    if not isfinite(value):
        return "#be123c"
    share = 1.0 if low == high else log10(value / low) / log10(high / low)
    light, dark = (219, 234, 254), (23, 37, 84)
    mixed = (round(a + (b - a) * share) for a, b in zip(light, dark, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)
