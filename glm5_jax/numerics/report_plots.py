"""The pictures of a comparison as PNG files, by matplotlib."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TraceError
from ..whole_file import write_whole
from .compare_logits import LogitComparison
from .compare_table import Comparison
from .report import sentence
from .report_svg import FLOOR, tails

# From no error to all of it: the colours of the HTML page.
RAMP = (
    *("#f0f3f6", "#dbe7f3", "#b9d3ee", "#8fb8e6", "#6a93dc"),
    *("#6069cf", "#7b45b8", "#a82d94", "#d62f60", "#f0582c"),
)


def write_plots(table: Comparison, directory: str | os.PathLike[str]) -> list[Path]:
    """Write `errors.png` and, where there are logits, `logits.png`, each whole or not at all.

    The directory is made if it is not there. Raises TraceError where matplotlib is not installed,
    OSError where a file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TraceError(
            "plots need matplotlib, which the notebook extra brings: "
            "pip install 'glm5-jax[notebook]'"
        ) from error
    figures = {"errors.png": error_figure(table, Figure)}
    if table.logits is not None:
        figures["logits.png"] = logit_figure(table.logits, Figure)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures.items():
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=150)
        written.append(write_whole(directory / name, png.getvalue(), b"\x89PNG"))
    return written


def error_figure(table: Comparison, figure: Any) -> Any:
    """The relative error by layer and site; the first divergence is framed, flips are dots."""
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    lines = {tail: i for i, tail in enumerate(tails(table))}
    columns = {layer.layer: i for i, layer in enumerate(table.layers)}
    errors = np.full((max(len(lines), 1), max(len(columns), 1)), np.nan)
    flips, frame = [], None
    for row in table.rows:
        if row.layer is None:
            continue
        at = lines[row.tail], columns[row.layer]
        if np.isnan(row.max_abs):
            flips += [at] if row.flips else []
        else:
            errors[at] = np.clip(row.relative_l2, FLOOR, 1)
        if row is table.first_divergence:
            frame = at
    fig = figure(
        figsize=(2.8 + 0.3 * max(len(columns), 10), 1.6 + 0.2 * errors.shape[0]),
        layout="constrained",
    )
    axes = fig.subplots()
    image = axes.pcolormesh(
        errors,
        norm=LogNorm(FLOOR, 1),
        cmap=LinearSegmentedColormap.from_list("error", RAMP),
        edgecolors="white",
        linewidth=0.8,
    )
    for line, column in flips:
        axes.plot(column + 0.5, line + 0.5, "o", color="black", markersize=3)
    if frame is not None:
        line, column = frame
        axes.plot(
            [column, column + 1, column + 1, column, column],
            [line, line, line + 1, line + 1, line],
            color="#16191f",
            linewidth=2.2,
            clip_on=False,
        )
    axes.set_yticks(np.arange(len(lines)) + 0.5, list(lines), fontsize=7)
    every = max(1, len(columns) // 24)
    axes.set_xticks(np.arange(0, len(columns), every) + 0.5, list(columns)[::every], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("layer")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    fig.colorbar(image, label="relative L2 error", extend="both")
    fig.suptitle(sentence(table), fontsize=9, wrap=True)
    return fig


def logit_figure(logits: LogitComparison, figure: Any) -> Any:
    """KL by position, a panel for each row; red where the likeliest token is another one."""
    B, T = logits.real.shape
    fig = figure(figsize=(9, 0.9 + 1.7 * B), layout="constrained")
    for row, axes in enumerate(np.atleast_1d(fig.subplots(B, sharex=True, sharey=True))):
        kl = np.where(logits.real[row], np.maximum(logits.kl[row], 1e-17), np.nan)
        colors = np.where(logits.agree[row], "#1e66a8", "#c02637")
        axes.bar(np.arange(T), kl, width=0.85, color=colors)
        axes.set_yscale("log")
        axes.set_ylabel(f"row {row}", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", linewidth=0.4, alpha=0.6)
        axes.set_axisbelow(True)
    axes.set_xlabel("position")
    fig.suptitle(
        f"KL divergence of the next token (nats); the likeliest is the same at {logits.top1:.1%}",
        fontsize=10,
    )
    return fig
