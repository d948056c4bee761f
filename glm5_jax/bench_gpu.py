"""The KDA kernels on a GPU: compiled without one, or timed on one beside what is installed.

`--compile-for` prints what the assembler reports of each kernel and the least time that the shape
allows. `--run` needs a Hopper GPU. Its peers are optional: flash-linear-attention (`fla-core`, on
torch) and jax-linear-attention; one that is missing is named, not skipped in silence.
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
from pallas_kernels.aot_calls import KDAShape
from pallas_kernels.kda import chunk_kda, mosaic_gpu, roofline
from pallas_kernels.roofline import H200

CALLS = 20  # between two looks at the clock


def compile_lines(target: str, shape: KDAShape | None = None) -> tuple[list[str], bool]:
    """What `--compile-for` prints, and whether every kernel is free of spills and uses wgmma."""
    shape = shape or KDAShape()
    try:
        kernels = compile_kernels(target, [shape])[str(shape)]
        used = versions()
    except CannotCompile as error:
        raise ConfigError(str(error)) from error
    lines = [f"{shape} for {target}, JAX {used['jax']}, ptxas {used['ptxas']}"]
    lines += [f"  {kernel}" for kernel in kernels]
    lines += [f"  {line}" for line in _roofline(shape)]
    good = all(x.spilled_bytes == 0 and x.wgmma and not x.serialized for x in kernels)
    return lines, good


def _roofline(shape: KDAShape) -> list[str]:
    stages = roofline.stages(shape.B, shape.T, shape.H, shape.V)
    floor = roofline.floor(shape.B, shape.T, shape.H, shape.K, shape.V)
    return [stage.describe(H200) for stage in [*stages, floor]]


def run_lines(repeats: int = 5, shape: KDAShape | None = None) -> list[str]:
    """Milliseconds of the forward pass for ours and each peer, and the share of the floor.

    Raises:
      ConfigError: there is no GPU that the kernels run on.
    """
    shape = shape or KDAShape()
    rng = np.random.default_rng(0)
    sizes = (shape.B, shape.T, shape.H)
    q, k, v = (
        jnp.asarray(rng.standard_normal((*sizes, width), np.float32), jnp.bfloat16)
        for width in (shape.K, shape.K, shape.V)
    )
    g = jnp.asarray(-5 * rng.random((*sizes, shape.K), np.float32))
    beta = jnp.asarray(rng.random(sizes, np.float32))
    inputs = (q, k, v, g, beta)
    state = jnp.zeros((shape.B, shape.H, shape.K, shape.V), jnp.float32)
    if reason := mosaic_gpu.supports(*inputs, state):
        raise ConfigError(f"bench kda --run: {reason}")

    calls: dict[str, Callable[[], Any]] = {}
    for name in ("mosaic_gpu", "xla"):
        run = jax.jit(functools.partial(chunk_kda, implementation=name))
        calls[f"ours, {name}"] = functools.partial(run, *inputs)
    lines = [f"{shape} on {jax.devices()[0].device_kind}, JAX {jax.__version__}"]
    for name, make in (("flash-linear-attention", _fla), ("jax-linear-attention", _jla)):
        try:
            calls[name] = make(inputs)
        except ImportError as error:
            lines.append(f"  {name}: not installed ({error})")
    floor, _ = roofline.floor(*sizes, shape.K, shape.V).bound(H200)
    times = _milliseconds(calls, repeats)
    for name, taken in times.items():
        lines.append(f"  {name}: {taken:.3f} ms, {taken / (floor * 1e3):.1f} times the floor")
    return lines + [f"  {line}" for line in _roofline(shape)]


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
