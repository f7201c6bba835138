"""The page of an explanation: its figures are the JSON's, it needs no network, it can be used."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

import perfopt
from perfopt import plots
from tests.perfopt import explained_model

pytest.importorskip("matplotlib")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def explained() -> perfopt.Explanation:
    model, args = explained_model.make()
    return perfopt.explain(model, *args, train=True, device="h100")


@pytest.fixture(scope="module")
def page(explained: perfopt.Explanation) -> str:
    return explained.to_html(kernels=True)


class Read(HTMLParser):
    """The table's cells by row, and the text of the JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.json = ""
        self.cards: dict[str, str] = {}
        self._card: str | None = None
        self.headings = 0
        self.focusable = 0
        self._table = self._script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "dt":
            self._card = ""
        if tag == "dd":
            self.cards[self._card or ""] = given.get("data-value") or ""
            self._card = None
        if tag == "table":
            self._table = given.get("id") == "table"
        if self._table and tag == "tr":
            self.rows.append([])
        if self._table and tag == "td":
            self.rows[-1].append(given.get("data-value") or "")
        if self._table and tag == "button":
            self.headings += 1
        if tag == "script":
            self._script = given.get("id") == "perfopt"
        self.focusable += given.get("tabindex") == "0"

    def handle_data(self, data: str) -> None:
        if self._script:
            self.json += data
        if self._card is not None:
            self._card += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._script = False


def test_the_figures_are_the_jsons(explained: perfopt.Explanation, page: str) -> None:
    read = Read()
    read.feed(page)
    table = json.loads(read.json.replace("<\\/", "</"))
    assert table == json.loads(explained.to_json())
    pieces = [piece for graph in table["graphs"] for piece in graph["pieces"]]
    rows = [row for row in read.rows if row]
    assert len(rows) == len(pieces)
    shown = sorted((float(row[3]), float(row[7]), float(row[8]), row[5]) for row in rows)
    costs = [piece["cost"] for piece in pieces]
    assert shown == sorted((c["seconds"], c["bytes"], c["flops"], c["bound"]) for c in costs)
    assert sum(seconds for seconds, *_ in shown) == pytest.approx(table["total"]["cost"]["seconds"])
    cards = {name: float(value) for name, value in read.cards.items()}
    total, fit = table["total"], table["fit"]
    assert cards == {
        "predicted time": total["cost"]["seconds"], "rate": total["rate"],
        "memory at most": fit["peak"], "held most by": max(fit["holds"].values()),
        "work": total["cost"]["flops"], "memory traffic": total["cost"]["bytes"],
        "runs as": total["kernels"],
    }  # fmt: skip
    seconds = [float(row[3]) for row in rows]
    assert seconds == sorted(seconds, reverse=True)


def test_it_needs_nothing_else_and_reaches_by_keyboard(page: str) -> None:
    links = re.findall(r"""(?:src|href)=["']([^"']*)""", page)
    assert all(link.startswith("#") for link in links)
    assert "@import" not in page and "url(" not in re.sub(r"url\(#[^)]*\)", "", page)
    read = Read()
    read.feed(page)
    assert read.headings == 9 and read.focusable > 3


def test_two_runs_give_the_same_bytes(explained: perfopt.Explanation, page: str) -> None:
    again = perfopt.Explanation.from_json(explained.to_json())
    assert again.to_html(kernels=True) == page


def test_colours_are_the_pages(page: str) -> None:
    assert "#01020" not in page and "var(--region)" in page


def test_text_of_the_user_cannot_end_the_page(explained: perfopt.Explanation) -> None:
    text = explained.to_json().replace("explained_model.py", "</script><b>.py")
    page = perfopt.Explanation.from_json(text).to_html()
    assert "</script><b>" not in page


def test_equal_pieces_are_one_point(explained: perfopt.Explanation) -> None:
    groups = plots.grouped(explained.pieces)
    assert sum(group.count for group in groups) == len(explained.pieces)
    assert sum(group.share for group in groups) == pytest.approx(1.0)


@pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
def test_a_browser_sorts_the_table_and_draws_the_page(page: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    script = """<script>
    var head = document.querySelectorAll("#table th button");
    head[7].focus(); head[7].click();
    document.title = Array.prototype.map.call(
        document.querySelectorAll("#table tbody tr"),
        function (row) { return row.cells[7].dataset.value; }).join(" ");
    </script></body>"""
    file.write_text(page.replace("</body>", script), encoding="utf-8")
    assert BROWSER is not None
    common = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"file://{file}"]
    dom = subprocess.run([*common, "--dump-dom"], capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>([^<]*)</title>", dom.stdout)
    assert title is not None
    order = [float(text) for text in title.group(1).split()]
    assert len(order) > 3 and order == sorted(order, reverse=True)
    picture = tmp_path / "page.png"
    subprocess.run(
        [*common, "--window-size=1200,1600", f"--screenshot={picture}"],
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    pixels = plots_pixels(picture)
    assert len(pixels) > 40  # not one empty colour


def plots_pixels(picture: Path) -> set[tuple[int, ...]]:
    """The colours of a picture."""
    from PIL import Image

    with Image.open(picture) as image:
        small = image.convert("RGB").resize((300, 400))
        colours = small.getcolors(300 * 400) or []
        return {colour for _, colour in colours if isinstance(colour, tuple)}
