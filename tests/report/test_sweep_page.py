"""The page of a sweep: content, links, escaping, and layout in a browser."""

import re
from urllib.parse import unquote

import pytest

import made
from page_reader import HOSTILE, Reader
from prepare.app.job.record import Result
from prepare.app.report.pages import NAME, sweep_page, write_sweep_page
from prepare.app.sweep.summary import read_summary


def write_page(row):
    (row / NAME).write_text(made.page_of(row))


@pytest.fixture
def swept(swept):
    write_page(swept / "4-row")
    return swept


def page_of(folder):
    return sweep_page(read_summary(folder), folder)


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


def test_failures_are_grouped_by_reason(tmp_path):
    made.plan(tmp_path, [[f"a={n}"] for n in range(5)])
    failed = Result("failed", "oom", "out of memory: 3 GiB", "Traceback")
    for number in range(3):
        made.add_row(tmp_path, number, [f"a={number}"], result=failed)
    made.add_row(tmp_path, 3, ["a=3"])
    text = Reader(page_of(tmp_path)).text
    assert "failed out of memory: 3 GiB 3 rows #0, #1, #2 a=0" in text
    assert "interrupted it never started 1 row #4 a=4" in text


def test_the_best_card_says_for_which_field_it_is_the_best(tmp_path):
    rows = [[f"model={model}", f"a={a}"] for model in ("one", "two") for a in (1, 2)]
    made.plan(tmp_path, rows)
    slow = {"model=two": 1.4}
    for number, row in enumerate(rows):
        ratio = slow.get(row[0], 0.9 - number / 10)
        verdict = "slower" if ratio > 1 else "faster"
        made.add_row(tmp_path, number, row, benched=made.bench(ratio, verdict=verdict), verified=made.verification(), steps={})  # fmt: skip
    text = Reader(page_of(tmp_path)).text
    assert "Which is best? a=2 for model=one" in text
    assert "No row of model=two is faster" in text


def test_every_row_is_in_the_table(swept):
    text = page_of(swept)
    table = text[text.index('<section id="rows"') :]
    rows = re.findall(r'<tr><th scope="row">.*?</tr>', table)
    assert [re.sub("<[^>]*>", "|", row).strip("|").split("|")[0] for row in rows] == ["4*", "1", "0", "3", "2", "5"]  # fmt: skip
    assert [re.search(r'class="word (\w+)"', row)[1] for row in rows] == ["ok"] * 4 + ["failed", "interrupted"]  # fmt: skip


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
