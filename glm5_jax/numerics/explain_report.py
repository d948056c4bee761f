"""What `explain` found, in words and as a table."""

from __future__ import annotations

import io
import json

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .explain import Explanation
from .report import WIDTH, number

SHOWN = 6


def sentences(found: Explanation) -> list[str]:
    """Where the traces part, whether that arises there, and what it is."""
    if found.divergence is None:
        return ["Nothing to explain: all that differs is rounding."]
    lines = [f"The traces part at {found.divergence}."]
    if found.part is None:
        return [
            *lines,
            "From the other engine's own inputs, every part up to there gives its numbers but for "
            "rounding: no mistake in any of them.",
        ]
    worst = max(found.misfits, key=found.misfits.__getitem__)
    lines.append(
        f"It arises in {found.part}: from the other engine's own inputs our {worst} is "
        f"off by {number(found.misfit)} times what rounding explains."
    )
    if not found.trials:
        lines.append("The catalogue has no mistake for this part; weights that differ do it too.")
    elif not found.named:
        lines.append(
            f"None of the {len(found.trials)} known mistakes of this part gives the other engine's "
            f"numbers; the nearest, {found.trials[0].name}, leaves "
            f"{number(found.trials[0].misfit)} times what rounding can do."
        )
    elif len(found.named) == 1:
        lines.append(f"The other engine makes the mistake {found.named[0]}.")
    else:
        lines.append(
            f"The other engine makes one of the mistakes {', '.join(found.named)}, which these "
            "inputs do not tell apart."
        )
    return lines


def to_text(found: Explanation, width: int = WIDTH, color: bool = False) -> str:
    """The sentences, and the mistakes that come nearest."""
    out = io.StringIO()
    # In a notebook rich shows what it is to write to a file, and the file stays empty.
    console = Console(
        file=out, width=width, force_terminal=color, force_jupyter=False, highlight=False
    )
    for line in sentences(found):
        console.print(escape(line))
    if found.trials:
        table = Table("mistake", "what it does", box=None)
        table.add_column("left, × rounding", justify="right")
        for trial in found.trials[:SHOWN]:
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
