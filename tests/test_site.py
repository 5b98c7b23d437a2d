"""The site of the pages: built without a warning, searched, pictures light and dark."""

import html
import importlib
import json
import math
import re
import subprocess
import sys

import pytest

from paths import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site; return its folder and what mkdocs printed."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, done.stderr


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_shows_every_page(site):
    folder, printed = site
    assert "not included in the" not in printed
    home = (folder / "index.html").read_text()
    assert "no-run" not in home
    assert all((folder / page.stem).is_dir() for page in (ROOT / "docs").glob("[!iS]*.md"))
    # Markdown reads a doctest outside of a section `Examples:` as nested quotes.
    nested = re.compile(r"<blockquote>\s*<blockquote>")
    quoted = [
        page.parent.name for page in folder.rglob("*.html") if nested.search(page.read_text())
    ]
    assert quoted == []


def test_the_configuration_page_shows_every_key_and_step(site):
    text = html.unescape((site[0] / "configuration" / "index.html").read_text())
    assert "known_issues=error|warn|ignore" in text
    assert "rewrite_conv" in text


def test_llms_txt_lists_the_guides_with_their_first_sentence(site):
    text = (site[0] / "llms.txt").read_text()
    rows = dict(re.findall(r"^- \[.+\]\((.+)\): (.+)$", text, re.MULTILINE))
    first = "From a clone to your own network, a recipe and a sweep, in five steps."
    assert rows["quickstart/"] == first
    assert all((site[0] / address / "index.html").exists() for address in rows)
    assert not any(address.startswith("decisions") for address in rows)
    assert {"configuration/", "."} <= set(rows)
    assert len(text) < 8_000


def ranked(index: dict, query: str) -> list[str]:
    """Return the pages that a search finds, the best first: nearly as the site's own search ranks them."""
    separator = re.compile(index["config"]["separator"])
    plain = [{**entry, "words": []} for entry in index["docs"]]
    for entry in plain:
        for field, weight in (("title", 1000), ("text", 1)):
            words = separator.split(re.sub("<[^>]+>", "", html.unescape(entry[field])).lower())
            entry["words"].append((weight / (len(words) + 5), words))
    scores: dict[str, float] = {}
    for word in query.lower().split():
        hits = {
            entry["location"]: sum(
                weight for weight, words in entry["words"] if any(w.startswith(word) for w in words)
            )
            for entry in plain
        }
        rare = math.log(1 + len(plain) / (1 + sum(map(bool, hits.values()))))
        for entry in plain:
            place = entry["location"]
            scores[place] = scores.get(place, 0) + hits[place] * rare * entry.get("boost", 1)
    best = sorted((place for place in scores if scores[place]), key=lambda place: -scores[place])
    return list(dict.fromkeys(place.partition("#")[0] for place in best))


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("vae", "video/"),
        ("wan", "video/"),
        ("dict input", "configuration/"),
        ("my own network", "quickstart/"),
        ("odd_stride", "output/"),
        ("sensitivity", "verification/"),
    ],
)
def test_a_search_finds_the_page_among_the_first_four(site, query, page):
    index = json.loads((site[0] / "search" / "search_index.json").read_text())
    assert page in ranked(index, query)[:4]


def test_the_site_asks_no_other_server_for_anything(site):
    loads = re.compile(r"""(?:src|<link[^>]*href)=["']https?://""")
    pages = site[0].rglob("*.html")
    assert [page for page in pages if loads.search(page.read_text())] == []


def test_a_link_to_a_file_beside_the_docs_becomes_its_name(site):
    page = (site[0] / "benchmarks" / "index.html").read_text()
    assert "<code>benchmarks/results/zoo.md</code>" in page
    assert 'href="../../benchmarks/' not in page


def test_the_drawings_are_those_that_their_script_makes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    importlib.import_module("draw_layouts").write_drawings(tmp_path)
    committed = ROOT / "docs" / "pictures"
    drawn = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert drawn == {name: (committed / name).read_text() for name in drawn}
