"""What commands share: their options, a model that they can run, progress on stderr."""

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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

from glm5_jax.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from jax.sharding import Mesh

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


MeshSizes = Annotated[
    str | None,
    typer.Option("--mesh", metavar="tensor=8", help="Spread the model over so many devices."),
]
Rules = Annotated[
    str | None,
    typer.Option(metavar="tp|ep|tp_ep|fsdp", help="With --mesh: how it is cut; tp_ep without."),
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT|auto",
        help="Run in several processes: where the first is found. Slurm and MPI know: auto.",
    ),
]
ProcessOf = Annotated[
    str | None,
    typer.Option("--process", metavar="I/N", help="This is process I, from 0, of N."),
]


def load_options(
    mesh: str | None, rules: str | None, coordinator: str | None, process: str | None
) -> dict[str, Any]:
    """What `load` takes of the devices to run on, in one process or several, which it joins.

    Of several the first alone prints from then on.
    """
    from glm5_jax.sharding import find_rules, parse_mesh

    if (coordinator in (None, "auto")) != (process is None):
        raise CheckpointError("expected --coordinator HOST:PORT and --process I/N, or neither")
    if mesh is None:
        if rules is not None or coordinator is not None:
            name = "--coordinator" if rules is None else "--rules"
            raise CheckpointError(f"{name}: needs a --mesh of the devices to run on")
        return {}
    sizes, found = parse_mesh(mesh), find_rules(rules)
    if coordinator is not None:
        _join(coordinator, process)
    return {"mesh": _make_mesh(sizes), "rules": found}


def _join(coordinator: str, process: str | None) -> None:
    from glm5_jax.checkpoint.company import check_process, parse_process
    from glm5_jax.processes import check_alike, is_first, join

    if process is None:
        join(coordinator)
    else:
        one = check_process(*parse_process(process))
        join(coordinator, one.index, one.count)
    # What differs would leave them waiting for each other.
    check_alike([word for word in sys.argv[1:] if word not in (process, f"--process={process}")])
    if not is_first():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - as long as the process lives


def _make_mesh(sizes: dict[str, int]) -> "Mesh":
    import jax

    asked = "--mesh " + ",".join(f"{name}={size}" for name, size in sizes.items())
    needed, there, processes = math.prod(sizes.values()), jax.device_count(), jax.process_count()
    if needed > there:
        hint = f"; for a trial JAX_NUM_CPU_DEVICES={needed // processes} makes a CPU so many"
        on_cpu = jax.default_backend() == "cpu" and needed % processes == 0
        raise ConfigError(
            f"{asked}: needs {needed} devices, there are {there}{hint if on_cpu else ''}"
        )
    if needed < there and processes > 1:
        raise ConfigError(
            f"{asked}: is of {needed} devices, {processes} processes have {there}: name them all"
        )
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes))


@contextmanager
def runnable(
    directory: Path,
    dtype: str,
    stream: bool,
    expert_group: int | None,
    options: dict[str, Any],
) -> "Iterator[TextModel | LayerStream]":
    """What a command runs: the model, or with `stream` one that is read meanwhile.

    `options` are those of `load_options`. Of a stream, stderr shows the progress, and at the end
    what it took.
    """
    if expert_group is not None and not stream:
        raise CheckpointError("--expert-group: is for --stream alone, which was not given")
    if stream and options:
        raise CheckpointError("--stream: runs on one device, expected no --mesh beside it")
    allow_float64(dtype)
    if not stream:
        from glm5_jax.model import load

        yield load(directory, dtype=dtype, **options)
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
