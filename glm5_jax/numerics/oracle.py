"""The transformers implementation of the model, called as the judge of ours.

`transformers` (5.24 or newer) ships `Glm5NextForConditionalGeneration`; it runs on a CPU with plain
torch. It is only ever called here, and only with what the `oracle` extra installs. Three things are
added to it:

* a float64 mode. Its module writes `torch.float32` and `.float()` where the released arithmetic
  has a float32 island; a second copy of the module, imported beside the first with those widened,
  computes everything in float64, so that a wrong eps, scale or order has no rounding to hide in;
* the intermediate arrays, under the names that our own trace uses (`layers.3.attn.dsa`, ...),
  among them the scores of every discrete choice, which `choices.discrete_gaps` reads;
* the gradient by every parameter, as a checkpoint directory.

Attention is SDPA: for a query with nothing to attend to it gives zero, where the eager form gives
nonsense. Experts are eager: the only form that has a float64 path.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np

from ..config import parse_config
from ..errors import CheckpointError, TraceError
from ..skeleton import Skeleton
from .sites import Keep, chosen_sites
from .trace import Reduce, Trace, make_trace, versions

if TYPE_CHECKING:
    import torch

# A `Glm5NextForConditionalGeneration`: Any, since transformers may not be there to check against.
Oracle: TypeAlias = Any

MODULE = "transformers.models.glm5_next.modeling_glm5_next"
DTYPES = ("float32", "float64", "bfloat16")


class OracleMissing(ImportError):
    """torch or a transformers that knows the model is not installed."""


def oracle_available() -> bool:
    """Whether torch and a transformers with this model can be imported, without importing torch."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in ("torch", MODULE))
    except ModuleNotFoundError:
        return False


def oracle_module(dtype: str = "float32") -> Any:
    """The oracle's modeling module; for `"float64"` its widened copy.

    Raises OracleMissing where the `oracle` extra is not installed, ValueError for another dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"oracle dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if not oracle_available():
        raise OracleMissing(
            "the transformers oracle needs torch and transformers >= 5.24 with glm5_next; "
            "install them with: pip install 'glm5-jax[oracle]'"
        )
    return _widened_module() if dtype == "float64" else importlib.import_module(MODULE)


def _widened_module() -> Any:
    name = f"{MODULE}_float64"
    if name in sys.modules:
        return sys.modules[name]
    released = importlib.import_module(MODULE)
    assert released.__file__ is not None
    source = Path(released.__file__).read_text()
    source = re.sub(r"\btorch\.float(32)?\b", "torch.float64", source)
    source = source.replace(".float()", ".double()")
    spec = importlib.util.spec_from_loader(name, loader=None, origin=released.__file__)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # Its relative imports resolve to the released package, so both share one config class.
    module.__package__ = released.__package__
    module.__file__ = released.__file__
    sys.modules[name] = module
    try:
        exec(compile(source, released.__file__, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and its notices about missing GPU kernels."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def build_oracle(config: Mapping[str, Any], dtype: str = "float32") -> Oracle:
    """A freshly initialised oracle of a `config.json` dictionary, in eval mode."""
    import torch

    module = oracle_module(dtype)
    parsed = module.Glm5NextConfig.from_dict(dict(config))
    parsed._experts_implementation = "eager"
    parsed._attn_implementation = "sdpa"
    with quiet():
        model = module.Glm5NextForConditionalGeneration(parsed)
    return model.to(torch.float64 if dtype == "float64" else torch.float32).eval()


def oracle_model(path: str | Path, dtype: str = "float32") -> Oracle:
    """The oracle loaded from a checkpoint directory, in eval mode.

    `"bfloat16"` keeps in float32 what transformers keeps there (correction bias, router and conv
    weights, `A_log`, `dt_bias`, hyper-connection base and scale); `"float64"` widens every
    parameter and buffer exactly. A tensor that the oracle would have to invent, or that it finds
    and does not know, is an error: it must not judge with random weights. The MTP layer is left
    out: the oracle has none (it passes over index 45 alone by itself).
    """
    import torch

    if not Path(path, "config.json").is_file():
        raise CheckpointError(f"{path}: no config.json; expected a checkpoint directory")
    module = oracle_module(dtype)
    with quiet():
        model, info = module.Glm5NextForConditionalGeneration.from_pretrained(
            str(path),
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            experts_implementation="eager",
            output_loading_info=True,
        )
    mtp = f"model.language_model.layers.{model.config.text_config.num_hidden_layers}."
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        found = sorted(name for name in map(str, info.get(kind) or ()) if not name.startswith(mtp))
        if found:
            raise ValueError(f"{path}: the oracle reports {kind}: {found[:4]}")
    if dtype == "float64":
        model = model.double()
    return model.eval()


def oracle_logits(model: Oracle, tokens: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """Logits [B, T, vocab] of tokens [B, T]; mask [B, T] is 1 for real tokens.

    float64 from a float64 oracle, else float32 (bfloat16 widens exactly).
    """
    return _to_numpy(_forward(model, tokens, mask).logits)


def oracle_sites(
    model: Oracle, tokens: np.ndarray, mask: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Every intermediate array of one forward pass, by the names of our own trace.

    They are listed in `FORMAT.md`, of the same shapes; bfloat16 is widened. Beside them, each
    discrete choice has the scores it chose from and how many it chose, as `.scores` and `.k` of
    `attn.selection` (one score per pool), `ffn.router.experts` and `ffn.router.groups`. What was
    no candidate scores -inf or the dtype's minimum.
    """
    from glm5_jax.numerics.oracle_sites import recording

    with recording(model.model.language_model) as sites:
        logits = _forward(model, tokens, mask).logits
    out = {name: _to_numpy(value) for name, value in sites.items()}
    out["final.head"] = _to_numpy(logits)
    return out


def trace_transformers(
    model: Oracle,
    tokens: np.ndarray,
    mask: np.ndarray | None = None,
    keep: Keep = "*",
    reduce: Reduce = "full",
) -> Trace:
    """`glm5_jax.trace` of a transformers model, on whatever device it is: see `FORMAT.md`.

    model: a `Glm5NextForConditionalGeneration`, of any dtype. Arguments as those of `trace`.
    `layers.N.attn.beta` is rounded to the activation dtype there, before its use; choices are put
    into the order of ours. No site is ours alone.
    """

    from glm5_jax.numerics.oracle_sites import recording

    ids, vocab = np.asarray(tokens), model.config.text_config.vocab_size
    if ids.ndim != 2 or not np.all((ids >= 0) & (ids < vocab)):
        raise TraceError(f"tokens: expected [B, T] ids below {vocab}, got those of {ids.shape}")
    text = model.model.language_model
    parameter = text.norm.weight
    config = model.config.to_json_string()
    names = chosen_sites(Skeleton.from_config(parse_config(json.loads(config))), keep)
    with recording(text, wanted=names.__contains__) as sites:
        logits = _forward(model, ids, mask).logits
    if "final.head" in names:
        sites["final.head"] = logits
    return make_trace(
        {name: _stored(value) for name, value in sites.items()},
        ids,
        mask,
        {
            "engine": "transformers",
            "versions": versions("transformers", "torch", "glm5-jax"),
            "config": config,
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "implementation": f"{parameter.device.type}, {text.config._attn_implementation}",
        },
        reduce,
    )


def oracle_layer(
    model: Oracle,
    layer: int,
    streams: np.ndarray,
    mask: np.ndarray | None = None,
    previous_indices: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """The sites of one decoder layer fed `streams` [B,T,M,X]; the output is its `ffn.expand`.

    `previous_indices` is the choice of the full DSA layer before it, which a layer of
    indexer type "shared" reuses.
    """
    import torch

    from glm5_jax.numerics.oracle_sites import recording

    text = model.model.language_model
    parameter = text.layers[layer].input_layernorm.weight
    x = torch.tensor(np.asarray(streams)).to(parameter.dtype)
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else torch.tensor(mask).bool()
    previous = None if previous_indices is None else torch.tensor(previous_indices)
    with torch.no_grad(), recording(text, range(layer, layer + 1)) as sites:
        text.layers[layer](x, attention_mask=real, prev_topk_indices=previous)
    return {name: _to_numpy(value) for name, value in sites.items()}


def write_gradients(
    model: Oracle, tokens: np.ndarray, directory: str | Path, mask: np.ndarray | None = None
) -> float:
    """The gradient of a loss by every parameter, as a checkpoint directory; returns the loss.

    The loss is the mean over real positions t of the cross entropy of token t + 1, where both are
    real. The directory has the released names, in float32, so whatever loads weights loads
    gradients. Zero where the oracle has none (indexer, vision).
    """
    import torch

    x = torch.tensor(np.asarray(tokens), dtype=torch.long)
    real = torch.ones_like(x) if mask is None else torch.tensor(np.asarray(mask)).to(x.dtype)
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=x, attention_mask=real, use_cache=False).logits
    pairs = (real[:, 1:] * real[:, :-1]).bool()
    loss = torch.nn.functional.cross_entropy(logits[:, :-1][pairs], x[:, 1:][pairs])
    loss.backward()
    holder = build_oracle(model.config.to_dict(), "float32")
    gradients = {name: p.grad for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in holder.named_parameters():
            grad = gradients[name]
            parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)
    with quiet():
        holder.save_pretrained(str(directory))
    model.zero_grad(set_to_none=True)
    return float(loss.detach())


def _forward(model: Oracle, tokens: np.ndarray, mask: np.ndarray | None) -> Any:
    import torch

    x = torch.tensor(np.asarray(tokens), dtype=torch.long, device=model.device)
    attention_mask = None if mask is None else torch.tensor(np.asarray(mask)).to(x)
    with torch.no_grad():
        return model(input_ids=x, attention_mask=attention_mask, use_cache=False)


def _to_numpy(value: torch.Tensor) -> np.ndarray:
    import torch

    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy().copy()


def _stored(value: torch.Tensor) -> np.ndarray:
    """The array as it is, bfloat16 included; integers are int32."""
    import torch

    value = value.detach().cpu()
    if value.dtype == torch.bfloat16:
        return value.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return (value if value.is_floating_point() else value.int()).numpy()
