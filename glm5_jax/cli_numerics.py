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
