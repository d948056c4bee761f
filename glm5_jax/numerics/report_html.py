"""A comparison as one HTML page: no network, no script, light or dark, phone or wide screen."""

from __future__ import annotations

import math
import os
import re
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path

from ..errors import TraceError
from ..whole_file import write_whole
from . import report_svg as svg
from .compare_table import WRONG, Comparison, Row
from .report import SHOWN_FLIPS, count, detail, hint, number, reason, sentence

_COLUMNS = ("relative L2", "expected", "× explained", "max abs", "cosine", "worst at")
_GLOSSARY = {
    "relative L2": "The norm of the difference by the larger of the two norms, over real tokens. "
    "Of a choice: the share of tokens that chose otherwise.",
    "expected": "What rounding adds in the coarser dtype, and the measured error of what the site "
    "reads, times the usual gain of its step.",
    "× explained": "The error by the largest that these explain. Beyond 1 the site diverges: "
    "it has an error of its own.",
    "follows": "Its error came in from a site that diverges.",
    "flipped": "Some tokens chose other experts or pools, by scores that are closer than the two "
    "sides' scores. What is behind such a token at first differs by any amount.",
}


def write_html(table: Comparison, path: str | os.PathLike[str]) -> Path:
    """Write the page, whole or not at all. Raises TraceError where it cannot be written."""
    try:
        return write_whole(path, to_html(table).encode(), b"<!doctype html>")
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror or error}") from error


def to_html(table: Comparison) -> str:
    """The page."""
    css = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    parts = [_header(table), _heat_map(table), _course(table)]
    parts += [_logits(table), _sites(table), _flips(table), _one_side(table), _glossary()]
    title = f"{'agree' if table.ok else 'apart'}: {' and '.join(s['label'] for s in table.sides)}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n"
        f"{''.join(parts)}</main>\n</body>\n</html>\n"
    )


def _header(table: Comparison) -> str:
    word = "rounding" if table.ok else "apart"
    facts = {
        "sites compared": f"{len(table.rows):,}",
        "tokens": f"{int(table.real.sum()):,}",
        "choices that differ": f"{len(table.flips):,}",
    }
    if table.logits is not None:
        facts["same likeliest token"] = f"{table.logits.top1:.1%}"
        facts["mean KL of the logits, nats"] = number(table.logits.mean_kl)
    cells = "".join(f"<div><b>{v}</b><span>{escape(k)}</span></div>" for k, v in facts.items())
    sides = ""
    for side in table.sides:
        shown = (side.get(name, "") for name in ("engine", "dtype", "implementation", "reduce"))
        more = " · ".join(map(escape, filter(None, shown)))
        sides += (
            f"<div><code>{escape(side['label'])}</code><br><span class=soft>{more}</span></div>"
        )
    same = ""
    if all(side.get("config_sha256") for side in table.sides):
        # Configs that differ are refused; files that differ may say the same one.
        same = "<p class=soft>Both ran the same model.</p>"
    advice = re.sub("`(.*?)`", r"<code>\1</code>", escape(hint(table)))
    more = f"\n<p class=hint>{advice}</p>" if advice else ""
    return (
        f'<header class="{"" if table.ok else "apart"}"><p class="eyebrow">{word}</p>\n'
        f"<h1>{escape(sentence(table))}</h1>\n<p class=soft>{escape(detail(table))}</p>{more}\n"
        f'<div class="facts">{cells}</div>\n<div class="sides">{sides}</div>{same}</header>\n'
    )


def _heat_map(table: Comparison) -> str:
    picture = svg.heat_map(table)
    if not picture:
        return ""
    small = svg.heat_map(table, room=svg.PHONE, least=0)
    return (
        "<section><h2>Error by layer and site</h2>\n"
        "<p class=soft>Each cell is a site of a layer, top to bottom as they are computed. "
        'All numbers are in the table below<span class="broad">; point at one for its own</span>.'
        "</p>\n"
        f'<div id="heat"><div class="wide broad">{picture}</div><div class="narrow">{small}</div>'
        f"</div>\n{svg.ramp()}</section>\n"
    )


def _course(table: Comparison) -> str:
    return (
        "<section><h2>How the error grows</h2>\n"
        "<p class=soft>Every site in the order of the model: its relative error, and what its "
        "inputs and its dtype explain.</p>\n"
        f'<div class="wide broad">{svg.course(table)}</div>'
        f'<div class="narrow">{svg.course(table, room=svg.PHONE)}</div>\n'
        '<div class="legend"><span><i style="background:var(--cool)"></i>measured</span>'
        '<span><i style="background:var(--explained)"></i>expected</span>'
        '<span><i style="background:var(--bad)"></i>diverges</span></div></section>\n'
    )


def _logits(table: Comparison) -> str:
    if table.logits is None:
        return ""
    logits = table.logits
    return (
        "<section><h2>Logits by position</h2>\n"
        f"<p class=soft>KL divergence of the next token's distribution, in nats: "
        f"{number(logits.mean_kl)} in the mean, {number(logits.max_kl)} at most. The likeliest "
        f"token is the same at {logits.top1:.1%}; its log-probability moves by "
        f"{number(logits.max_logprob)} at most.</p>\n"
        f'<div class="wide" id="logits">{svg.divergence_of_logits(logits)}</div>\n'
        '<div class="legend"><span><i style="background:var(--cool)"></i>same likeliest token'
        '</span><span><i style="background:var(--bad)"></i>another one</span></div></section>\n'
    )


def _sites(table: Comparison) -> str:
    groups = groupby(table.rows, key=lambda row: row.layer)
    opened = "" if table.ok else "; the layer that parts first is open"
    blocks = [_block(tuple(rows), table.first_divergence) for _, rows in groups]
    return (
        f"<section id=sites><h2>All sites</h2><p class=soft>{count(len(table.rows), 'site')}"
        f"{opened}.</p>\n{''.join(blocks)}</section>\n"
    )


def _block(rows: tuple[Row, ...], first: Row | None) -> str:
    worst = max(rows, key=lambda row: row.excess)
    where = f"Layer {rows[0].layer}" if rows[0].layer is not None else rows[0].name.split(".")[0]
    verdict = next((row.verdict for row in rows if row.verdict in WRONG), rows[-1].verdict)
    flips = sum(row.flips for row in rows)
    summary = (
        f"<b>{escape(where.capitalize())}</b>{_badge(verdict)}"
        f"<span class=soft>{number(worst.excess)} × explained at most, {escape(worst.name)}"
        f"{'; ' + count(flips, 'flip') if flips else ''}</span>"
    )
    head = "".join(f"<th class=n>{name}</th>" for name in _COLUMNS)
    body = "".join(_site(row, row is first) for row in rows)
    is_open = " open" if any(row is first for row in rows) else ""
    return (
        f"<details{is_open}><summary>{summary}</summary><div class=wide><table><thead><tr>"
        f"<th>site</th><th>verdict</th>{head}<th></th></tr></thead><tbody>{body}</tbody></table></div></details>\n"
    )


def _site(row: Row, is_first: bool) -> str:
    cosine = "–" if math.isnan(row.cosine) else f"{row.cosine:.6f}"
    values = map(number, (row.relative_l2, row.expected, row.excess, row.max_abs))
    cells = "".join(f"<td class=n>{v}</td>" for v in (*values, cosine))
    worst = ", ".join(map(str, row.worst))
    note = "; ".join(filter(None, ("the first divergence" if is_first else "", row.note)))
    return (
        f"<tr{' class=here id=first' if is_first else ''}><td><code>{escape(row.name)}</code></td>"
        f"<td>{_badge(row.verdict)}</td>{cells}<td class=n>{worst}</td>"
        f"<td class=soft>{escape(note)}</td></tr>"
    )


def _flips(table: Comparison) -> str:
    if not table.flips:
        return ""
    ordered = sorted(table.flips, key=lambda flip: flip.explained is not False)
    rows = "".join(
        f"<tr><td><code>{escape(f.site)}</code></td><td class=n>{f.row}</td>"
        f"<td class=n>{f.position}</td><td>{_numbers(f.trace_only)}</td>"
        f"<td>{_numbers(f.other_only)}</td>"
        f"<td class=n>{'–' if f.gap is None else number(f.gap)}</td>"
        f"<td class=n>{'–' if f.allowed is None else number(f.allowed)}</td>"
        f"<td>{_badge('diverges' if f.explained is False else 'flipped', reason(f))}</td></tr>"
        for f in ordered[:SHOWN_FLIPS]
    )
    more = f" The first {SHOWN_FLIPS} are listed." if len(ordered) > SHOWN_FLIPS else ""
    wrong = sum(f.explained is False for f in ordered)
    return (
        "<section id=flips><h2>Choices that differ</h2><p class=soft>"
        f"{count(len(ordered), 'time')} a token chose other experts or pools; {wrong:,} of them "
        f"for no reason in the scores.{more}"
        " A gap is by the largest score.</p>\n<div class=wide><table><thead><tr><th>site</th>"
        "<th class=n>row</th><th class=n>token</th><th>trace chose</th><th>other chose</th>"
        "<th class=n>gap</th><th class=n>explained gap</th><th></th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div></section>\n"
    )


def _one_side(table: Comparison) -> str:
    parts = ""
    for label, names in (("trace", table.only_in_trace), ("other", table.only_in_other)):
        if names:
            listed = ", ".join(f"<code>{escape(name)}</code>" for name in names)
            parts += (
                f"<details><summary><b>{len(names):,}</b><span class=soft>only in the {label}"
                f"</span></summary><p>{listed}</p></details>\n"
            )
    return f"<section><h2>Sites of one side only</h2>\n{parts}</section>\n" if parts else ""


def _glossary() -> str:
    terms = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in _GLOSSARY.items())
    return f"<section><h2>How to read this</h2><dl>{terms}</dl></section>\n"


def _badge(verdict: str, text: str = "") -> str:
    return f'<span class="badge {verdict.split()[0]}">{escape(text or verdict)}</span>'


def _numbers(chosen: tuple[int, ...]) -> str:
    return " ".join(map(str, chosen[:8])) + (" …" if len(chosen) > 8 else "") or "–"
