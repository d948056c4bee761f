"""The commands that look at numbers; `cli` has them all."""

import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from glm5_jax.cli_options import (
    Coordinator,
    Directory,
    Dtype,
    ExpertGroup,
    Json,
    MeshSizes,
    ProcessOf,
    Rules,
    Stream,
    TokenIds,
    TokensFile,
    load_options,
    runnable,
)
from glm5_jax.errors import CheckpointError, TraceError

TraceFile = Annotated[Path, typer.Argument(help="A trace: one safetensors file.")]


def trace(
    directory: Directory,
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
    tokens: TokenIds = None,
    tokens_file: TokensFile = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only these sites: 'layers.3.*', '*.router.*'."),
    ] = None,
    reduce: Annotated[
        str, typer.Option(metavar="full|stats", help="Whole arrays, or stats and a sample of each.")
    ] = "full",
    dtype: Dtype = "stored",
    implementation: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What runs KDA's recurrence and DSA's attention."),
    ] = None,
    stream: Stream = False,
    expert_group: ExpertGroup = None,
    mesh: MeshSizes = None,
    rules: Rules = None,
    coordinator: Coordinator = None,
    process: ProcessOf = None,
) -> None:
    """Run the model and write what it computes on the way, site by site, into one file."""
    from glm5_jax.config import load_config
    from glm5_jax.numerics.trace import Reduce, is_trace
    from glm5_jax.numerics.tracing import trace
    from glm5_jax.processes import first_alone
    from glm5_jax.token_batch import read_tokens
    from glm5_jax.whole_file import check_place

    batch, mask = read_tokens(tokens, tokens_file, load_config(directory).vocab_size)
    options = load_options(mesh, rules, coordinator, process)
    first_alone(lambda: check_place(out, is_trace))
    with runnable(directory, dtype, stream, expert_group, options) as model:
        try:
            found = trace(model, batch, mask, keep or "*", cast(Reduce, reduce), implementation)
        except (ValueError, NotImplementedError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise TraceError(str(error)) from error
    first_alone(lambda: found.save(out))
    print(f"{out}: {found}")


def compare(
    trace: TraceFile,
    other: TraceFile,
    json: Json = False,
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
    directory: Directory,
    trace: TraceFile,
    other: TraceFile,
    site: Annotated[
        str | None, typer.Option(help="Look here, and not where the two part first.")
    ] = None,
    json: Json = False,
) -> None:
    """Name the known mistake that makes OTHER part from TRACE, a trace of DIR; exit 1 if they part.

    With --site, exit 1 if what comes up to there is wrong somewhere in OTHER.

    A command of its own, and no option of compare: that wants two files and no weights.
    """
    from glm5_jax.numerics.explain import explain

    found = explain(directory, trace, other, site)
    print(found.to_json() if json else found.to_text(color=sys.stdout.isatty()))
    raise typer.Exit(0 if found.ok else 1)
