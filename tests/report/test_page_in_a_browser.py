"""The page of a job in a browser: no overflow at any width, links, copied commands."""

from pathlib import Path

import pytest

import made
from browser import acted, browser, opened
from made import blocks, hostile_flow, write_record
from page_reader import HOSTILE
from prepare.app.report.html import LIMIT as ROWS_SHOWN
from prepare.app.report.html import short
from prepare.audit import Audit


@pytest.fixture
def ran(tmp_path) -> Path:
    return write_record(tmp_path / "run")


def large(folder: Path) -> Path:
    """Write a record with 20,000 modules, all of which lose the layout."""
    write_record(folder, blocks(5000))
    found = Audit.load(folder / "audit.json")
    many = [row._replace(module=f"body.{n}.{row.module}") for n in range(5000) for row in found.rows[:4]]  # fmt: skip
    Audit(many, found.summary).save(folder / "audit.json")
    return folder


class TestInABrowser:
    pytestmark = browser

    def test_the_console_of_the_browser_is_seen(self, tmp_path):
        _, console = opened("<script>console.error('heard')</script>", tmp_path)
        assert any("heard" in line for line in console)

    @pytest.mark.parametrize("details", [False, True])
    def test_a_page_opens_without_errors_and_fits_a_phone(self, ran, tmp_path, details):
        hostile_flow().save(ran / "flow_before.json")
        measured, console = opened(made.page_of(ran), tmp_path, width=390, details=details)
        assert console == []
        assert measured["wide"] == measured["room"] <= 390

    def test_two_wide_pictures_side_by_side_fit(self, ran, tmp_path):
        blocks(30).save(ran / "flow_before.json")
        measured, _ = opened(made.page_of(ran), tmp_path, width=1500)
        assert measured["wide"] == measured["room"]

    def test_a_page_of_20000_modules_has_few_elements(self, tmp_path):
        text = made.page_of(large(tmp_path / "run"))
        measured, console = opened(text, tmp_path, details=True)
        assert console == []
        # The first 2,000 rows of each table.
        assert measured["elements"] < 120_000
        assert len(text) < 5_000_000

    def test_the_page_is_dark_where_that_is_preferred(self, ran, tmp_path):
        text = made.page_of(ran)
        light, _ = opened(text, tmp_path)
        dark, _ = opened(text, tmp_path, extra=["--blink-settings=preferredColorScheme=0"])
        assert (light["dark"], dark["dark"]) == ("rgb(245, 247, 250)", "rgb(13, 16, 21)")

    def test_the_search_finds_each_of_2000_tensors(self, tmp_path):
        text = made.page_of(large(tmp_path / "run"))
        script = """
          const details = [...page.querySelectorAll("details")].find((one) => one.textContent.includes("All tensors"));
          details.open = true; await pause();
          const rows = () => [...details.querySelectorAll("tbody tr")].filter((row) => !row.hidden), status = () => details.querySelector("[role=status]").textContent;
          const type = async (text) => { search.value = text; search.dispatchEvent(new Event("input")); await pause(); };
          const search = details.querySelector("input"), select = details.querySelector("select");
          seen.first = [rows().length, status()];
          await type("body.321. WEIGHT"); seen.found = [rows().map((row) => row.cells[0].textContent), status()];
          seen.cells = [...rows()[0].cells].map((cell) => cell.textContent);
          seen.status = rows()[0].cells[2].firstElementChild.className;
          await type("no such module"); seen.none = [rows().length, status()];
          await type("body.321.");
          seen.options = [...select.options].map((one) => one.textContent);
          select.value = "skipped"; select.dispatchEvent(new Event("change")); await pause();
          seen.skipped = [rows().map((row) => row.cells[2].textContent), status()];
        """
        seen, console = acted(text, tmp_path, script)
        assert console == []
        every = Audit.load(tmp_path / "run" / "audit.json").rows
        worst = ["ineffective", "skipped", "converted", "already", "untouched"]
        rows_ = sorted(every, key=lambda row: worst.index(row.status))[:ROWS_SHOWN]
        of_one = [row for row in rows_ if row.module.startswith("body.321.")]
        weights = [row for row in of_one if "weight" in row.path]
        total = f"{len(rows_):,}"
        assert seen["first"] == [ROWS_SHOWN, f"{total} of {total} rows"]
        assert sorted(seen["found"][0]) == sorted(row.path for row in weights)
        assert seen["found"][1:] == [f"{len(weights)} of {total} rows"]
        first = next(row for row in weights if row.path == seen["cells"][0])
        assert seen["cells"][1:5] == [first.type, first.status, ", ".join(map(str, first.shape)), ", ".join(map(str, first.stride))]  # fmt: skip
        assert seen["status"] == f"word {first.status}"
        assert seen["none"] == [0, f"0 of {total} rows"]
        assert seen["options"][0] == "all"
        skipped = [row for row in of_one if row.status == "skipped"]
        assert seen["skipped"] == [["skipped"] * len(skipped), f"{len(skipped)} of {total} rows"]

    def test_names_with_markup_stay_text_in_searched_tables(self, ran, tmp_path):
        names = [*HOSTILE, "<!--<script>", "</script><script>parent.hacked = 1</script>"]
        found = Audit.load(ran / "audit.json")
        one = found.rows[0]
        many = [one._replace(module=f"m{n}") for n in range(100)]
        odd = [one._replace(module=name, type=name, status="untouched", reason=name) for name in names]  # fmt: skip
        Audit([*many, *odd], found.summary).save(ran / "audit.json")
        script = """
          const before = page.querySelectorAll("script").length;
          for (const one of page.querySelectorAll("details")) one.open = true;
          await pause();
          const frame = [...page.querySelectorAll(".grid")].find((one) => one.ariaLabel.includes("All tensors"));
          const search = frame.previousElementSibling.querySelector("input");
          const select = frame.previousElementSibling.querySelector("select");
          select.value = "untouched"; select.dispatchEvent(new Event("change")); await pause();
          seen.names = [...frame.querySelectorAll("tbody tr:not([hidden])")].map((row) => row.cells[1].textContent);
          seen.elements = [...new Set([...frame.querySelectorAll("tbody *")].map((one) => one.localName))].sort();
          search.value = "</script><script>parent"; search.dispatchEvent(new Event("input")); await pause();
          seen.found = frame.querySelectorAll("tbody tr:not([hidden])").length;
          seen.scripts = [before, page.querySelectorAll("script").length];
          seen.hacked = [window.hacked ?? null, frame.ownerDocument.defaultView.hacked ?? null];
        """
        seen, console = acted(made.page_of(ran), tmp_path, script)
        assert console == []
        assert seen["names"] == [short(name, 400) for name in names]
        assert seen["elements"] == ["code", "span", "td", "th", "tr"]
        assert seen["found"] == 1
        assert seen["scripts"][0] == seen["scripts"][1]
        assert seen["hacked"] == [None, None]

    def test_a_foreign_script_does_not_run(self, ran, tmp_path):
        text = made.page_of(ran).replace("</body>", "<script>parent.hacked = 1</script></body>")
        seen, console = acted(text, tmp_path, "seen.hacked = window.hacked ?? null;")
        assert seen == {"hacked": None}
        assert "Content Security Policy" in " ".join(console)

    def test_without_scripts_the_first_rows_and_a_note_are_shown(self, tmp_path):  # fmt: skip
        text = made.page_of(large(tmp_path / "run"))
        script = """
          for (const one of page.querySelectorAll("details")) one.open = true;
          await pause();
          seen.rows = page.querySelector(".grid").querySelectorAll("tbody tr").length;
          seen.note = page.querySelector(".cut").innerText;
          seen.controls = page.querySelectorAll("input, select, button").length;
        """
        seen, _ = acted(text, tmp_path, script, without_scripts=True)
        assert seen["rows"] == ROWS_SHOWN
        assert seen["note"].startswith(f"The first {ROWS_SHOWN:,} of ")
        assert seen["controls"] == 0
