"""The page of a job: content, missing and malformed files, escaping."""

import base64
import hashlib
import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from made import blocks, event, hostile_flow, write_record
from page_reader import HOSTILE, TEMPLATES, Reader
from prepare.app.job.record import Job, Record, Result
from prepare.app.report.pages.page import run_page, write_page
from prepare.app.report.pages.section import LIMIT as ROWS_SHOWN
from prepare.app.report.pages.section import long_table
from prepare.audit import Audit, AuditRow
from prepare.errors import FileError
from prepare.stages.flow.records import Flow


@pytest.fixture
def ran(tmp_path) -> Path:
    return write_record(tmp_path / "run")


def test_the_page_shows_the_record_of_a_job(ran):
    found = Reader(run_page(ran))
    summary = Audit.load(ran / "audit.json").summary
    for phrase in (
        "prepare model=small_3d memfmt=channels_last_3d '+model.x=[1, 2]'",
        f"{summary['convolutions']['converted']} converted",
        "3 breaks, all InstanceNorm3d, 12.0 KiB copied per forward",
        "Add a step: InstanceNorm3d: copies",
        "half: keep: norms",
        "torch 2.13.0",
        "report of a run 2025-01-02 03:04 prepare",
        "Date 2025-01-02T03:04:05+00:00",
        "memory_format: channels_last_3d",
        'Pipeline.load("recipe.yaml"',
        "a note",
    ):
        assert phrase in found.text, phrase


def test_every_tensor_is_in_the_page_with_its_status(ran):
    page_rows = re.findall(r'<th scope="row"><code>([^<]+)</code></th><td>[^<]*</td><td><span class="word (\w+)">', run_page(ran))  # fmt: skip
    wanted = [(row.path, row.status) for row in Audit.load(ran / "audit.json").rows]
    assert sorted(page_rows) == sorted(wanted)
    statuses = [status for _, status in page_rows]
    assert statuses == sorted(statuses, key=["ineffective", "skipped", "converted", "already", "untouched"].index)  # fmt: skip


def test_every_break_copy_and_convolution_is_in_the_page(ran):
    text, flow = run_page(ran), Flow.load(ran / "flow.json")
    assert len(flow.events) == 3
    assert all(event.module in text for event in flow.events)
    assert f"{len(flow.copies)} places" in text
    assert text.count("<td>Mkldnn</td>") == len(flow.convolutions) == 3


def test_the_page_needs_no_network_and_runs_no_script_but_its_own(ran):
    write_record(ran, hostile_flow())
    text = run_page(ran)
    assert not re.search(r"https?://|//www", text)
    found = Reader(text)
    assert not found.tags & {"link", "img", "iframe", "object", "base", "form"}
    script = (TEMPLATES / "page.js").read_text()
    assert [text for tag, text in found.texts if tag == "script"] == [script.strip()]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = found.all("meta")[-1]["content"]
    assert (
        policy
        == f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    )
    assert f"<script>{script}</script>" in text
    assert all(not key.startswith("on") for _, attrs in found.elements for key in attrs)
    assert all(attrs["href"].startswith("#") for attrs in found.all("a"))
    styles = " ".join(text for tag, text in found.texts if tag == "style")
    assert "url(" not in styles
    assert "@import" not in styles


def test_hostile_names_are_escaped_everywhere_on_the_page(ran, tmp_path):
    hostile_flow().save(ran / "flow.json")
    blocks(1).save(ran / "flow_before.json")
    rows_ = [
        AuditRow(name, name, name, "parameter", (1,), (1,), name, name, (name,), (name,),
            {"stride": (1,), "dtype": name, "device": name}, "skipped", (name,), name)
        for name in HOSTILE
    ]  # fmt: skip
    before = Audit.load(ran / "audit.json")
    Audit([*before.rows, *rows_], before.summary | {"unregistered": HOSTILE}).save(ran / "audit.json")  # fmt: skip
    Record(ran).write_result(Result("failed", HOSTILE[0], "\n".join(HOSTILE), "\n".join(HOSTILE)))
    Record(ran).write_job(Job(None, None, HOSTILE, dict(zip(HOSTILE, HOSTILE, strict=True))))
    said = [{"where": "", "wrong": text, "remedy": text} for text in HOSTILE]
    data = json.loads((ran / "plan.json").read_text()) | {"problems": said, "warnings": said}
    (ran / "plan.json").write_text(json.dumps(data))
    (ran / "recipe.yaml").write_bytes("\n".join(HOSTILE).encode("utf-8", "surrogatepass"))
    safe = Reader(run_page(write_record(tmp_path / "safe")))
    path = write_page(ran)
    text = path.read_bytes().decode("utf-8")  # strictly
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u2028\u202e]", text)
    # Whole only in the texts that are quoted: recipe, error and traceback.
    assert text.count("n" * 5000) == 3
    assert "n" * 3000 not in text.replace("n" * 5000, "")
    found = Reader(text)
    assert found.tags <= safe.tags | {"h3", "p", "li", "details", "strong"}
    assert "{{ 7 * 7 }}" in found.text
    assert "alert(1)" in found.text


def test_the_page_is_accessible_to_screen_readers(ran):
    blocks(2).save(ran / "flow_before.json")
    found = Reader(run_page(ran))
    levels = [int(tag[1]) for tag, _ in found.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert all(attrs.get("scope") in ("col", "row") for attrs in found.all("th"))
    ids = [attrs["id"] for _, attrs in found.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    for _, attrs in found.elements:
        wanted = attrs.get("aria-labelledby", "").split()
        wanted += [attrs["href"].removeprefix("#")] if "href" in attrs else []
        assert set(wanted) <= set(ids)
    assert found.all("html") == [{"lang": "en"}]
    assert all("aria-label" in attrs for attrs in found.all("div") if attrs.get("role") == "region")


def test_the_flow_before_the_repairs_is_beside_that_after(ran):
    before, after = blocks(30), replace(blocks(30, broken=0), events=(event("body.7.norm"),))
    before.save(ran / "flow_before.json")
    after.save(ran / "flow.json")
    found = Reader(run_page(ran))
    assert "Before the repairs: 30 breaks" in found.text
    assert "After the repairs: 1 break" in found.text


def test_a_page_is_made_from_any_subset_of_the_files(ran, tmp_path):
    for path in sorted(ran.iterdir()):
        one = tmp_path / path.name
        one.mkdir()
        shutil.copy(path, one)
        Reader(run_page(one)) if path.name != "audit.csv" else None
        less = tmp_path / f"without {path.name}"
        shutil.copytree(ran, less)
        (less / path.name).unlink()
        assert "Unreadable files" not in Reader(run_page(less)).text


@pytest.mark.parametrize("name", ["result.json", "job.json", "plan.json", "audit.json", "environment.json", "flow.json"])  # fmt: skip
@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_an_unreadable_file_is_named_and_the_rest_is_shown(ran, name, content):
    (ran / name).write_bytes(content)
    text = Reader(run_page(ran)).text
    assert "Unreadable files" in text
    assert name in text
    assert 'Pipeline.load("recipe.yaml"' in text


@pytest.mark.parametrize(
    ("name", "key", "value", "title"),
    [
        ("plan.json", "warnings", 3, "plan.json"),
        ("audit.json", "summary", {}, "audit.json"),
        ("environment.json", "packages", None, "Environment"),
        ("flow.json", "wanted", {"5": None}, None),
        ("flow.json", "events", [{}], "flow.json"),
        ("job.json", "overrides", [1], "job.json"),
    ],
)
def test_a_section_with_a_malformed_file_is_left_out_and_named(ran, name, key, value, title):
    data = json.loads((ran / name).read_text()) | {key: value}
    (ran / name).write_text(json.dumps(data))
    text = Reader(run_page(ran)).text
    assert title is None or f"{title}:" in text
    assert "Reproduce" in text or name == "job.json"


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(FileError, match="is not the record of a run; give the folder that a run"):
        write_page(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_copied_folder_gives_the_same_bytes(ran, tmp_path):
    first = write_page(ran).read_bytes()
    copied_there = tmp_path / "elsewhere" / ran.name
    shutil.copytree(ran, copied_there)
    (copied_there / "report.html").unlink()
    assert write_page(copied_there).read_bytes() == first


def test_a_long_table_is_cut_and_names_the_file_with_all_rows(ran):
    flow = blocks(ROWS_SHOWN + 1)
    flow.save(ran / "flow.json")
    text = Reader(run_page(ran)).text
    total = f"{len(flow.events):,}"
    assert f"The first {ROWS_SHOWN:,} of {total} rows; flow.json has them all." in text
    assert f"The first {ROWS_SHOWN:,} of {len(flow.copies):,} rows; flow.json has them all." in text
    whole = long_table((n,) for n in range(ROWS_SHOWN))
    assert (len(whole.rows), whole.total, whole.rest) == (ROWS_SHOWN, ROWS_SHOWN, None)


def test_a_failed_job_shows_its_error(tmp_path):
    record = Record(tmp_path)
    record.write_result(
        Result("failed", "oom", "RuntimeError: no memory", "Traceback: line 1", 2.0)
    )
    text = Reader(run_page(tmp_path)).text
    for phrase in (
        "Failed",
        "Out of memory",
        "RuntimeError: no memory",
        "Traceback",
        "Traceback: line 1",
    ):
        assert phrase in text
