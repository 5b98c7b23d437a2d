"""The page of a job: content, missing and malformed files, escaping."""

import base64
import hashlib
import re
from dataclasses import replace
from pathlib import Path

import pytest

import made
from made import blocks, hostile_flow, write_record
from page_reader import HOSTILE, TEMPLATES, Reader
from prepare.app.job.record import Job, Record, Result
from prepare.app.report.html import LIMIT as ROWS_SHOWN
from prepare.app.report.pages import run_page
from prepare.audit import Audit, AuditRow


@pytest.fixture
def ran(tmp_path) -> Path:
    return write_record(tmp_path / "run")


def test_the_page_shows_the_record_of_a_job(ran):
    found = Reader(made.page_of(ran))
    summary = Audit.load(ran / "audit.json").summary
    for phrase in (
        "prepare model=small_3d memfmt=channels_last_3d '+model.x=[1, 2]'",
        f"{summary['convolutions']['converted']} of 3 convolutions converted",
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


def test_the_page_needs_no_network_and_runs_no_script_but_its_own(ran):
    write_record(ran, hostile_flow())
    text = made.page_of(ran)
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
    run = made.read_run(ran)
    plan = (run.plan or {}) | {"problems": said, "warnings": said}
    safe = Reader(made.page_of(write_record(tmp_path / "safe")))
    text = run_page(replace(run, plan=plan, recipe="\n".join(HOSTILE)))
    text.encode("utf-8")  # strictly
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u2028\u202e]", text)
    # Whole only in the texts that are quoted: recipe, error and traceback.
    assert text.count("n" * 5000) == 3
    assert "n" * 3000 not in text.replace("n" * 5000, "")
    found = Reader(text)
    assert found.tags <= safe.tags | {"h3", "p", "li", "details", "strong"}
    assert "{{ 7 * 7 }}" in found.text
    assert "alert(1)" in found.text


def test_a_long_table_is_cut_and_names_the_file_with_all_rows(ran):
    flow = blocks(ROWS_SHOWN + 1)
    flow.save(ran / "flow.json")
    text = Reader(made.page_of(ran)).text
    total = f"{len(flow.events):,}"
    assert f"The first {ROWS_SHOWN:,} of {total} rows; flow.json has them all." in text
    assert f"The first {ROWS_SHOWN:,} of {len(flow.copies):,} rows; flow.json has them all." in text


def test_a_failed_job_shows_its_error(tmp_path):
    record = Record(tmp_path)
    record.write_result(
        Result("failed", "oom", "RuntimeError: no memory", "Traceback: line 1", 2.0)
    )
    text = Reader(made.page_of(tmp_path)).text
    for phrase in ("Out of memory", "RuntimeError: no memory", "Traceback: line 1"):
        assert phrase in text
