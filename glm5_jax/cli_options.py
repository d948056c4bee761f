"""What commands share: their options, a model that they can run, progress on stderr."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TransferSpeedColumn,
)

from glm5_jax.errors import CheckpointError

if TYPE_CHECKING:
    from glm5_jax.model import TextModel
    from glm5_jax.streaming import LayerStream

STDERR = Console(stderr=True)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint directory.")]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
Layers = Annotated[
    str | None, typer.Option(metavar="0-3,45", help="Only these layers, and what is in none.")
]
Dtype = Annotated[
    str, typer.Option(metavar="stored|bfloat16|float32|float64", help="Dtype of the leaves.")
]
AllowBf16 = Annotated[
    bool, typer.Option("--allow-bf16", help="Accept BF16 where float32 is required.")
]
Stream = Annotated[
    bool, typer.Option("--stream", help="Read a layer at a time while it runs: little memory.")
]
ExpertGroup = Annotated[
    int | None,
    typer.Option(min=1, help="With --stream: routed experts read and run at once; 32 without."),
]
Seed = Annotated[int, typer.Option(help="Seed of the random weights.")]
TokenIds = Annotated[
    str | None, typer.Option("--tokens", metavar="1,2,3", help="Token ids of one sequence.")
]
TokensFile = Annotated[
    Path | None,
    typer.Option(help="A sequence a line, ids separated by commas or blanks; or a .npy array."),
]


@contextmanager
def runnable(
    directory: Path, dtype: str, stream: bool, expert_group: int | None
) -> "Iterator[TextModel | LayerStream]":
    """What a command runs: the model, or with `stream` one that is read meanwhile.

    Of that, stderr shows the progress, and at the end what it took.
    """
    if expert_group is not None and not stream:
        raise CheckpointError("--expert-group: is for --stream alone, which was not given")
    allow_float64(dtype)
    if not stream:
        from glm5_jax.model import load

        yield load(directory, dtype=dtype)
        return
    from glm5_jax.memory import peak_memory
    from glm5_jax.streaming import EXPERT_GROUP, stream_layers

    started = time.monotonic()
    with progress_bar(MofNCompleteColumn(), TextColumn("layers")) as progress:
        streamed = stream_layers(directory, dtype, expert_group or EXPERT_GROUP, progress)
        yield streamed
    print(
        f"{streamed.bytes_read / 1e9:.2f} GB of weights read in {time.monotonic() - started:.1f} s,"
        f" peak memory {peak_memory() / 1e9:.2f} GB",
        file=sys.stderr,
    )


@contextmanager
def progress_bar(*columns: ProgressColumn) -> Iterator:
    """A progress bar on stderr, as the callback that the checkpoint functions take.

    It shows bytes, or what `columns` show.
    """
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *(columns or (DownloadColumn(), TransferSpeedColumn())),
        console=STDERR,
        disable=not STDERR.is_terminal,
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=None)

        def update(done: int, total: int, label: str) -> None:
            bar.update(task, completed=done, total=total, description=label)

        yield update


def allow_float64(dtype: str) -> None:
    """Switch JAX to 64-bit types where the model is to have them, before it makes any array."""
    if dtype == "float64":
        import jax

        jax.config.update("jax_enable_x64", True)
