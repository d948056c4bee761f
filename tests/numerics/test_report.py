"""A comparison as text, JSON, page and plots; the page also in a browser, where there is one."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from html import escape, unescape
from html.parser import HTMLParser

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

from glm5_jax.cli import app
from glm5_jax.errors import TraceError
from glm5_jax.numerics.compare import compare
from glm5_jax.numerics.compare_table import USUAL_KL
from glm5_jax.numerics.report import count, number, to_dict
from glm5_jax.numerics.report_svg import shade
from glm5_jax.whole_file import write_whole

LAYERS = 6
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
NASTY = "layers.0.<script>alert(1)</script>&\"'"


def sites(seed=0):
    """What a model of six layers may have traced; no two numbers are equal."""
    rng = np.random.default_rng(seed)
    found = {"embedding": rng.normal(size=(2, 12, 8))}
    for i in range(LAYERS):
        for tail in ("in", "attn.norm", "attn.o", "attn.expand", "ffn.norm", "ffn.moe"):
            found[f"layers.{i}.{tail}"] = rng.normal(size=(2, 12, 8))
        found[f"layers.{i}.ffn.router.scores"] = rng.random((2, 12, 5))
        order = np.argsort(-found[f"layers.{i}.ffn.router.scores"], axis=-1)
        found[f"layers.{i}.ffn.router.experts"] = order[..., :2]
    found["final.head"] = rng.normal(size=(2, 12, 16))
    found[NASTY] = rng.normal(size=(2, 12, 8))
    return {n: x if n.endswith("experts") else x.astype(np.float32) for n, x in found.items()}


@pytest.fixture(scope="module")
def good():
    a = sites()
    return compare(
        a, {n: x if n.endswith("experts") else np.nextafter(x, np.float32(9)) for n, x in a.items()}
    )


@pytest.fixture(scope="module")
def bad():
    """Apart from layer 2's attention on, with choices that no scores explain."""
    a, b = sites(), sites()
    for i in range(2, LAYERS):
        for tail in ("attn.o", "attn.expand", "ffn.moe"):
            b[f"layers.{i}.{tail}"] = b[f"layers.{i}.{tail}"] * 1.7 + 0.1
    b["layers.4.ffn.router.experts"] = (b["layers.4.ffn.router.experts"] + 1) % 5
    b["final.head"] = b["final.head"][..., ::-1]
    del b["layers.5.in"]
    return compare(a, b)


@pytest.fixture(scope="module")
def broken():
    a, b = sites(), sites()
    b["layers.1.attn.o"][1, 3, 2] = np.nan
    return compare(a, b)


class Page(HTMLParser):
    """The text, the tags, and what is open: a page that is well formed closes what it opens."""

    EMPTY = frozenset({"meta", "br"})

    def __init__(self, html):
        super().__init__()
        self.text, self.open, self.tags, self.first = "", [], [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] == "h1":
            self.first.append(data)


@pytest.mark.parametrize("value", [2.14e-6, 0.5, 123.4, 4321.0, 1e9, np.nan, np.inf, 0.0])
def test_numbers_are_short(value):
    assert len(number(value)) <= 7


def test_shades_go_by_powers_of_ten():
    assert [shade(e) for e in (0, 1e-9, 1e-8, 1e-4, 1, 7, np.inf)] == [0, 0, 0, 5, 9, 9, 9]
    assert shade(np.nan) == 0


def test_text_says_it_in_the_first_line(good, bad, broken):
    assert good.to_text().startswith("No divergence: all that differs at 51 sites is rounding")
    assert bad.to_text().startswith("The numbers part at layers.2.attn.o: relative error")
    assert "only in the trace: layers.5.in" in bad.to_text()
    assert broken.to_text().startswith("The numbers part at layers.1.attn.o: a number against NaN")
    for table in (good, bad, broken):
        assert "\x1b" not in table.to_text() and "\x1b[" in table.to_text(color=True)


@pytest.fixture(scope="module")
def deep():
    """The longest names and verdicts, more sites than are shown at once, and a flip."""
    a = {name: x for name, x in sites().items() if name != NASTY}
    a |= {name.replace("layers.", "layers.4"): x for name, x in a.items()}
    b = {name: x.copy() for name, x in a.items()}
    b["layers.45.attn.o"][0, 3, 2] = np.nan
    b["layers.45.ffn.router.experts"][0, 7] += 1
    return compare(a, b)


@pytest.mark.parametrize(("columns", "width"), [(40, 80), (80, 80), (300, 120)])
def test_text_fits_the_terminal_and_cuts_nothing(deep, monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = deep.to_text()
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    for name in (row.name for row in deep.rows if row.layer == 45):
        assert re.search(rf"^ +{re.escape(name)} .*  ", text, re.M)
    assert re.search(r"layers.45.ffn.router.experts +0,7 .* by the scores *$", text, re.M)
    assert ("cosine" in text) == (width == 120)


def test_one_is_no_plural():
    one = {"embedding": np.ones((1, 9, 8))}
    assert "at 1 site." in compare(one, one).to_text()
    assert count(0, "site") == "0 sites" and count(1200, "flip") == "1,200 flips"


def test_logits_that_most_tokens_moved_are_pointed_at_without_an_alarm():
    """Each site is within what bfloat16 explains, and yet it is no rounding of one."""
    a = {
        "final.norm": np.ones((1, 9, 4)),
        "final.head": 60 * np.random.default_rng(0).random((1, 9, 99)),
    }
    a = {name: x.astype(ml_dtypes.bfloat16).astype(np.float32) for name, x in a.items()}

    def against(error):
        noise = np.random.default_rng(1).normal(size=a["final.head"].shape)
        b = a | {"final.head": (a["final.head"] + error * noise).astype(np.float32)}
        return compare({name: x.astype(ml_dtypes.bfloat16) for name, x in a.items()}, b)

    usual, far = against(0.02), against(0.4)
    assert usual.ok and not usual.moved and to_dict(usual)["hint"] is None
    assert "class=hint" not in usual.to_html() and "Yet" not in usual.to_text()
    assert far.ok and far.moved
    assert "more than is usual for bfloat16" in to_dict(far)["hint"]
    for way in ("--model DIR", "explain DIR A B --site final.head", "float32"):
        assert way in Page(far.to_html()).text and way in " ".join(far.to_text().split())
    assert far.usual_kl == USUAL_KL


def test_json_has_all_and_is_strict(good, bad, broken):
    for table in (good, bad, broken):
        found = json.loads(table.to_json(), parse_constant=lambda word: pytest.fail(word))
        assert found == json.loads(json.dumps(to_dict(table)))
        assert found["ok"] == table.ok == (table is good)
        assert [row["name"] for row in found["rows"]] == [row.name for row in table.rows]
        assert len(found["flips"]) == len(table.flips)
    found = to_dict(bad)
    assert found["first_divergence"] == "layers.2.attn.o"
    assert found["only_in_trace"] == ["layers.5.in"]
    assert found["logits"]["kl"][0][0] == pytest.approx(bad.logits.kl[0, 0])
    assert any(flip["explained"] is False for flip in found["flips"])


def test_page_stands_alone_and_says_it_at_the_top(good, bad, broken):
    for table in (good, bad, broken):
        html = table.to_html()
        page = Page(html)
        assert page.text.index(page.first[0]) < page.text.index("Error by layer and site")
        assert page.first[0] == to_dict(table)["sentence"]
        assert not re.search(r"(https?:)?//|@import|url\(|<script|<link|<img|src=", html)
        marked = [attrs for tag, attrs in page.tags if attrs.get("id") == "first"]
        assert len(marked) == (0 if table.ok else 1)
        assert sum(tag == "svg" for tag, _ in page.tags) >= 3
        assert sum(tag == "tr" for tag, _ in page.tags) > len(table.rows)


def test_names_are_escaped(bad):
    html = bad.to_html()
    assert NASTY in Page(html).text
    assert "<script" not in html
    renamed = dataclasses.replace(bad, sides=({"label": "<b>&"}, {"label": '"x"'}))
    assert "<b>&amp;" not in renamed.to_html() and "&lt;b&gt;&amp;" in renamed.to_html()


def test_files_appear_whole_or_not_at_all(bad, tmp_path, monkeypatch):
    page = tmp_path / "report.html"
    assert bad.write_html(page) == page
    assert page.read_text(encoding="utf-8") == bad.to_html()
    with pytest.raises(
        TraceError, match=r"x\.html: cannot be written: there is no directory .*missing$"
    ):
        bad.write_html(tmp_path / "missing" / "x.html")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="No space left"):
        write_whole(page, b"<!doctype html>other", b"<!doctype html>")
    assert page.read_text(encoding="utf-8") == bad.to_html()
    assert list(tmp_path.iterdir()) == [page]
    with pytest.raises(OSError) as error:
        write_whole(tmp_path / "missing" / "x.html", b"", b"")
    assert error.value.filename == str(tmp_path / "missing" / "x.html")


def test_plots_are_pictures(bad, tmp_path):
    pytest.importorskip("matplotlib", reason="the notebook extra is not installed")
    written = bad.write_plots(tmp_path / "new")
    assert [path.name for path in written] == ["errors.png", "logits.png"]
    for path in written:
        png = path.read_bytes()
        assert png.startswith(b"\x89PNG") and len(png) > 10_000
    assert not any(path.name.startswith(".") for path in (tmp_path / "new").iterdir())


def test_plots_without_matplotlib_say_what_is_missing(bad, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(TraceError, match=r"plots need matplotlib.*\[notebook\]"):
        bad.write_plots(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_command(tmp_path, good, bad, monkeypatch):
    def run(table, *options):
        monkeypatch.setattr("glm5_jax.numerics.compare.compare", lambda *_, **__: table)
        return CliRunner().invoke(app, ["compare", "a", "b", *options])

    page = tmp_path / "report.html"
    result = run(good, "--html", str(page))
    assert result.exit_code == 0 and result.stdout.startswith("No divergence")
    assert page.read_text(encoding="utf-8") == good.to_html()
    result = run(bad, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["first_divergence"] == "layers.2.attn.o"


# What the page is on a screen of that width. The script is the test's: the page has none.
MEASURE = """<script>
const seen = s => [...document.querySelectorAll(s)].filter(e => {
  const b = e.getBoundingClientRect(); return b.width > 0 && b.height > 0; });
const paint = e => getComputedStyle(e).fill;
parent.document.body.dataset.found = JSON.stringify({
  width: innerWidth, page: document.documentElement.scrollWidth,
  title: seen('h1').map(e => e.textContent)[0],
  titleTop: document.querySelector('h1').getBoundingClientRect().top,
  rows: seen('#sites tr').length, marked: seen('tr#first').length,
  cells: seen('#heat rect').length, colours: new Set(seen('#heat rect').map(paint)).size,
  bars: seen('#logits rect').length, framed: seen('#heat .first').length,
  smallest: Math.min(...seen('p, td, h1, h2, summary').map(
    e => parseFloat(getComputedStyle(e).fontSize)))});
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: apt-get install chromium")
@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "wide"])
def test_page_in_a_browser(bad, tmp_path, width):
    page = tmp_path / "report.html"
    inner = escape(bad.to_html().replace("</body>", MEASURE))
    frame = f'<iframe srcdoc="{inner}" style="width: {width}px; height: 900px; border: 0"></iframe>'
    page.write_text(f"<!doctype html><body>{frame}</body>", encoding="utf-8")
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1000"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    match = re.search(r'<body data-found="([^"]*)"', dom)
    assert match, dom[:2000]
    found = json.loads(unescape(match[1]))
    assert found["width"] == found["page"] == width  # nothing sticks out to the side
    assert found["title"] == to_dict(bad)["sentence"]
    assert found["titleTop"] < 200
    assert found["marked"] == found["framed"] == 1
    assert found["rows"] > 8  # the layer that parts first is open
    in_layers = sum(row.layer is not None for row in bad.rows)
    assert found["cells"] >= in_layers and found["colours"] >= 3
    assert found["bars"] == 24
    assert found["smallest"] >= 12
