"""The site of the pages: built without a warning, searched, pictures light and dark."""

import re
import subprocess
import sys

import pytest

from paths import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site; return its folder and what mkdocs printed."""
    pytest.importorskip("mkdocs")
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


def test_the_site_asks_no_other_server_for_anything(site):
    loads = re.compile(r"""(?:src|<link[^>]*href)=["']https?://""")
    pages = site[0].rglob("*.html")
    assert [page for page in pages if loads.search(page.read_text())] == []
