"""The `glm5-jax` command.

Results go to stdout, progress and notices to stderr. Exit status: 0 good, 1 the check failed,
2 bad input, which is one line on stderr. JAX is imported by the commands that compute.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from glm5_jax import cli_numerics
from glm5_jax.cli_options import (
    AllowBf16,
    Coordinator,
    Directory,
    Dtype,
    ExpertGroup,
    Json,
    Layers,
    MeshSizes,
    ProcessOf,
    Rules,
    Seed,
    Stream,
    TokenIds,
    TokensFile,
    allow_float64,
    load_options,
    progress_bar,
    runnable,
)
from glm5_jax.errors import CheckpointError, ConfigError, TraceError
from glm5_jax.specs import Naming

# What click raises for a wrong command line; newer typers have a copy of click of their own.
_UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(
    name="glm5-jax",
    help="GLM-5.3-Flash in JAX: account for a checkpoint, convert it, run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        from glm5_jax import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print and exit."),
    ] = False,
) -> None:
    pass


@app.command()
def audit(
    directory: Directory, layers: Layers = None, allow_bf16: AllowBf16 = False, json: Json = False
) -> None:
    """Account for every tensor of a checkpoint; exit 1 when anything is missing or unknown."""
    from glm5_jax.checkpoint.audit import audit

    report = audit(directory, layers=layers, allow_bf16=allow_bf16)
    print(report.to_json() if json else report.to_text())
    raise typer.Exit(0 if report.complete else 1)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A safetensors directory.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The Orbax directory.")],
    dtype: Dtype = "stored",
    layers: Layers = None,
    mtp: Annotated[bool, typer.Option("--mtp/--no-mtp", help="Convert the MTP layer.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace DST if it exists.")] = False,
    allow_bf16: AllowBf16 = False,
    process: ProcessOf = None,
) -> None:
    """Convert safetensors into an Orbax directory; an interrupted run goes on where it stopped."""
    from glm5_jax.checkpoint.company import parse_process
    from glm5_jax.checkpoint.convert import convert

    with progress_bar() as progress:
        report = convert(
            source,
            destination,
            dtype=dtype,
            layers=layers,
            mtp=mtp,
            force=force,
            allow_bf16=allow_bf16,
            progress=progress,
            process=None if process is None else parse_process(process),
        )
    print(report.to_text())


@app.command()
def export(
    source: Annotated[Path, typer.Argument(metavar="ORBAX", help="An Orbax directory.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The safetensors directory.")],
    naming: Annotated[
        str | None, typer.Option(metavar="released|native", help="Names; the source's without.")
    ] = None,
    dtype: Dtype = "stored",
    shard_size: Annotated[
        str, typer.Option(metavar="5GB", help="A new file is begun before one is larger.")
    ] = "5GB",
) -> None:
    """Write the safetensors that an Orbax directory was made of; any --dtype but stored decodes."""
    from glm5_jax.checkpoint.export import export
    from glm5_jax.checkpoint.writer import parse_size

    with progress_bar() as progress:
        report = export(
            source,
            destination,
            naming=cast(Naming | None, naming),  # refused there if it is none
            dtype=dtype,
            shard_bytes=parse_size(shard_size),
            progress=progress,
        )
    print(report.to_text())


@app.command()
def verify(
    directory: Directory,
    quick: Annotated[bool, typer.Option("--quick", help="Names and sizes, no hashes.")] = False,
) -> None:
    """Compare an Orbax directory with its ledger; exit 1 when anything differs."""
    from glm5_jax.checkpoint.verify import verify

    with progress_bar() as progress:
        report = verify(directory, quick=quick, progress=progress)
    for problem in report.problems:
        print(problem)
    what = "names, shapes and sizes" if quick else "every byte"
    print(f"{report.checked:,} leaves, {what}: {'as written' if report.ok else 'DAMAGED'}")
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def forward(
    directory: Directory,
    tokens: TokenIds = None,
    tokens_file: TokensFile = None,
    dtype: Dtype = "stored",
    top: Annotated[int, typer.Option(min=1, help="Tokens shown for each position.")] = 5,
    out: Annotated[
        Path | None, typer.Option(help="Write logits, tokens and mask to this .npz instead.")
    ] = None,
    stream: Stream = False,
    expert_group: ExpertGroup = None,
    mesh: MeshSizes = None,
    rules: Rules = None,
    coordinator: Coordinator = None,
    process: ProcessOf = None,
) -> None:
    """Run the model: the likeliest next tokens at each position, or all logits."""
    from glm5_jax.config import load_config
    from glm5_jax.processes import first_alone, on_host
    from glm5_jax.token_batch import is_npz, read_tokens, top_tokens, write_logits
    from glm5_jax.whole_file import check_place

    batch, mask = read_tokens(tokens, tokens_file, load_config(directory).vocab_size)
    options = load_options(mesh, rules, coordinator, process)
    if out is not None:
        first_alone(lambda: check_place(out, is_npz))
    with runnable(directory, dtype, stream, expert_group, options) as run:
        logits = on_host(run(batch, mask))
    if out is None:
        for line in top_tokens(logits, batch, mask, top):
            print(line)
    else:
        first_alone(lambda: write_logits(out, logits, batch, mask))
        print(f"{out}: logits {logits.shape}")


@app.command()
def generate(
    directory: Directory,
    prompt: Annotated[
        str | None, typer.Option(help="A text, where DIR has a tokenizer; it is answered in text.")
    ] = None,
    tokens: TokenIds = None,
    tokens_file: TokensFile = None,
    max_new: Annotated[int, typer.Option(min=1, help="New tokens of a sequence, at most.")] = 32,
    draft: Annotated[
        int, typer.Option(min=0, help="Tokens that the MTP layer guesses before each check.")
    ] = 0,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from this many likeliest.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest that have this probability.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    eos: Annotated[
        str | None,
        typer.Option(metavar="1,2", help="Tokens that end a sequence; '' for none, else DIR's."),
    ] = None,
    dtype: Dtype = "stored",
    json: Json = False,
    mesh: MeshSizes = None,
    rules: Rules = None,
    coordinator: Coordinator = None,
    process: ProcessOf = None,
) -> None:
    """Continue a sequence, its tokens printed as they come; several are printed when all end."""
    from glm5_jax.config import load_config
    from glm5_jax.token_batch import read_ids, read_tokens, text_tokens
    from glm5_jax.tokenizer import TextStream, end_tokens, load_tokenizer

    config = load_config(directory)
    ends = end_tokens(directory, config) if eos is None else read_ids(eos, "--eos")
    if min(ends, default=0) < 0:
        raise CheckpointError(f"--eos: expected token ids, got {eos!r}")
    tokenizer = None
    if prompt is None:
        batch, mask = read_tokens(tokens, tokens_file, config.vocab_size)
    elif tokens is not None or tokens_file is not None:
        raise CheckpointError("expected either --prompt or token ids, got both")
    else:
        tokenizer = load_tokenizer(directory)
        batch, mask = text_tokens(tokenizer.encode(prompt), config.vocab_size)
    allow_float64(dtype)
    from glm5_jax.generation import generate
    from glm5_jax.model import load
    from glm5_jax.processes import first_alone
    from glm5_jax.sampling import make_sampling

    try:
        make_sampling(temperature, top_k, top_p, seed)  # before the weights are read
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    options = load_options(mesh, rules, coordinator, process)
    text = None if tokenizer is None else TextStream(tokenizer)

    def show(row: int, token: int) -> None:
        print(f"{token} " if text is None else text.push(token), end="", flush=True)

    streamed = len(batch) == 1 and not json
    try:
        generation = generate(
            load(directory, dtype=dtype, mtp=draft > 0, **options),
            batch,
            mask,
            max_new_tokens=max_new,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            eos=ends,
            draft_tokens=draft,
            on_token=show if streamed else None,
        )
    except FloatingPointError as error:
        raise CheckpointError(f"{directory}: {error}") from error
    if streamed:
        print("" if text is None else text.rest())
    elif json:
        found = {"tokens": generation.rows, "stats": asdict(generation.stats)}
        if tokenizer is not None:
            found["text"] = [tokenizer.decode(row) for row in generation.rows]
        print(_json(found))
    else:
        for i, row in enumerate(generation.rows):
            print(f"[{i}]", *row)
    first_alone(lambda: print(generation.stats, file=sys.stderr))


@app.command()
def budget(
    source: Annotated[
        Path, typer.Argument(metavar="CONFIG_OR_DIR", help="A config.json or its directory.")
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of activations and caches, bfloat16 without. With --mesh of the weights, "
            "stored without; also fp8, nvfp4_modelopt or nvfp4_compressed_tensors."
        ),
    ] = None,
    rewind: Annotated[int, typer.Option(help="Tokens that a cache can go back.")] = 0,
    tokens: Annotated[
        int, typer.Option("--tokens", "--context", help="Length of a sequence.")
    ] = 131_072,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=N,...", help="Bytes on each device of a mesh, and where it fits."
        ),
    ] = None,
    rules: Rules = None,
    batch: Annotated[int | None, typer.Option(help="Sequences at a time; 1 without.")] = None,
    mtp: Annotated[
        bool | None, typer.Option("--mtp/--no-mtp", help="With the MTP head and its cache.")
    ] = None,
    json: Json = False,
) -> None:
    """Print parameters and bytes of each role, and the state of one sequence.

    With --mesh the bytes on each device: weights, the state of a batch, what calls need besides.
    """
    from glm5_jax.config import load_config

    config = load_config(source)
    if mesh is not None:
        from glm5_jax.mesh_budget import device_budget, device_budget_dict, device_budget_text
        from glm5_jax.sharding import parse_mesh

        found = device_budget(
            source,
            parse_mesh(mesh),
            rules,
            dtype=dtype or "stored",
            context=tokens,
            batch=1 if batch is None else batch,
            rewind=rewind,
            mtp=bool(mtp),
        )
        print(_json(device_budget_dict(found)) if json else device_budget_text(found))
    else:
        from glm5_jax.budget import budget_dict, budget_text

        for name, value in (("rules", rules), ("batch", batch), ("mtp", mtp)):
            if value is not None:
                raise ConfigError(f"--{name}: is for --mesh alone, which was not given")
        asked = (config, dtype or "bfloat16", rewind, tokens)
        print(_json(budget_dict(*asked)) if json else budget_text(*asked))
    for lost in config.overridden:
        print(f"note: {lost}", file=sys.stderr)
    if config.defaulted:
        print(f"note: by default: {', '.join(config.defaulted)}", file=sys.stderr)


@app.command("make-tiny")
def make_tiny(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A directory that is not there yet, or empty.")
    ],
    config: Annotated[
        Path | None, typer.Option(help="A config.json; configs/tiny.json without.")
    ] = None,
    naming: Annotated[str, typer.Option(metavar="released|native")] = "released",
    shards: Annotated[int, typer.Option(min=1, help="How many safetensors files.")] = 1,
    dtype: Annotated[str, typer.Option(metavar="bfloat16|float32")] = "bfloat16",
    quantization: Annotated[
        str, typer.Option(metavar="none|fp8|nvfp4_modelopt|nvfp4_compressed_tensors")
    ] = "none",
    seed: Seed = 0,
) -> None:
    """Write a checkpoint of random weights in a released layout or in transformers' own."""
    from glm5_jax.checkpoint.tiny import make_tiny

    try:
        path = make_tiny(
            out,
            config,
            naming=cast(Naming, naming),  # refused there if it is none
            shards=shards,
            seed=seed,
            dtype=cast(Literal["bfloat16", "float32"], dtype),
            quantization=cast(Literal["none"], quantization),
        )
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    print(path)


@app.command()
def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="forward, kda, compile, decode, sparse-mla, indexer, dispatch, trace, convert; "
            "or all. rehearsal and prefill only by their names.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each side.")] = 5,
    compile_for: Annotated[
        str | None,
        typer.Option(
            help="kda, sparse-mla: compile the kernels for this card (h200), which need not be."
        ),
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="kda, sparse-mla: time the kernels on a GPU.")
    ] = False,
) -> None:
    """Time ours beside a named peer, in one run; exit 1 when a goal is missed."""
    if compile_for or run:
        _bench_kernels(names or [], repeats, compile_for, run)
    from glm5_jax.bench import ASKED_FOR, BENCHES

    every = BENCHES | ASKED_FOR
    if unknown := set(names or ()) - set(every):
        raise ConfigError(f"no bench is called {min(unknown)!r}; there are {', '.join(every)}")
    timings = []
    for name in names or BENCHES:
        for timing in every[name](repeats=repeats):
            print(timing, flush=True)
            timings.append(timing)
    raise typer.Exit(0 if all(timing.reached for timing in timings) else 1)


def _bench_kernels(names: list[str], repeats: int, target: str | None, run: bool) -> None:
    from glm5_jax.bench_gpu import SHAPES, compile_lines, run_lines

    if len(names) != 1 or names[0] not in SHAPES:
        raise ConfigError(f"--compile-for and --run belong to one bench of {', '.join(SHAPES)}")
    shape, good = SHAPES[names[0]], True
    if target:
        lines, good = compile_lines(target, shape)
        print(*lines, sep="\n", flush=True)
    if run:
        print(*run_lines(shape, repeats), sep="\n")
    raise typer.Exit(0 if good else 1)


app.command()(cli_numerics.trace)
app.command()(cli_numerics.compare)
app.command()(cli_numerics.explain)


@app.command()
def demo(
    out: Annotated[
        Path | None, typer.Option(help="Keep the files here; a temporary directory without.")
    ] = None,
) -> None:
    """Make a tiny checkpoint, audit, convert, verify and run it; compare both loading routes."""
    from glm5_jax.demo import run_demo

    raise typer.Exit(0 if run_demo(out) else 1)


def _json(value: object) -> str:
    return json.dumps(value, indent=2)


def main() -> None:
    """Entry point: bad input is one line on stderr and exit status 2."""
    try:
        sys.exit(app(standalone_mode=False))
    except _UsageError as error:
        if len(sys.argv) == 1:
            error.show()  # the help
        else:
            command = error.ctx.command_path if error.ctx else "glm5-jax"
            problem = error.format_message().rstrip(".")
            print(f"error: {problem}; see {command} --help", file=sys.stderr)
        sys.exit(2)
    except typer.Abort:
        sys.exit(130)
    except (ConfigError, CheckpointError, TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(2)
