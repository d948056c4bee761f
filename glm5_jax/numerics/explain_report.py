"""What `explain` found, in words and as a table."""

from __future__ import annotations

import io
import json
import math

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .explain import Explanation
from .report import number, terminal_width

SHOWN = 6


def sentences(found: Explanation) -> list[str]:
    """Where the traces part, whether that arises there, and what it is."""
    if found.site is None and found.part is None:
        return ["Nothing to explain: all that differs is rounding."]
    lines = [] if found.divergence is None else [f"The traces part at {found.divergence}."]
    if found.part is None:
        return [*lines, *_nothing_wrong(found)]
    worst = max(found.misfits, key=found.misfits.__getitem__)
    where = f"It arises in {found.part}"
    if found.divergence is None:
        where = f"Back from {found.site}, the first part with other numbers is {found.part}"
    off = f"is off by {number(found.misfit)} times what rounding explains"
    if math.isinf(found.misfit):
        off = "and its own are apart beyond measure: NaN or infinity in one, or its all zero"
    lines.append(f"{where}: from the other engine's own inputs our {worst} {off}.")
    if not found.trials:
        lines.append("The catalogue has no mistake for this part; weights that differ do it too.")
    elif not found.named:
        line = f"None of the {len(found.trials)} known mistakes of this part gives the other "
        if found.nearer:
            nearest = found.nearer[0]
            line += f"engine's numbers; the nearest, {nearest.name}, leaves "
            line += f"{number(nearest.misfit)} times what rounding can do."
        else:
            line += "engine's numbers, nor does one come nearer; weights that differ do it too."
        lines.append(line)
    elif len(found.named) == 1:
        lines.append(f"The other engine makes the mistake {found.named[0]}.")
    else:
        lines.append(
            f"The other engine makes one of the mistakes {', '.join(found.named)}, which these "
            "inputs do not tell apart."
        )
    return lines


def _nothing_wrong(found: Explanation) -> list[str]:
    """What was checked up to the site of the search, and what was not."""
    at = f"{len(found.checked)} sites" if len(found.checked) > SHOWN else ", ".join(found.checked)
    lines = [
        f"Nothing wrong was found up to {found.site}: from the other engine's own inputs, "
        f"{found.parts_checked} of {found.parts} parts of the model up to there give its numbers "
        f"but for rounding (checked at {at})."
    ]
    if found.parts_checked < found.parts:
        lines.append("The rest was not traced.")
    return lines


def to_text(found: Explanation, color: bool = False) -> str:
    """The sentences, and the mistakes that come nearest, as wide as the terminal."""
    out = io.StringIO()
    # In a notebook rich shows what it is to write to a file, and the file stays empty.
    console = Console(
        file=out,
        width=terminal_width(),
        force_terminal=color,
        force_jupyter=False,
        highlight=False,
    )
    for line in sentences(found):
        console.print(escape(line))
    if found.nearer:
        table = Table("mistake", "what it does", box=None)
        table.add_column("left, × rounding", justify="right")
        for trial in found.nearer[:SHOWN]:
            style = "bold green" if trial.name in found.named else None
            cells = (escape(trial.name), escape(trial.description), number(trial.misfit))
            table.add_row(*cells, style=style)
        table.add_row("(none)", "", number(found.misfit), style="dim")
        console.print(table)
    return out.getvalue().rstrip()


def to_json(found: Explanation) -> str:
    """All of it; infinities are null."""

    def finite(value: float) -> float | None:
        return value if value < float("inf") else None

    return json.dumps(
        {
            "ok": found.ok,
            "divergence": found.divergence,
            "site": found.site,
            "checked": list(found.checked),
            "parts_checked": found.parts_checked,
            "parts": found.parts,
            "part": found.part,
            "named": list(found.named),
            "misfits": {name: finite(value) for name, value in found.misfits.items()},
            "trials": [
                {
                    "name": trial.name,
                    "description": trial.description,
                    "misfit": finite(trial.misfit),
                }
                for trial in found.trials
            ],
        },
        indent=2,
    )
