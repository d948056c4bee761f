"""A trace: the intermediate arrays of one forward pass, by name, as one safetensors file.

What a site is called, what it holds and how a file is laid out stands in `FORMAT.md`; the table
`sites_of` is the same in code. Any engine can write such a file; ours come from
`numerics.tracing`, transformers' from `numerics.oracle.trace_transformers`. No JAX here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, cast

import numpy as np

from ..checkpoint.header import DTYPES, read_header, read_metadata
from ..config import ModelConfig, parse_config
from ..errors import CheckpointError, ConfigError, TraceError
from ..skeleton import Skeleton

FORMAT = "glm5-trace-1"
META = ("format", "engine", "versions", "config", "config_sha256", "dtype", "reduce")
SAMPLE = 64
Reduce = Literal["full", "stats"]
Keep = str | Sequence[str]

_WORDS = {dtype: word for word, (_, dtype) in DTYPES.items() if dtype is not None}
_FLOATS = ("BF16", "F16", "F32", "F64")


class Site(NamedTuple):
    """One kind of site: its axes in the letters of `site_dims`, and whether it holds choices.

    `scores` is the site that a choice was made by.
    """

    axes: str
    choice: bool = False
    scores: str | None = None


class Stats(NamedTuple):
    """What `reduce="stats"` keeps of a site, over its real positions; −inf is left out."""

    mean: float
    std: float
    absmax: float
    l2: float


def _connection(at: str) -> dict[str, Site]:
    coefficients = {"pre": "B T M", "post": "B T M", "comb": "B T M M"}
    axes = coefficients | {"collapse": "B T X", "norm": "B T X"}
    return {f"{at}.{name}": Site(letters) for name, letters in axes.items()}


_KDA = {
    **{f"attn.{name}": Site("B T H D") for name in ("q", "k", "v", "g")},
    "attn.beta": Site("B T H"),
    "attn.state": Site("B H D D"),
    "attn.o": Site("B T H D"),
    "attn.kda": Site("B T X"),
}
_INDEXER = {
    "attn.index_keys": Site("B T DI"),
    "attn.pool_keys": Site("B NP DI"),
    "attn.index_scores": Site("B T NP"),
    "attn.pools": Site("B T C", choice=True, scores="attn.index_scores"),
}
_DSA = {
    "attn.selection": Site("B T W", choice=True),
    "attn.o": Site("B T A V"),
    "attn.dsa": Site("B T X"),
}
_MOE = {
    "ffn.router.logits": Site("B T E"),
    "ffn.router.scores": Site("B T E"),
    "ffn.router.experts": Site("B T k", choice=True, scores="ffn.router.scores"),
    "ffn.router.weights": Site("B T k"),
    "ffn.experts": Site("B T X"),
    "ffn.shared": Site("B T X"),
    "ffn.moe": Site("B T X"),
}

# Sites without a token axis, by their last name, which belongs to no other site.
OFF_TOKENS = {
    name.rpartition(".")[2]: site.axes
    for name, site in (_KDA | _INDEXER).items()
    if not site.axes.startswith("B T")
}


def sites_of(skeleton: Skeleton) -> dict[str, Site]:
    """Every site of a model, in the order in which they happen."""
    sites = {"embedding": Site("B T X")}
    for layer in skeleton.layers:
        inside = {"in": Site("B T M X"), **_connection("attn")}
        if layer.mixer == "kda":
            inside |= _KDA
        else:
            inside |= {"attn.latent": Site("B T R")}
            inside |= (_INDEXER if layer.indexer == "full" else {}) | _DSA
        inside |= {"attn.expand": Site("B T M X"), **_connection("ffn")}
        inside |= _MOE if layer.mlp == "moe" else {"ffn.dense": Site("B T X")}
        inside |= {"ffn.expand": Site("B T M X")}
        at = f"layers.{layer.index}"
        for name, site in inside.items():
            scores = None if site.scores is None else f"{at}.{site.scores}"
            sites[f"{at}.{name}"] = site._replace(scores=scores)
    final = {"mean": "B T X", "norm": "B T X", "head": "B T Vo"}
    return sites | {f"final.{name}": Site(axes) for name, axes in final.items()}


def site_dims(config: ModelConfig, batch: int, tokens: int) -> dict[str, int]:
    """The sizes behind the letters of `Site.axes`; pools are those of a row without padding."""
    pools, chosen = tokens // config.index_kpool, config.index_topk // config.index_kpool
    tail = config.index_kpool - 1 if config.index_kpool_always_select_tail else 0
    return {
        **config.dims,
        "B": batch,
        "T": tokens,
        "NP": pools,
        "C": min(chosen, pools),
        "W": config.index_topk + tail,
        "k": config.num_experts_per_tok,
    }


def real_positions(axes: str, mask: Any, pool: int) -> Any | None:
    """Which part of a site is real, as [B, T] or [B, NP]; None if all of it is.

    A pool is real where its row fills it. `mask` [B, T] may be an array of NumPy or JAX.
    """
    if axes.startswith("B T"):
        return mask
    if axes.startswith("B NP"):
        end = pool * (np.arange(mask.shape[1] // pool) + 1)
        return end <= mask.sum(1)[:, None]
    return None


def sample_indices(size: int) -> np.ndarray:
    """Where in the flattened array the sample lies: everywhere up to 64 values, else spread."""
    if size <= SAMPLE:
        return np.arange(size)
    # The golden ratio's multiples: evenly spread, in step with no power of two.
    return np.array([(i * 2654435761 % 2**32) * size >> 32 for i in range(1, SAMPLE + 1)])


def kept(name: str, keep: Keep) -> bool:
    """Whether a site's name matches the pattern, or one of them (`layers.3.*`, `*.router.*`)."""
    patterns = (keep,) if isinstance(keep, str) else keep
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class Trace(Mapping[str, np.ndarray]):
    """The sites of one forward pass by name, in order; see `FORMAT.md`.

    A full trace maps `NAME` to its array, one of stats `NAME#stats` [4] and `NAME#sample` [≤ 64].
    `sites` are the names, `stats` and `sample` answer for both kinds. Arrays of a loaded trace are
    read from the file when they are used.

    tokens: [B, T] int32, and `mask`: [B, T] bool, as the caller gave them.
    meta: the file's metadata, strings by name.

    Raises:
        TraceError: something is not as `FORMAT.md` says; one line.
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        tokens: np.ndarray,
        mask: np.ndarray,
        meta: Mapping[str, str],
        source: str = "trace",
    ):
        self.tokens, self.mask, self.meta = tokens, mask, dict(meta)
        self._arrays, self._source = dict(arrays), source
        self._check_frame()
        self.reduce = cast(Reduce, self.meta["reduce"])
        self.skeleton = Skeleton.from_config(self.config)
        self._all_sites = sites_of(self.skeleton)
        self._check_arrays()

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        B, T = self.tokens.shape
        return (
            f"Trace({self.meta['engine']}, {self.meta['dtype']}, {self.reduce}, "
            f"{len(self.sites)} sites, tokens [{B}, {T}])"
        )

    @property
    def sites(self) -> tuple[str, ...]:
        """The names of the sites that were kept, in order."""
        return tuple(dict.fromkeys(name.partition("#")[0] for name in self._arrays))

    @cached_property
    def config(self) -> ModelConfig:
        """The model, as far as its text numbers hang on it: two engines' configs can be equal."""
        try:
            config = parse_config(json.loads(self.meta["config"]), self._source)
        except (ConfigError, ValueError) as error:
            self._refuse(f"metadata config: {error}")
        return replace(
            config,
            num_nextn_predict_layers=0,
            max_position_embeddings=0,
            index_share_for_mtp_iteration=False,
            pad_token_id=None,
            eos_token_ids=(),
            dtype=None,
            quantization=None,
            vision=None,
        )

    def site(self, name: str) -> Site:
        """What kind of site it is; KeyError if the model has none of this name."""
        return self._all_sites[name]

    def real(self, name: str) -> np.ndarray | None:
        """[B, T] or, of pools, [B, NP]: which part of a site is real; None where all of it is."""
        return real_positions(self.site(name).axes, self.mask, self.config.index_kpool)

    def stats(self, name: str) -> Stats:
        """Mean, standard deviation, largest magnitude and L2 norm of a site's real positions."""
        if self.reduce == "stats":
            return Stats(*map(float, self[f"{name}#stats"]))
        real, values = self.real(name), self[name]
        values = (values if real is None else values[real]).astype(np.float64)
        values = values[values != -np.inf]
        if not values.size:
            return Stats(0.0, 0.0, 0.0, 0.0)
        l2 = float(np.sqrt(np.sum(values**2)))
        return Stats(float(values.mean()), float(values.std()), float(np.abs(values).max()), l2)

    def sample(self, name: str) -> np.ndarray:
        """Up to 64 values of a site, at the same places in every trace of this batch."""
        if self.reduce == "stats":
            return self[f"{name}#sample"]
        return self[name].reshape(-1)[sample_indices(self[name].size)]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write one safetensors file, whole or not at all."""
        path = Path(path)
        tensors = {"tokens": self.tokens, "mask": self.mask, **self._arrays}
        header: dict[str, Any] = {"__metadata__": self.meta}
        end = 0
        for name, array in tensors.items():
            begin, end = end, end + array.nbytes
            offsets = [begin, end]
            word = _WORDS[array.dtype]
            header[name] = {"dtype": word, "shape": list(array.shape), "data_offsets": offsets}
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        partial = path.with_name(f".{path.name}.partial")
        try:
            with partial.open("wb") as stream:
                stream.write(len(raw).to_bytes(8, "little") + raw)
                for array in tensors.values():
                    stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(partial, path)
        except OSError as error:
            raise TraceError(f"{path}: cannot be written: {error.strerror or error}") from error
        finally:
            partial.unlink(missing_ok=True)
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a file that `save` or another engine wrote.

        Raises TraceError, one line that names the file and what is wrong with it.
        """
        path = Path(path)
        try:
            tensors, meta = read_header(path, path.name), read_metadata(path)
            data = np.memmap(path, np.uint8, mode="r")
        except CheckpointError as error:
            raise TraceError(str(error)) from None
        arrays = {}
        for name, word, shape, _, offset, nbytes in tensors:
            dtype = DTYPES[word][1]
            if dtype is None:
                raise TraceError(f"{path}: {name}: {word} has no array form")
            arrays[name] = data[offset : offset + nbytes].view(dtype).reshape(shape)
        for name in ("tokens", "mask"):
            if name not in arrays:
                raise TraceError(f"{path}: no tensor {name!r}; this is no trace (see FORMAT.md)")
        tokens, mask = np.array(arrays.pop("tokens")), np.array(arrays.pop("mask"))
        return cls(arrays, tokens, mask, meta, source=str(path))

    def _refuse(self, problem: str) -> NoReturn:
        raise TraceError(f"{self._source}: {problem}")

    def _check_frame(self) -> None:
        """Refuse metadata, tokens and a mask that say nothing, or another thing than they must."""
        if self.meta.get("format") != FORMAT:
            found = self.meta.get("format")
            self._refuse(f"metadata format: expected {FORMAT!r}, got {found!r}; no trace")
        for key in META:
            if key not in self.meta:
                self._refuse(f"metadata: {key} is missing")
        if self.meta["reduce"] not in ("full", "stats"):
            self._refuse(f"metadata reduce: expected full or stats, got {self.meta['reduce']!r}")
        if config_sha256(self.meta["config"]) != self.meta["config_sha256"]:
            self._refuse("metadata config_sha256: not the SHA-256 of metadata config")
        for name, array, dtype in (("tokens", self.tokens, "int32"), ("mask", self.mask, "bool")):
            if array.ndim != 2 or array.dtype != dtype or array.shape != self.tokens.shape:
                self._refuse(
                    f"{name}: expected {dtype} [B, T], got {array.dtype} {list(array.shape)}"
                )

    def _check_arrays(self) -> None:
        """Refuse an array that is no site of the model, or of another shape or type."""
        dims = site_dims(self.config, *self.tokens.shape)
        stats = self.reduce == "stats"
        for name, array in self._arrays.items():
            of, _, part = name.partition("#")
            site = self._all_sites.get(of)
            if site is None or part not in (("stats", "sample") if stats else ("",)):
                form = "#stats and #sample of a site" if stats else "a site"
                self._refuse(f"{name}: expected {form} of this model (reduce={self.reduce})")
            shape = tuple(dims[letter] for letter in site.axes.split())
            expected = f"[{site.axes}] = {list(shape)}"
            if part == "stats":
                shape, expected = (4,), "[4]"
            elif part == "sample":
                shape = (min(SAMPLE, math.prod(shape)),)
                expected = str(list(shape))
            if array.shape != shape:
                self._refuse(f"{name}: expected shape {expected}, got {list(array.shape)}")
            if part == "stats":
                words: tuple[str, ...] = ("F32",)
            else:
                words = ("I32",) if site.choice else _FLOATS
            if _WORDS.get(array.dtype) not in words:
                self._refuse(f"{name}: expected {' or '.join(words)}, got {array.dtype}")
            if stats and f"{of}#{'sample' if part == 'stats' else 'stats'}" not in self._arrays:
                self._refuse(f"{name}: its stats and its sample belong together; one is missing")


def config_sha256(config: str) -> str:
    """The SHA-256 of the metadata's `config`."""
    return hashlib.sha256(config.encode()).hexdigest()
