"""A comparison in words, as a table for a terminal, and as JSON."""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .compare_choices import Flip
from .compare_table import WRONG, Comparison, Row

# Flips that a page or a terminal lists; JSON has them all.
SHOWN_FLIPS = 200
WIDTH = 110

STYLES = {
    "equal": "dim",
    "rounding": "green",
    "flipped": "cyan",
    "follows": "yellow",
    "diverges": "bold red",
    "not a number": "bold red",
}


def number(value: float) -> str:
    """Three digits at most, for people: `2.1e-06`, `0.34`, `120`, `–` for what is no number."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.1e}"


def sentence(table: Comparison) -> str:
    """What was found, in a sentence."""
    row = table.first_divergence
    if row is None:
        flips = len(table.flips)
        found = f"No divergence: all that differs at {len(table.rows)} sites is rounding"
        if all(r.verdict == "equal" for r in table.rows):
            found = f"The two are equal to the bit at all {len(table.rows)} sites"
        if flips:
            chose = "1 token chose" if flips == 1 else f"{flips:,} tokens chose"
            found += f", and {chose} otherwise by scores closer than that"
        return found + "."
    at = f" at {list(row.worst)}" if row.worst else ""
    if row.verdict == "not a number":
        return f"The numbers part at {row.name}: {row.note}{at}."
    if row.flips:
        return f"The choices part at {row.name}: {row.note}, first{at}."
    return (
        f"The numbers part at {row.name}: relative error {number(row.relative_l2)}, "
        f"where rounding and its inputs explain about {number(row.expected)}."
    )


def detail(table: Comparison) -> str:
    """What stands before and behind the first divergence."""
    row = table.first_divergence
    if row is None:
        worst = max(table.rows, key=lambda r: r.excess)
        return f"The largest error, by what is explained: {number(worst.excess)}, at {worst.name}."
    before = table.rows.index(row)
    own = sum(r.verdict in WRONG for r in table.rows[before + 1 :])
    follows = sum(r.verdict == "follows" for r in table.rows)
    lines = [f"All sites before it agree ({before:,})" if before else "It is the first site of all"]
    if follows or own:
        lines.append(f"behind it {follows:,} follow from it and {own:,} add an error of their own")
    return "; ".join(lines) + "."


def to_text(table: Comparison, width: int = WIDTH, color: bool = False) -> str:
    """The comparison for a terminal: by layer, and every site of the layer that parts first."""
    out = io.StringIO()
    # In a notebook rich shows what it is to write to a file, and the file stays empty.
    console = Console(
        file=out, width=width, force_terminal=color, force_jupyter=False, highlight=False
    )
    first = table.first_divergence
    console.print(escape(sentence(table)), style="bold green" if table.ok else "bold red")
    console.print(escape(detail(table)))
    for side in table.sides:
        shown = (side.get(name, "") for name in ("label", "engine", "dtype", "reduce"))
        console.print(escape(" · ".join(filter(None, shown))), style="dim", soft_wrap=True)
    rows = table.rows
    if len(table.rows) > 60:
        console.print(_layers(table))
        layer = None if first is None else first.layer
        rows = tuple(row for row in table.rows if row.layer == layer)
    console.print(_sites(rows, first))
    if table.flips:
        console.print(_flips(table.flips[:10], len(table.flips)))
    if (logits := table.logits) is not None:
        console.print(
            f"logits: KL {number(logits.mean_kl)} in the mean and {number(logits.max_kl)} at most, "
            f"likeliest token the same at {logits.top1:.1%}, its log-probability within "
            f"{number(logits.max_logprob)}"
        )
    for label, names in (("trace", table.only_in_trace), ("other", table.only_in_other)):
        if names:
            more = f", … {len(names) - 4} more" if len(names) > 4 else ""
            console.print(escape(f"only in the {label}: {', '.join(names[:4])}{more}"))
    return out.getvalue().rstrip()


def to_dict(table: Comparison) -> dict[str, Any]:
    """All of it as what JSON can say; NaN and infinities are null."""
    logits, first = table.logits, table.first_divergence
    found = {
        "ok": table.ok,
        "first_divergence": None if first is None else first.name,
        "sentence": sentence(table),
        "sides": list(table.sides),
        "rows": [asdict(row) for row in table.rows],
        "layers": [asdict(layer) for layer in table.layers],
        "flips": [asdict(flip) | {"tie": flip.is_tie} for flip in table.flips],
        "only_in_trace": list(table.only_in_trace),
        "only_in_other": list(table.only_in_other),
        "logits": None
        if logits is None
        else {
            "mean_kl": logits.mean_kl,
            "max_kl": logits.max_kl,
            "top1": logits.top1,
            "max_logprob": logits.max_logprob,
            "kl": logits.kl.tolist(),
            "agree": logits.agree.tolist(),
            "logprob": logits.logprob.tolist(),
        },
    }
    return _finite(found)


def to_json(table: Comparison) -> str:
    """`to_dict` as text."""
    return json.dumps(to_dict(table), indent=2, allow_nan=False)


def _layers(table: Comparison) -> Table:
    grid = Table(box=box.SIMPLE_HEAD, title="by layer", title_justify="left")
    for name in ("layer", "worst site", "× explained", "error handed on", "flips", "verdict"):
        grid.add_column(name, justify="left" if name in ("worst site", "verdict") else "right")
    for layer in table.layers:
        values = number(layer.excess), number(layer.relative_l2), str(layer.flips or "")
        cells = (str(layer.layer), layer.worst.split(".", 2)[2], *values, layer.verdict)
        grid.add_row(*map(escape, cells), style=STYLES[layer.verdict])
    return grid


def _sites(rows: tuple[Row, ...], first: Row | None) -> Table:
    grid = Table(box=box.SIMPLE_HEAD, title="by site", title_justify="left")
    grid.add_column("site", no_wrap=True)
    for name in ("max abs", "relative L2", "expected", "× explained", "cosine", "worst at"):
        grid.add_column(name, justify="right")
    grid.add_column("verdict", no_wrap=True)
    for row in rows:
        cosine = "–" if math.isnan(row.cosine) else f"{row.cosine:.6f}"
        values = map(number, (row.max_abs, row.relative_l2, row.expected, row.excess))
        verdict = row.verdict + (" ←" if row is first else "")
        cells = (row.name, *values, cosine, ",".join(map(str, row.worst)), verdict)
        grid.add_row(*map(escape, cells), style=STYLES[row.verdict])
    return grid


def _flips(flips: tuple[Flip, ...], total: int) -> Table:
    title = f"choices that differ ({len(flips)} of {total:,})"
    grid = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for name in ("site", "row", "token", "trace chose", "other chose", "gap", "explained gap", ""):
        grid.add_column(name)
    for flip in flips:
        gap, allowed = ("–" if g is None else number(g) for g in (flip.gap, flip.allowed))
        sets = (" ".join(map(str, chosen[:6])) for chosen in (flip.trace_only, flip.other_only))
        cells = (flip.site, str(flip.row), str(flip.position), *sets, gap, allowed, reason(flip))
        grid.add_row(*map(escape, cells), style="red" if flip.explained is False else None)
    return grid


def reason(flip: Flip) -> str:
    """What a flip is, in a word or two."""
    if flip.explained is None:
        return "no scores"
    if not flip.explained:
        return "not by the scores"
    return "tie" if flip.is_tie else "by the scores"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
