"""The pictures of the HTML report, as SVG: the heat map, the growth of the error, the logits."""

from __future__ import annotations

import math
from html import escape

from .compare_logits import LogitComparison
from .compare_steps import place
from .compare_table import WRONG, Comparison, Row
from .report import number

# Relative errors are coloured in ten steps from this to 1, by their logarithm.
FLOOR = 1e-8
STEPS = 10
CELL, GAP, TOP = 20, 2, 26
# What a card is wide inside, on a phone.
PHONE = 320
_ROUND = [digit * 10**power for power in range(9) for digit in (1, 2, 5)]


def shade(error: float) -> int:
    """Which of the ten colours an error has; 0 is none at all or next to it."""
    if math.isnan(error) or error <= FLOOR:
        return 0
    share = 1 - math.log10(min(error, 1.0)) / math.log10(FLOOR)
    return min(STEPS - 1, int(share * STEPS))


def tails(table: Comparison) -> list[str]:
    """The sites that some layer has, in their order; the heat map's lines."""
    found = {row.tail for row in table.rows if row.layer is not None}
    return sorted(found, key=place)


def heat_map(table: Comparison, room: int = 790, least: int = CELL) -> str:
    """Layers from left to right, sites from top to bottom; empty where there is no layer.

    As wide as `room` unless a layer would be narrower than `least`.
    """
    lines = {tail: i for i, tail in enumerate(tails(table))}
    layers = {layer.layer: i for i, layer in enumerate(table.layers)}
    if not layers:
        return ""
    left = 8 + round(6.6 * max(map(len, lines)))
    width = max(least, min(64, round((room - left - 4) / len(layers), 1)))
    gap = min(GAP, width / 4)
    size = left + len(layers) * width + 4, TOP + len(lines) * CELL + 4
    out = [_open(*size, "Relative error of every site, by layer")]
    every = max(1, math.ceil(20 / width))
    for layer, i in layers.items():
        if i % every == 0:
            x = left + (i + 0.5) * width
            out.append(f'<text x="{x:.0f}" y="16" text-anchor="middle">{layer}</text>')
    for tail, i in lines.items():
        y = TOP + i * CELL + CELL / 2 + 3
        out.append(
            f'<text class="name" x="{left - 8}" y="{y}" text-anchor="end">{escape(tail)}</text>'
        )
    first = table.first_divergence
    for row in table.rows:
        if row.layer is not None:
            x, y = left + layers[row.layer] * width, TOP + lines[row.tail] * CELL
            out.append(_cell(row, x, y, width - gap, CELL - GAP, row is first))
    return "".join(out) + "</svg>"


def ramp() -> str:
    """The legend of the heat map."""
    cells = "".join(
        f'<rect class="h{i}" x="{i * 16}" width="16" height="10"/>' for i in range(STEPS)
    )
    bar = f'<svg width="{STEPS * 16}" height="10" aria-hidden="true">{cells}</svg>'
    return (
        f'<div class="legend"><span class="ramp">relative error {number(FLOOR)} {bar} 1</span>'
        '<span><svg width="12" height="12" style="display:inline-block;vertical-align:-2px">'
        '<rect class="beyond" x="1" y="1" width="10" height="10" rx="2"/></svg> diverges</span>'
        '<span><svg width="12" height="12" style="display:inline-block;vertical-align:-2px">'
        '<rect class="first" x="1.5" y="1.5" width="9" height="9" rx="2"/></svg> the first</span>'
        '<span><svg width="8" height="12" style="display:inline-block;vertical-align:-2px">'
        '<circle class="flip" cx="4" cy="6" r="2.5"/></svg> a choice that flipped</span></div>'
    )


def course(table: Comparison, room: int = 1064, height: int = 240) -> str:
    """Measured and expected error of every site in the model's order, on a logarithmic scale.

    At most as wide as `room`, however many sites there are.
    """
    rows = [row for row in table.rows if not math.isnan(row.max_abs)]
    left, right, bottom = 52, 12, 24
    width = min(room, max(PHONE, left + right + 11 * len(rows)))
    step = (width - left - right) / max(len(rows) - 1, 1)
    errors = [e for row in rows for e in (row.relative_l2, row.expected) if 0 < e < math.inf]
    low = math.floor(math.log10(max(min(errors, default=1e-3), 1e-17)))
    axis = _Axis(low, max(low + 1, 0), 8, height - bottom)
    out = [_open(width, height, "Relative error of every site in the order of the model")]
    out += axis.grid(left, width - right)
    seen = None
    for i, row in enumerate(rows):
        if row.layer != seen and row.layer is not None:
            x = left + i * step
            out.append(
                f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="8" y2="{height - bottom}"/>'
            )
            if row.layer % max(1, math.ceil(60 / (step * 28))) == 0:
                word = "layer " if row.layer == 0 else ""
                out.append(f'<text x="{x + 3:.1f}" y="{height - 8}">{word}{row.layer}</text>')
        seen = row.layer
    for kind, of in (("expected", "expected"), ("measured", "relative_l2")):
        heights = (axis(getattr(row, of)) for row in rows)
        points = " ".join(f"{left + i * step:.1f},{y:.1f}" for i, y in enumerate(heights))
        out.append(f'<polyline class="{kind}" points="{points}"/>')
    for i, row in enumerate(rows):
        if row.verdict in WRONG:
            x, y = left + i * step, axis(row.relative_l2)
            out.append(
                f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5">{_title(row)}</circle>'
            )
    return "".join(out) + "</svg>"


def divergence_of_logits(logits: LogitComparison, height: int = 110) -> str:
    """KL by position, a strip for each row of the batch."""
    B, T = logits.real.shape
    left, right, bottom = 52, 12, 22
    bar = max(1.0, min(14.0, 1000 / T))
    width = max(320, round(left + right + bar * T))
    bar = (width - left - right) / T
    positive = logits.kl[logits.real & (logits.kl > 0)]
    positive = positive[positive < math.inf]
    low = math.floor(math.log10(max(float(positive.min(initial=1.0)), 1e-17)))
    high = max(low + 1, math.ceil(math.log10(max(float(positive.max(initial=1e-17)), 1e-17))))
    out = [_open(width, height * B, "KL divergence of the logits by position")]
    for row in range(B):
        axis = _Axis(low, high, row * height + 10, (row + 1) * height - bottom)
        out += axis.grid(left, width - right)
        base = (row + 1) * height - bottom
        for t in range(T):
            if not logits.real[row, t]:
                continue
            top = axis(float(logits.kl[row, t]))
            kind = "kl" if logits.agree[row, t] else "disagree"
            title = f"row {row}, token {t}: KL {number(float(logits.kl[row, t]))}"
            out.append(
                f'<rect class="{kind}" x="{left + t * bar:.1f}" y="{top:.1f}" '
                f'width="{max(bar - 1, 0.8):.1f}" height="{max(base - top, 1):.1f}">'
                f"<title>{title}</title></rect>"
            )
        every = next(n for n in _ROUND if 12 * n >= T)
        for t in range(0, T, every):
            x = left + (t + 0.5) * bar
            out.append(f'<text x="{x:.1f}" y="{base + 14}" text-anchor="middle">{t}</text>')
    return "".join(out) + "</svg>"


class _Axis:
    """Powers of ten from `low` to `high` between the heights `bottom` and `top`."""

    def __init__(self, low: int, high: int, top: float, bottom: float):
        self.low, self.high, self.top, self.bottom = low, high, top, bottom

    def __call__(self, value: float) -> float:
        """The height of a value; what is below or above the axis lies on its end."""
        if not value > 0:
            return self.bottom
        share = (math.log10(min(value, 1e300)) - self.low) / (self.high - self.low)
        return self.bottom - min(1.0, max(0.0, share)) * (self.bottom - self.top)

    def grid(self, left: float, right: float) -> list[str]:
        """Lines and labels, five at most."""
        out = []
        for power in range(self.low, self.high + 1, max(1, math.ceil((self.high - self.low) / 4))):
            y = self(10.0**power)
            out.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            label = "1" if power == 0 else f"1e{power}"
            out.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
        return out


def _open(width: float, height: float, label: str) -> str:
    return (
        f'<svg role="img" aria-label="{escape(label)}" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">'
    )


def _cell(row: Row, x: float, y: float, width: float, height: float, is_first: bool) -> str:
    title = _title(row)
    box = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="3"'
    if math.isnan(row.max_abs):  # a choice
        out = f'<rect class="h0" {box}>{title}</rect>'
        if row.flips:
            middle = f'cx="{x + width / 2}" cy="{y + height / 2}"'
            out += f'<circle class="flip" {middle} r="3">{title}</circle>'
    else:
        out = f'<rect class="h{shade(row.relative_l2)}" {box}>{title}</rect>'
    if is_first:
        out += f'<rect class="first" {box}/>'
    elif row.verdict in WRONG:
        out += f'<rect class="beyond" {box}/>'
    return out


def _title(row: Row) -> str:
    if math.isnan(row.max_abs):
        said = f"{row.flips} tokens chose otherwise"
    else:
        said = f"error {number(row.relative_l2)}, expected {number(row.expected)}"
    return f"<title>{escape(f'{row.name}: {said}, {row.verdict}')}</title>"
