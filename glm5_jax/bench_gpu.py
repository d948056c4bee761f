"""The kernels on a GPU: compiled without one, or timed on one beside other forms of the same.

`--compile-for` prints what the assembler reports of each kernel and the least time that the shape
allows. `--run` needs a Hopper GPU. The peers of KDA are optional: flash-linear-attention
(`fla-core`, on torch) and jax-linear-attention; one that is missing is named, not skipped in
silence. Sparse MLA has none that takes its inputs, and is timed beside its form in plain JAX.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.errors import ConfigError
from pallas_kernels.aot import CannotCompile, compile_kernels, versions
from pallas_kernels.aot_calls import KDAShape, Shape, SparseMLAShape
from pallas_kernels.kda import chunk_kda
from pallas_kernels.kda import mosaic_gpu as kda_kernels
from pallas_kernels.kda import roofline as kda_roofline
from pallas_kernels.roofline import H200, Stage
from pallas_kernels.sparse_mla import mosaic_gpu as mla_kernel
from pallas_kernels.sparse_mla import roofline as mla_roofline
from pallas_kernels.sparse_mla import sparse_mla_decode

CALLS = 20  # between two looks at the clock
SHAPES: dict[str, Shape] = {"kda": KDAShape(), "sparse-mla": SparseMLAShape()}


def compile_lines(target: str, shape: Shape) -> tuple[list[str], bool]:
    """What `--compile-for` prints, and whether every kernel is free of spills and uses wgmma."""
    try:
        kernels = compile_kernels(target, [shape])[str(shape)]
        used = versions()
    except CannotCompile as error:
        raise ConfigError(str(error)) from error
    lines = [f"{shape} for {target}, JAX {used['jax']}, ptxas {used['ptxas']}"]
    lines += [f"  {kernel}" for kernel in kernels]
    lines += [f"  {stage.describe(H200)}" for stage in _stages(shape)]
    good = all(x.spilled_bytes == 0 and x.wgmma and not x.serialized for x in kernels)
    return lines, good


def _stages(shape: Shape) -> list[Stage]:
    """Those of the kernels, and the least of any."""
    if isinstance(shape, KDAShape):
        return [
            *kda_roofline.stages(shape.B, shape.T, shape.H, shape.V),
            kda_roofline.floor(shape.B, shape.T, shape.H, shape.K, shape.V),
        ]
    return [
        *mla_roofline.stages(shape.B, shape.T, shape.W),
        mla_roofline.floor(shape.B, shape.T, shape.A, shape.W, shape.R),
    ]


def run_lines(shape: Shape, repeats: int = 5) -> list[str]:
    """Milliseconds of the forward pass for ours and each peer, and the share of the floor.

    Raises:
      ConfigError: there is no GPU that the kernels run on.
    """
    lines = [f"{shape} on {jax.devices()[0].device_kind}, JAX {jax.__version__}"]
    if isinstance(shape, KDAShape):
        calls, missing = _kda_calls(shape)
    else:
        calls, missing = _sparse_mla_calls(shape), []
    stages = _stages(shape)
    floor, _ = stages[-1].bound(H200)
    for name, taken in _milliseconds(calls, repeats).items():
        lines.append(f"  {name}: {taken:.3f} ms, {taken / (floor * 1e3):.1f} times the floor")
    return lines + missing + [f"  {stage.describe(H200)}" for stage in stages]


def _kda_calls(shape: KDAShape) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    tensors = shape.inputs()
    names = ("q", "k", "v", "g", "beta", "initial_state")
    _refuse("kda", kda_kernels.supports(*(tensors[name] for name in names)))
    rng = np.random.default_rng(0)
    sizes = (shape.B, shape.T, shape.H)
    q, k, v = (
        jnp.asarray(rng.standard_normal((*sizes, width), np.float32), jnp.bfloat16)
        for width in (shape.K, shape.K, shape.V)
    )
    g = jnp.asarray(-5 * rng.random((*sizes, shape.K), np.float32))
    beta = jnp.asarray(rng.random(sizes, np.float32))
    inputs = (q, k, v, g, beta)
    calls: dict[str, Callable[[], Any]] = {}
    for name in ("mosaic_gpu", "xla"):
        run = jax.jit(functools.partial(chunk_kda, implementation=name))
        calls[f"ours, {name}"] = functools.partial(run, *inputs)
    missing = []
    for name, make in (("flash-linear-attention", _fla), ("jax-linear-attention", _jla)):
        try:
            calls[name] = make(inputs)
        except ImportError as error:
            missing.append(f"  {name}: not installed ({error})")
    return calls, missing


def _sparse_mla_calls(shape: SparseMLAShape) -> dict[str, Callable[[], Any]]:
    sizes = shape.inputs()
    _refuse("sparse-mla", mla_kernel.supports(**sizes))
    # Made on the device: the latents alone are gigabytes.
    of_q, of_kv, of_indices = jax.random.split(jax.random.key(0), 3)
    q, kv = (
        jax.random.normal(key, sizes[name].shape, jnp.bfloat16)
        for key, name in ((of_q, "q"), (of_kv, "kv"))
    )
    # Each token's rows are apart by as much, and so distinct; they begin anywhere.
    B, T, W = sizes["indices"].shape
    start = jax.random.randint(of_indices, (B, T, 1), 0, shape.S)
    rows = sizes["kv"].shape[-2]
    indices = ((start + jnp.arange(W) * (rows // W)) % rows).astype(jnp.int32)
    calls: dict[str, Callable[[], Any]] = {}
    for name in ("mosaic_gpu", "xla"):
        run = jax.jit(
            functools.partial(sparse_mla_decode, scale=1 / 16, return_lse=True, implementation=name)
        )
        calls[f"ours, {name}"] = functools.partial(run, q, kv, indices)
    return calls


def _refuse(bench: str, reason: str | None) -> None:
    if reason:
        raise ConfigError(f"bench {bench} --run: {reason}")


def _milliseconds(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds of a call, each side in turn, `CALLS` at a time after a warm-up turn."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            _wait(call())
            start = time.perf_counter()
            for _ in range(CALLS):
                result = call()
            _wait(result)
            if turn:
                taken[name].append((time.perf_counter() - start) / CALLS * 1e3)
    return {name: statistics.median(times) for name, times in taken.items()}


def _wait(result: Any) -> None:
    if isinstance(result[0], jax.Array):
        jax.block_until_ready(result)
    else:
        import torch

        torch.cuda.synchronize()


def _fla(inputs: tuple[jax.Array, ...]) -> Callable[[], Any]:
    """flash-linear-attention's chunk_kda, on the same values."""
    import torch
    from fla.ops.kda import chunk_kda as fla_chunk_kda

    # One process may hold both frameworks: torch takes the card's memory only as it needs it.
    tensors = [torch.from_numpy(np.asarray(x, np.float32)).cuda() for x in inputs]
    tensors[:3] = [x.to(torch.bfloat16) for x in tensors[:3]]

    def run() -> Any:
        with torch.no_grad():
            return fla_chunk_kda(*tensors, use_qk_l2norm_in_kernel=True)

    return run


def _jla(inputs: tuple[jax.Array, ...]) -> Callable[[], Any]:
    """jax-linear-attention's KDA, whichever implementation it chooses itself."""
    from jla.ops import linear_attention

    def kda(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        return linear_attention("kda", q, k, v, g=g, beta=beta, use_qk_l2norm=True)

    return functools.partial(jax.jit(kda), *inputs)
