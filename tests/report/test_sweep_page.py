"""The page of a sweep: content, links, escaping, and layout in a browser."""

import itertools
import re
import shutil
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest

import made
from browser import acted, browser, opened
from page_reader import HOSTILE, Reader
from prepare.app.job.record import Record, Result
from prepare.app.report.html import LIMIT
from prepare.app.report.pages import NAME, sweep_page, write_sweep_page
from prepare.app.report.sweep_table import conclusions, right_text
from prepare.app.sweep.ranking import rank
from prepare.app.sweep.summary import read_summary
from prepare.core.utils.folders import hold_folder


def write_page(row):
    (row / NAME).write_text(made.page_of(row))


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    folder = made.formats_by_precisions(tmp_path_factory.mktemp("made") / "swept")
    write_page(folder / "4-row")
    return folder


@pytest.fixture
def swept(made_once, tmp_path):
    return Path(shutil.copytree(made_once, tmp_path / "swept"))


def page_of(folder):
    return sweep_page(read_summary(folder), folder)


def factor_of(text):
    figure = float(re.match(r"[\d.]+", text)[0])
    return 1 / figure if text.endswith("slower") else figure


def test_the_page_recommends_the_best_row(swept):
    found = Reader(page_of(swept))
    for phrase in (
        "unet3d: 6 runs",
        "Did all rows end well? 4 of 6 ok 1 failed, 1 interrupted",
        "Best: #4 memfmt=channels_last_3d precision=bfloat16, 2.4x faster, 41.0 instead of 100 ms (95 % interval: 2.37x to 2.51x).",
        "prepare model=unet3d memfmt=channels_last_3d precision=bfloat16",
        "Which is best? memfmt=channels_last_3d precision=bfloat16 2.4x faster",
        "Right 4 of 4 are right",
    ):
        assert phrase in found.text, phrase


def test_a_sweep_without_times_counts_what_is_right_and_kept(tmp_path):
    made.plan(tmp_path, [["a=1"], ["a=2"]])
    unknown = made.verification(status="cannot tell")
    made.add_row(tmp_path, 0, ["a=1"], flowed=made.flow(0), verified=unknown)
    made.add_row(tmp_path, 1, ["a=2"], flowed=made.flow(13), verified=made.verification())
    found = Reader(page_of(tmp_path))
    for phrase in (
        "Kept in 1 of 2 rows",
        "1 of 2 are right 1 cannot tell",
        "unclear if right: outputs: 1e-06 of the scale",
    ):
        assert phrase in found.text, phrase


def test_failures_are_grouped_by_reason(tmp_path):
    made.plan(tmp_path, [[f"a={n}"] for n in range(5)])
    failed = Result("failed", "oom", "out of memory: 3 GiB", "Traceback")
    for number in range(3):
        made.add_row(tmp_path, number, [f"a={number}"], result=failed)
    made.add_row(tmp_path, 3, ["a=3"])
    text = Reader(page_of(tmp_path)).text
    assert "failed out of memory: 3 GiB 3 rows #0, #1, #2 a=0" in text
    assert "interrupted it never started 1 row #4 a=4" in text


def test_failures_come_before_the_table(swept):
    names = [part["id"] for part in Reader(page_of(swept)).all("section")]
    assert names[:3] == ["recommendation", "failures", "rows"]


@pytest.mark.parametrize(
    ("breaks", "answer"), [(0, "Kept in 2 of 2 rows"), (3, "Kept in 0 of 2 rows")]
)
def test_the_page_counts_the_rows_that_keep_the_layout(tmp_path, breaks, answer):
    made.plan(tmp_path, [["a=1"], ["a=2"]])
    for number, ratio in enumerate((0.5, 0.9)):
        made.add_row(
            tmp_path,
            number,
            [f"a={number + 1}"],
            flowed=made.flow(breaks),
            benched=made.bench(ratio),
        )
    assert f"Layout {answer}" in Reader(page_of(tmp_path)).text


def test_a_sweep_without_failures_has_no_section_of_failures(tmp_path):
    made.plan(tmp_path, [["a=1"], ["a=2"]])
    made.add_row(tmp_path, 0, ["a=1"])
    made.add_row(tmp_path, 1, ["a=2"])
    text = Reader(page_of(tmp_path)).text
    assert "Failures" not in text
    assert "No row was timed, so there is no best row." in text
    assert "Which is best? No row was timed" in text


def test_a_sweep_without_success_says_so(tmp_path):
    made.plan(tmp_path, [["a=1"], ["a=2"]])
    assert "No row succeeded." in Reader(page_of(tmp_path)).text


def test_a_running_row_is_not_a_failure(tmp_path):
    made.plan(tmp_path, [["a=1"], ["a=2"]])
    made.add_row(tmp_path, 0, ["a=1"], result=None)
    with hold_folder(tmp_path):
        text = page_of(tmp_path)
    found = Reader(text)
    assert "1 running, 1 waiting" in found.text
    assert "failures" not in [part["id"] for part in found.all("section")]


def test_each_field_has_its_best(tmp_path):
    rows = [[f"model={model}", f"a={a}"] for model in ("one", "two") for a in (1, 2)]
    made.plan(tmp_path, rows)
    for number, row in enumerate(rows):
        made.add_row(tmp_path, number, row, benched=made.bench(0.9 - number / 10), verified=made.verification(), steps={})  # fmt: skip
    found = Reader(page_of(tmp_path))
    assert (
        "Which is best? a=2 for model=one and a=2 for model=two model=one: 1.25x faster; model=two:"
        in found.text
    )
    assert "model=one a=2" in found.text
    assert "model=two a=2" in found.text
    assert "4 runs" in found.text


def test_the_best_card_says_for_which_field_it_is_the_best(tmp_path):
    rows = [[f"model={model}", f"a={a}"] for model in ("one", "two") for a in (1, 2)]
    made.plan(tmp_path, rows)
    slow = {"model=two": 1.4}
    for number, row in enumerate(rows):
        ratio = slow.get(row[0], 0.9 - number / 10)
        verdict = "slower" if ratio > 1 else "faster"
        made.add_row(tmp_path, number, row, benched=made.bench(ratio, verdict=verdict), verified=made.verification(), steps={})  # fmt: skip
    text = Reader(page_of(tmp_path)).text
    assert "Which is best? a=2 for model=one model=one: 1.25x faster" in text
    assert "model=two: none was shown to be faster" in text


def test_a_contiguous_row_has_no_layout_to_keep(tmp_path):
    made.plan(tmp_path, [["a=1"], ["a=2"], ["a=3"]])
    asked = {"a=1": 0, "a=2": 13}
    for number, row in enumerate(("a=1", "a=2", "a=3")):
        flow = made.flow(asked.get(row, 0))
        if row not in asked:
            flow = replace(flow, wanted={5: "contiguous"})
        made.add_row(tmp_path, number, [row], flowed=flow, verified=made.verification())
    assert "Kept in 1 of 2 rows" in Reader(page_of(tmp_path)).text


def test_every_row_is_in_the_table(swept):
    text = page_of(swept)
    table = text[text.index('<section id="rows"') :]
    rows = re.findall(r'<tr><th scope="row">.*?</tr>', table)
    assert [re.sub("<[^>]*>", "|", row).strip("|").split("|")[0] for row in rows] == ["4*", "1", "0", "3", "2", "5"]  # fmt: skip
    assert [re.search(r'class="word (\w+)"', row)[1] for row in rows] == ["ok"] * 4 + ["failed", "interrupted"]  # fmt: skip


def test_the_star_is_explained_if_there_is_one(swept, tmp_path):
    assert (
        "Rows are ordered by measured time where it can be compared, the best with a star"
        in page_of(swept)
    )
    folder = tmp_path / "untimed"
    made.plan(folder, [["a=1"], ["a=2"]])
    for number in (0, 1):
        made.add_row(folder, number, [f"a={number + 1}"], steps={})
    text = page_of(folder)
    assert "star" not in Reader(text).text
    assert "Rows are ordered by number." in Reader(text).text


def test_rows_beyond_the_limit_are_data_beside_the_table(tmp_path):
    summary = read_summary(made.formats_by_precisions(tmp_path))
    rows = [replace(summary.rows[4], number=n) for n in range(LIMIT + 5)]
    text = sweep_page(replace(summary, rows=rows), tmp_path)
    assert f"The first {LIMIT:,} of {LIMIT + 5:,} rows; <code>summary.csv</code> has them all." in text  # fmt: skip


def test_links_lead_only_to_existing_pages(swept):
    found = Reader(page_of(swept))
    links = {attrs["href"] for attrs in found.all("a") if not attrs["href"].startswith("#")}
    assert links == {"./4-row/report.html"}
    assert all((swept / link).is_file() for link in links)


@pytest.mark.parametrize("name", ["a b#c?d%20e", "javascript:alert(1)", 'x"onclick="alert(1)', "é\u5c42"])  # fmt: skip
def test_a_folder_of_any_name_is_linked(tmp_path, name):
    made.plan(tmp_path, [["a=1"]])
    write_page(made.add_row(tmp_path, 0, ["a=1"], name=name))
    found = Reader(page_of(tmp_path))
    (link,) = {attrs["href"] for attrs in found.all("a") if not attrs["href"].startswith("#")}
    assert link.startswith("./")
    assert unquote(link) == f"./{name}/report.html"
    assert all(not key.startswith("on") for _, attrs in found.elements for key in attrs)


def test_a_copied_sweep_gives_the_same_page(swept, tmp_path):
    there = Path(shutil.copytree(swept, tmp_path / "elsewhere" / "swept"))
    for folder in (swept, there):
        write_sweep_page(read_summary(folder), folder)
    assert (swept / "report.html").read_bytes() == (there / "report.html").read_bytes()


def test_hostile_values_are_escaped_everywhere_on_the_page(swept, tmp_path):
    rows = [["model=" + text, f"{text}={text}", "b=" + text] for text in HOSTILE]
    folder = tmp_path / "hostile"
    made.plan(folder, rows)
    for number, row in enumerate(rows):
        result = Result("failed" if number % 2 else "ok", HOSTILE[0], HOSTILE[number], HOSTILE[0])
        cpu = HOSTILE[number]
        made.add_row(folder, number, row, result=result, benched=made.bench(0.5, cpu=cpu), verified=made.verification(), steps={HOSTILE[0]: {HOSTILE[1]: HOSTILE[2]}})  # fmt: skip
    write_sweep_page(read_summary(folder), folder)
    text = (folder / "report.html").read_bytes().decode("utf-8")  # strictly
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u2028\u202e]", text)
    found, safe = Reader(text), Reader(page_of(swept))
    assert found.tags <= safe.tags | {"h3", "details", "summary"}
    assert len(found.all("script")) == 1  # its own, and its policy forbids every other
    assert "sorts and searches tables" in found.text
    assert "alert(1)" in found.text
    assert "{{ 7 * 7 }}" in found.text
    assert "n" * 3000 not in text.replace("n" * 5000, "")


def test_the_page_is_accessible_to_screen_readers(swept):
    found = Reader(page_of(swept))
    levels = [int(tag[1]) for tag, _ in found.elements if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert all(attrs.get("scope") in ("col", "row") for attrs in found.all("th"))
    ids = [attrs["id"] for _, attrs in found.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert all("aria-label" in attrs for attrs in found.all("div") if attrs.get("role") == "region")


def test_a_page_with_a_table_has_the_script_that_sorts_it(swept, tmp_path):
    found = Reader(page_of(swept))
    assert {"class": "sorted"} in found.all("table")
    assert found.all("script") == [{}]
    made.plan(tmp_path, [["a=1"]])
    alone = Reader(page_of(tmp_path))
    assert not [each for each in alone.all("table") if each.get("class") == "sorted"]
    assert not alone.all("script")
    assert "This page needs no network and no scripts." in alone.text


def test_the_best_row_names_its_field_and_an_unchanged_row_says_so(tmp_path):
    rows = [[f"model={model}", f"a={a}"] for model in "xy" for a in "pq"]
    made.plan(tmp_path, rows)
    for number, row in enumerate(rows):
        made.add_row(tmp_path, number, row, benched=made.bench(0.5) if number % 2 else None)
        if number % 2 == 0:
            Record(tmp_path / f"{number}-row").write_result(Result("ok", "nothing changed"))
    summary = read_summary(tmp_path)
    assert next(conclusions(summary, rank(summary))).startswith(
        "best of model=x: #1 a=q, 2.0x faster"
    )
    assert [right_text(row) for row in summary.rows] == ["unchanged", "", "unchanged", ""]
    assert "#0, #2: nothing changed" in Reader(page_of(tmp_path)).text


class TestInABrowser:
    pytestmark = browser

    @pytest.mark.parametrize("width", [390, 1200])
    def test_the_page_opens_without_errors_and_fits(self, swept, tmp_path, width):
        measured, console = opened(page_of(swept), tmp_path, width=width)
        assert console == []
        assert measured["wide"] == measured["room"] <= width

    def test_a_row_is_found_by_a_search_and_by_its_status(self, tmp_path):
        rows = [["memfmt=channels_last", f"seed={n}"] for n in range(30)]
        made.plan(tmp_path, rows)
        for number in range(0, 30, 2):
            made.add_row(tmp_path, number, rows[number])
        script = """
          const frame = page.querySelector(".grid"), bar = frame.previousElementSibling;
          const [search, select] = [bar.querySelector("input"), bar.querySelector("select")];
          const numbers = () => [...frame.querySelectorAll("tbody th")].map((one) => one.textContent);
          select.value = "ok"; select.dispatchEvent(new Event("change")); await pause();
          seen.ok = numbers();
          search.value = "18"; search.dispatchEvent(new Event("input")); await pause();
          seen.one = numbers();
        """
        seen, console = acted(page_of(tmp_path), tmp_path, script)
        assert console == []
        assert seen == {"ok": [str(n) for n in range(0, 30, 2)], "one": ["18"]}

    @pytest.mark.parametrize("count", [3, 14])
    def test_a_click_on_a_head_sorts_numbers_as_numbers(self, tmp_path, count):
        made.plan(tmp_path, rows := [[f"a={n}"] for n in range(count)])
        for number, row in enumerate(rows[:-1]):
            ratio = (0.4, 2.0, 0.9)[number % 3] + number / 100
            verdict = "slower" if ratio > 1 else "faster"
            made.add_row(tmp_path, number, row, benched=made.bench(ratio, verdict=verdict))
        script = """
          const table = page.querySelector('[aria-label="All rows"] table'), heads = [...table.tHead.rows[0].cells];
          for (const title of ["time", "speed"]) {
            const at = heads.findIndex((one) => one.textContent === title), button = heads[at].querySelector("button");
            for (const order of ["ascending", "descending"]) {
              button.focus(); button.click();
              if (page.activeElement !== button || heads[at].ariaSort !== order) throw Error(title + order);
              seen[title + order] = [...table.tBodies[0].rows].map((row) => row.cells[at].textContent);
            }
          }
          seen.sorted = heads.filter((one) => one.ariaSort).length;
        """
        seen, console = acted(page_of(tmp_path), tmp_path, script)
        assert console == []
        assert seen["sorted"] == 1
        for title in ("time", "speed"):
            up, down = seen[f"{title}ascending"], seen[f"{title}descending"]
            assert len(up) == count
            assert up[-1] == down[-1] == ""
            assert [factor_of(text) for text in up[:-1]] == sorted(map(factor_of, up[:-1]))
            assert [factor_of(text) for text in down[:-1]] == sorted(map(factor_of, down[:-1]))[
                ::-1
            ]
