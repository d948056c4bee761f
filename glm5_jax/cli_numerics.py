"""The commands that look at numbers; `cli` has them all."""

import sys
from pathlib import Path
from typing import Annotated

import typer

TraceFile = Annotated[Path, typer.Argument(help="A trace: one safetensors file.")]


def compare(
    trace: TraceFile,
    other: TraceFile,
    json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page that stands alone to this file, too.")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Write errors.png and logits.png into this directory, too.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Measure what rounding does in this checkpoint: two runs of it."),
    ] = None,
) -> None:
    """Compare two traces site by site; exit 1 when they differ by more than rounding explains."""
    from glm5_jax.numerics.compare import compare

    table = compare(trace, other, model=model)
    if html is not None:
        table.write_html(html)
    if plots is not None:
        table.write_plots(plots)
    print(table.to_json() if json else table.to_text(color=sys.stdout.isatty()))
    raise typer.Exit(0 if table.ok else 1)


def explain(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint directory.")],
    trace: TraceFile,
    other: TraceFile,
    site: Annotated[
        str | None, typer.Option(help="Look here, and not where the two part first.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Name the known mistake that makes OTHER part from TRACE, a trace of DIR; exit 1 if they part.

    A command of its own, and no option of compare: that wants two files and no weights.
    """
    from glm5_jax.model import load
    from glm5_jax.numerics.explain import explain
    from glm5_jax.numerics.explain_report import to_json, to_text

    found = explain(load(directory), trace, other, site)
    print(to_json(found) if json else to_text(found, color=sys.stdout.isatty()))
    raise typer.Exit(0 if found.ok else 1)
