"""The pages of docs/ as a site: it builds strictly and without a network. In a real browser every situation of the start page
leads somewhere, no other host is asked, and nothing is wider than a phone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from headless import browser
from pages import HISTORY
from web_driver import Page, driven

ROOT = Path(__file__).parents[3]
PHONE, DESK, PATIENCE_SECONDS = 390, 1280, 10.0
GUIDES = "return [...document.querySelectorAll('article td a[href]')].map(link => link.href)"
ELSEWHERE = (
    "return performance.getEntriesByType('resource').map(one => one.name).filter(name => !name.startsWith(location.origin))"
)
OVERFLOWS = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        pass


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as a strict build does, with no program and no network, and return its folder.

    Strict: a link that leads nowhere, a page that is in no menu or a name that is not there is an error."""
    pytest.importorskip("mkdocs", reason="needs pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={"PATH": "", "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_builds_without_a_network(built: Path) -> None:
    asked = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^\"' >]+")
    assert [found for page in built.rglob("*.html") for found in asked.findall(page.read_text(encoding="utf-8"))] == []
    reference = (built / "api.html").read_text(encoding="utf-8")
    assert "sequence_length" in reference and "load_in_4bit" in reference and ":::" not in reference
    assert 'dir="rtl"' in (built / "index.ar.html").read_text(encoding="utf-8")
    # The log is no page of the site. A link to it, and to a file beside docs/, is words and the file's place.
    assert [name for name in HISTORY if (built / name).with_suffix(".html").exists()] == []
    one_gpu = (built / "training_one_gpu.html").read_text(encoding="utf-8")
    # As console, commands without a prompt would be grey, as output is.
    assert 'class="language-sh highlight"' in one_gpu and "language-console" not in one_gpu
    assert "<code>docs/log.md</code>" in one_gpu and "<code>benchmarks/results/nine_settings.jsonl</code>" in one_gpu


@pytest.fixture(scope="module")
def driven_browser() -> None:
    """Skip where no browser can be driven."""
    browser()
    if shutil.which("chromedriver") is None:
        pytest.skip("no chromedriver on this machine, which drives the browser")


@pytest.fixture(scope="module")
def site(driven_browser: None, built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Page]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(built)))
    Thread(target=server.serve_forever, daemon=True).start()
    with driven(tmp_path_factory.mktemp("browser")) as page:
        yield f"http://127.0.0.1:{server.server_port}", page
    server.shutdown()


def heading(page: Page) -> str:
    """Once it is there: a page that differs from the last one in its anchor alone is told of before it is drawn."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not (found := page.text("h1")) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def problems(page: Page) -> list[str]:
    return [line for line in page.complaints() if "favicon" not in line]


def test_every_situation_leads_to_a_page_that_is_there(site: tuple[str, Page]) -> None:
    address, page = site
    page.resize(DESK, 900)
    page.open(f"{address}/index.html")
    links = [link for link in page.run(GUIDES) if link.startswith(address)]
    assert len({*links}) >= 20
    for link in dict.fromkeys(links):
        page.open(link)
        anchor = link.partition("#")[2]
        assert heading(page), link
        assert not anchor or page.run("return document.getElementById(decodeURIComponent(arguments[0])) !== null", anchor), link
        assert page.run(ELSEWHERE) == [], link
    assert problems(page) == []


def test_a_click_on_the_start_page_opens_the_guide(site: tuple[str, Page]) -> None:
    address, page = site
    page.resize(DESK, 900)
    page.open(f"{address}/index.html")
    page.click("article td a[href^='training_one_gpu']")
    assert "one gpu" in heading(page).lower() and page.run("return location.pathname") == "/training_one_gpu.html"


@pytest.mark.parametrize("name", ["index", "index.ar", "index.zh", "distributed", "techniques", "tutorials/search"])
def test_a_page_fits_a_phone(site: tuple[str, Page], name: str) -> None:
    address, page = site
    page.resize(PHONE, 844)
    page.open(f"{address}/{name}.html")
    assert page.run("return innerWidth") == PHONE and page.run(OVERFLOWS) <= 0 and problems(page) == []


def test_the_search_finds_a_technique(site: tuple[str, Page]) -> None:
    address, page = site
    page.resize(DESK, 900)
    page.open(f"{address}/index.html")
    words = (
        "const done = arguments[arguments.length - 1]; "
        "return fetch('search/search_index.json').then(one => one.json()).then(index => index.docs.length)"
    )
    assert page.run(words) >= 100


def test_the_search_works_from_a_disk(site: tuple[str, Page], built: Path) -> None:
    _, page = site
    page.resize(DESK, 900)
    page.open((built / "index.html").as_uri())
    counts = {}
    for words in ("checkpointing", "qqqzzz"):
        page.run("document.querySelector('.md-search__input').value = ''")
        page.type(".md-search__input", words)
        end = time.monotonic() + PATIENCE_SECONDS
        while not (found := re.search(r"(\d+|No) matching", page.text(".md-search-result__meta"))) and time.monotonic() < end:
            time.sleep(0.05)
        counts[words] = found and found[1]
        page.open((built / "index.html").as_uri())
    assert counts["checkpointing"] not in (None, "No") and counts["qqqzzz"] == "No"
    assert problems(page) == []
