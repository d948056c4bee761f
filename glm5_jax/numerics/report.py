"""A comparison in words, as a table for a terminal, and as JSON."""

from __future__ import annotations

import io
import json
import math
import shutil
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from .compare_choices import Flip
from .compare_sides import ROUNDOFF
from .compare_table import WRONG, Comparison, Row

# Flips that a page or a terminal lists; JSON has them all.
SHOWN_FLIPS = 200
# Columns of text that goes to no terminal.
WIDTH = 100

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


def count(n: int, of: str) -> str:
    """`1 site`, `1,200 sites`."""
    return f"{n:,} {of}{'' if n == 1 else 's'}"


def terminal_width() -> int:
    """Columns of the terminal or of `COLUMNS`, within reason; `WIDTH` where there is none."""
    return min(max(shutil.get_terminal_size((WIDTH, 24)).columns, 80), 120)


def sentence(table: Comparison) -> str:
    """What was found, in a sentence."""
    row = table.first_divergence
    if row is None:
        flips = len(table.flips)
        sites = count(len(table.rows), "site")
        every = sites if len(table.rows) == 1 else f"all {sites}"
        found = f"No divergence: all that differs at {sites} is rounding"
        if all(r.verdict == "equal" for r in table.rows):
            found = f"The two are equal to the bit at {every}"
        if flips:
            found += f", and {count(flips, 'token')} chose otherwise by scores closer than that"
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
        come = "1 follows" if follows == 1 else f"{follows:,} follow"
        add = "1 adds an error of its" if own == 1 else f"{own:,} add an error of their"
        lines.append(f"behind it {come} from it and {add} own")
    return "; ".join(lines) + "."


def hint(table: Comparison) -> str:
    """What to do where the logits moved more than is usual, though no site diverges; else empty."""
    if table.logits is None or not table.moved:
        return ""
    dtype = next(name for name, roundoff in ROUNDOFF.items() if roundoff == table.roundoff)
    ways = ["`--model DIR` measures this checkpoint's own rounding"]
    ways += ["`glm5-jax explain DIR A B --site final.head` checks every part"]
    if table.roundoff > ROUNDOFF["float32"]:
        ways.append("traces in float32 hide nothing")
    return (
        f"Yet the logits moved more than is usual for {dtype}: the median token's KL is "
        f"{number(table.logits.median_kl)} nats, and {number(table.usual_kl)} would be much. A "
        f"small mistake may hide in the rounding: {'; '.join(ways)}."
    )


def to_text(table: Comparison, width: int | None = None, color: bool = False) -> str:
    """The comparison for a terminal: by layer, and every site of the layer that parts first.

    Columns that do not fit into `width`, by default the terminal's, are left out.
    """
    out = io.StringIO()
    # In a notebook rich shows what it is to write to a file, and the file stays empty.
    console = Console(
        file=out,
        width=width or terminal_width(),
        force_terminal=color,
        force_jupyter=False,
        highlight=False,
    )
    first = table.first_divergence
    console.print(escape(sentence(table)), style="bold green" if table.ok else "bold red")
    console.print(escape(detail(table)))
    if advice := hint(table):
        console.print(escape(advice), style="yellow")
    for side in table.sides:
        shown = (side.get(name, "") for name in ("label", "engine", "dtype", "reduce"))
        console.print(escape(" · ".join(filter(None, shown))), style="dim", soft_wrap=True)
    rows = table.rows
    if len(table.rows) > 60:
        console.print(_layers(table))
        layer = None if first is None else first.layer
        rows = tuple(row for row in table.rows if row.layer == layer)
    _print(console, _sites(rows, first), drop=(5, 6, 1))
    if table.flips:
        _print(console, _flips(table.flips[:10], len(table.flips)), drop=(5, 4))
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
        "hint": hint(table) or None,
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
            "median_kl": logits.median_kl,
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


def _grid(title: str) -> Table:
    return Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", collapse_padding=True)


def _print(console: Console, grid: Table, drop: tuple[int, ...]) -> None:
    """Print a table; while it is too wide, without one more of the columns `drop`."""
    columns, room = list(grid.columns), console.options.update(width=1000)
    for index in drop:
        if Measurement.get(console, room, grid).maximum <= console.width:
            break
        grid.columns.remove(columns[index])
    console.print(grid)


def _layers(table: Comparison) -> Table:
    grid = _grid("by layer")
    for name in ("layer", "worst site", "×\nexplained", "error\nhanded on", "flips", "verdict"):
        words = name in ("worst site", "verdict")
        grid.add_column(name, justify="left" if words else "right", no_wrap=True)
    for layer in table.layers:
        values = number(layer.excess), number(layer.relative_l2), str(layer.flips or "")
        cells = (str(layer.layer), layer.worst.split(".", 2)[2], *values, layer.verdict)
        grid.add_row(*map(escape, cells), style=STYLES[layer.verdict])
    return grid


def _sites(rows: tuple[Row, ...], first: Row | None) -> Table:
    grid = _grid("by site")
    grid.add_column("site", overflow="fold")
    for name in ("max abs", "relative\nL2", "expected", "×\nexplained", "cosine", "worst at"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("verdict", no_wrap=True)
    for row in rows:
        cosine = "–" if math.isnan(row.cosine) else f"{row.cosine:.6f}"
        values = map(number, (row.max_abs, row.relative_l2, row.expected, row.excess))
        verdict = row.verdict + (" ←" if row is first else "")
        cells = (row.name, *values, cosine, ",".join(map(str, row.worst)), verdict)
        grid.add_row(*map(escape, cells), style=STYLES[row.verdict])
    return grid


def _flips(flips: tuple[Flip, ...], total: int) -> Table:
    grid = _grid(f"choices that differ ({len(flips)} of {total:,})")
    grid.add_column("site", no_wrap=True)
    grid.add_column("at", no_wrap=True)
    for name in ("trace\nchose", "other\nchose"):
        grid.add_column(name)
    for name in ("gap", "explained\ngap", ""):
        grid.add_column(name, no_wrap=True)
    for flip in flips:
        gap, allowed = ("–" if g is None else number(g) for g in (flip.gap, flip.allowed))
        sets = (" ".join(map(str, chosen[:6])) for chosen in (flip.trace_only, flip.other_only))
        cells = (flip.site, f"{flip.row},{flip.position}", *sets, gap, allowed, reason(flip))
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
