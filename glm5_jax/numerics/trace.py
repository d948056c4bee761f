"""A trace: the intermediate arrays of one forward pass, by name, as one safetensors file.

What a site is called, what it holds and how a file is laid out stands in `FORMAT.md`. Any engine
can write such a file; ours come from `numerics.tracing`, transformers' from
`numerics.oracle.trace_transformers`. No JAX here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, cast

import numpy as np

from ..checkpoint.header import DTYPES, read_header, read_metadata
from ..config import ModelConfig, parse_config
from ..errors import CheckpointError, ConfigError, TraceError
from ..skeleton import Skeleton
from ..whole_file import whole_file
from .sites import Site, real_positions, site_dims, sites_of

FORMAT = "glm5-trace-1"
META = ("format", "engine", "versions", "config", "config_sha256", "dtype", "reduce")
DTYPE_WORDS = ("bfloat16", "float16", "float32", "float64")
SAMPLE = 64
Reduce = Literal["full", "stats"]

_WORDS = {dtype: word for word, (_, dtype) in DTYPES.items() if dtype is not None}
_FLOATS = ("BF16", "F16", "F32", "F64")


class Stats(NamedTuple):
    """What `reduce="stats"` keeps of a site, over its real positions; −inf is left out."""

    mean: float
    std: float
    absmax: float
    l2: float


def sample_indices(size: int) -> np.ndarray:
    """Where in the flattened array the sample lies: everywhere up to 64 values, else spread."""
    if size <= SAMPLE:
        return np.arange(size)
    # The golden ratio's multiples: evenly spread, in step with no power of two.
    return np.array([(i * 2654435761 % 2**32) * size >> 32 for i in range(1, SAMPLE + 1)])


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
        self._check_batch()
        self.reduce = cast(Reduce, self.meta["reduce"])
        self.skeleton = Skeleton.from_config(self.config)
        self._all_sites = sites_of(self.skeleton)
        self._check_arrays()
        # In the order of the model, whatever that of a file is.
        order = {name: place for place, name in enumerate(self._all_sites)}
        names = sorted(self._arrays, key=lambda name: order[name.partition("#")[0]])
        self._arrays = {name: self._arrays[name] for name in names}

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

    def reduced(self) -> Trace:
        """The stats and samples of a full trace."""
        arrays: dict[str, np.ndarray] = {}
        for name in self.sites:
            arrays[f"{name}#stats"] = np.array(self.stats(name), np.float32)
            arrays[f"{name}#sample"] = self.sample(name)
        return Trace(arrays, self.tokens, self.mask, complete_meta(self.meta, "stats"))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write one safetensors file, whole or not at all; another trace there is replaced."""
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
        try:
            with whole_file(path, is_trace) as stream:
                stream.write(len(raw).to_bytes(8, "little") + raw)
                for array in tensors.values():
                    stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise TraceError(f"{path}: cannot be written: {error.strerror or error}") from error
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
        """Refuse metadata that say nothing, or another thing than they must."""
        if self.meta.get("format") != FORMAT:
            found = self.meta.get("format")
            self._refuse(f"metadata format: expected {FORMAT!r}, got {found!r}; no trace")
        for key in META:
            if key not in self.meta:
                self._refuse(f"metadata: {key} is missing")
        if self.meta["reduce"] not in ("full", "stats"):
            self._refuse(f"metadata reduce: expected full or stats, got {self.meta['reduce']!r}")
        if self.meta["dtype"] not in DTYPE_WORDS:
            words = ", ".join(DTYPE_WORDS)
            self._refuse(f"metadata dtype: expected one of {words}, got {self.meta['dtype']!r}")
        with suppress(ValueError):
            if isinstance(json.loads(self.meta["versions"]), dict):
                return
        self._refuse("metadata versions: expected a JSON object of versions by package")

    def _check_batch(self) -> None:
        """Refuse a config, tokens and a mask that are not as they must be."""
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


def make_trace(
    sites: Mapping[str, np.ndarray],
    tokens: np.ndarray,
    mask: np.ndarray | None,
    meta: Mapping[str, str],
    reduce: Reduce,
) -> Trace:
    """A trace of what an engine recorded: in order, zeros where nothing is real, reduced if asked.

    meta: `engine`, `versions`, `config`, `dtype`, and whatever else. An array that is no site is
    left out; raises TraceError for one that is, and is not as `FORMAT.md` says.
    """
    mask = np.ones(tokens.shape, bool) if mask is None else np.asarray(mask, bool)
    meta, tokens = complete_meta(meta, "full"), tokens.astype(np.int32)
    frame = Trace({}, tokens, mask, meta)
    arrays = {}
    for name, site in sites_of(frame.skeleton).items():
        if name in sites:
            x, real = sites[name], real_positions(site.axes, mask, frame.config.index_kpool)
            if real is not None and x.shape[:2] == real.shape:
                x = np.where(real.reshape(*real.shape, *(1,) * (x.ndim - 2)), x, x.dtype.type(0))
            arrays[name] = x
    trace = Trace(arrays, tokens, mask, meta)
    return trace if reduce == "full" else trace.reduced()


def complete_meta(meta: Mapping[str, str], reduce: Reduce) -> dict[str, str]:
    """The metadata with what follows from the rest."""
    sha256 = config_sha256(meta["config"])
    return {**meta, "format": FORMAT, "config_sha256": sha256, "reduce": reduce}


def versions(*packages: str) -> str:
    """The metadata's `versions`: those of the packages that are installed, as JSON."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return json.dumps(found)


def is_trace(head: bytes) -> bool:
    """Whether a file that begins so is a trace."""
    return f'"{FORMAT}"'.encode() in head


def config_sha256(config: str) -> str:
    """The SHA-256 of the metadata's `config`."""
    return hashlib.sha256(config.encode()).hexdigest()
