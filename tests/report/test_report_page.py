"""The page of a job and the picture of a layout flow: content, escaping, and layout in a browser."""

import base64
import hashlib
import itertools
import json
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from browser import acted, browser, opened
from page_reader import HOSTILE, READABLE, READABLE_PICTURE, TEMPLATES, Reader, contrast
from prepare.audit import Audit, audit
from prepare.audit.rows import AuditRow
from prepare.errors import FileError
from prepare.flow.records import Convolution, Copy, Event, Flow, ModuleLayout
from prepare.job.record import Job, Record, Result
from prepare.pipeline import Pipeline
from prepare.report.charts.flow_picture import LIMIT, flow_svg, write_flow_svg
from prepare.report.charts.flow_text import cut, width_of
from prepare.report.charts.module_rows import SMALL, rows
from prepare.report.pages.long_table import LIMIT as ROWS_SHOWN
from prepare.report.pages.long_table import long_table
from prepare.report.pages.page import PageSection, page, run_page, write_page
from prepare.report.pages.run_sections import SECTIONS
from prepare.report.render import short
from small_nets import small_3d

SVG = "{http://www.w3.org/2000/svg}"


def module(name: str, layout: str = "channels_last_3d", kind: str = "Conv3d") -> ModuleLayout:
    depth = name.count(".") + 1 if name else 0
    return ModuleLayout(name=name, type=kind, depth=depth, layout=layout, calls=1)


def event(name: str, kind: str = "break", *, count: int = 1, phase: str = "forward") -> Event:
    operation, cause = "aten.clone", "instance_norm"
    if kind == "regain":
        operation, cause = "aten.convolution", "convolution"
    return Event(kind=kind, phase=phase, module=name, type="InstanceNorm3d", operation=operation, operand="self channels_last_3d",
                 shape=(2, 8, 4, 4, 4), before=(512, 1, 128, 32, 8), after=(512, 64, 16, 4, 1), bytes=4096 * count,
                 source="", cause=cause, count=count)  # fmt: skip


def copied(name: str, size: int = 4096) -> Copy:
    return Copy(module=name, type="InstanceNorm3d", operation="aten.clone", bytes=size, phase="forward", why="instance_norm", count=1)  # fmt: skip


def flow_of(modules, events=(), copies=()) -> Flow:
    convolutions = tuple(
        Convolution(module=one.name, type=one.type, input="contiguous", weight="channels_last_3d",
                    output="channels_last_3d", backend="Mkldnn", calls=1)
        for one in modules if one.type == "Conv3d"
    )  # fmt: skip
    return Flow(mode="predict", status="ok", reason="", wanted={5: "channels_last_3d"}, events=tuple(events),
                copies=tuple(copies), convolutions=convolutions, modules=tuple(modules), notes=("a note",))  # fmt: skip


def blocks(count: int, *, broken: int | None = None) -> Flow:
    """Return a flow of `count` blocks of convolution, norm and ReLU; the first `broken` lose the layout."""
    broken = count if broken is None else broken
    modules, events, copies = [module("", kind="Net"), module("body", kind="Sequential")], [], []
    for number in range(count):
        lost = "contiguous" if number < broken else "channels_last_3d"
        name = f"body.{number}"
        modules += [module(name, lost, "Block"), module(f"{name}.conv")]
        modules += [
            module(f"{name}.norm", lost, "InstanceNorm3d"),
            module(f"{name}.relu", lost, "ReLU"),
        ]
        if number < broken:
            events += [event(f"{name}.norm"), event(f"{name}.conv", "regain")]
            copies.append(copied(f"{name}.norm"))
    return flow_of(modules, events, copies)


def hostile_flow() -> Flow:
    modules = [module("", kind=HOSTILE[0])]
    modules += [replace(module(""), name=name, type=name, depth=1) for name in HOSTILE]
    events = [
        replace(event(name), type=name, operation=name, operand=name, source=name, cause=name)
        for name in HOSTILE
    ]
    copies = [replace(copied(name), type=name, operation=name, why=name) for name in HOSTILE]
    found = flow_of(modules, events, copies)
    odd = [replace(module(""), name=f"odd {name}", depth=1, layout=name) for name in HOSTILE]
    rows_ = tuple(
        replace(flow_of([module("")]).convolutions[0], module=n, type=n, backend=n) for n in HOSTILE
    )
    return replace(found, modules=(*found.modules, *odd), convolutions=rows_, notes=tuple(HOSTILE))


def write_record(folder: Path, flow: Flow | None = None) -> Path:
    """Write the record of a job, with the functions that a job uses."""
    record, model = Record(folder), small_3d()
    pipeline = Pipeline.from_config({"conv3d_memory_format": {}, "half": {"dtype": "bfloat16"}})
    plan = pipeline.plan(model, known_issues="ignore")
    pipeline.apply(model, known_issues="ignore")
    record.clear()
    record.write_plan(replace(plan, warnings=["InstanceNorm3d: copies; add a step"]))
    record.write_prepared(pipeline, audit(model, plan=plan))
    seen = {"given": "(2, 1)", "gave": "(2, 2)", "convolutions": [{"format": "channels_last_3d", "gave": 2, "of": 3, "ambiguous": 1}]}  # fmt: skip
    choices = {"model": "small_3d", "memfmt": "channels_last_3d", "input": None}
    record.write_job(
        Job(
            None,
            None,
            ["model=small_3d", "memfmt=channels_last_3d", "+model.x=[1, 2]"],
            choices,
            seen=seen,
        )
    )
    environment = {"format": "prepare.environment", "version": 1, "date": "2025-01-02T03:04:05+00:00", "python": "3.11.7",
                   "torch": "2.13.0", "packages": {"numpy": None}, "platform": "Linux", "cpu": "a processor", "cores": 2,
                   "threads": 1, "devices": [], "git_commit": "abc"}  # fmt: skip
    record.write_environment(environment)
    record.write_result(Result("ok", seconds=1.25))
    (flow or blocks(3)).save(folder / "flow.json")
    return folder


@pytest.fixture
def ran(tmp_path) -> Path:
    return write_record(tmp_path / "run")


# ------------------------------------------------------------------------------------- the page


def test_the_page_shows_the_record_of_a_job(ran):
    found = Reader(run_page(ran))
    summary = Audit.load(ran / "audit.json").summary
    for phrase in (
        "python run.py model=small_3d memfmt=channels_last_3d '+model.x=[1, 2]'",
        f"{summary['convolutions']['converted']} converted",
        "2 of 3 convolutions returned channels_last_3d (1 of these also satisfy another memory format)",
        "3 breaks, all InstanceNorm3d, 12.0 KiB copied per forward",
        "Add a step: InstanceNorm3d: copies",
        "half: keep: norms",
        "torch 2.13.0",
        "report of a job 2025-01-02 03:04 python run.py",
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
    assert text.count('<span class="word lost">') == flow.summary["breaks"] == 3
    assert text.count('<span class="word regained">') == flow.summary["regains"] == 3
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
    data = json.loads((ran / "plan.json").read_text()) | {"problems": HOSTILE, "warnings": HOSTILE}
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
    assert all(attrs["role"] == "img" for attrs in found.all("svg"))
    assert all("aria-label" in attrs for attrs in found.all("div") if attrs.get("role") == "region")


def test_two_flows_are_side_by_side_with_equal_rows(ran):
    before, after = blocks(30), replace(blocks(30, broken=0), events=(event("body.7.norm"),))
    before.save(ran / "flow_before.json")
    after.save(ran / "flow.json")
    found = Reader(run_page(ran))
    assert len(found.all("svg")) == 4  # a strip and a tree of each
    assert "Layout lost 30 1" in found.text
    ours, theirs = rows(before, limit=LIMIT, beside=after), rows(after, limit=LIMIT, beside=before)
    assert [row.module.name for row in ours] == [row.module.name for row in theirs]


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
        ("plan.json", "warnings", 3, "Warnings"),
        ("audit.json", "summary", {}, "Tensors"),
        ("environment.json", "packages", None, "Environment"),
        ("flow.json", "wanted", {"5": None}, None),
        ("flow.json", "events", [{}], "flow.json"),
        ("job.json", "overrides", [1], "Reproduce"),
    ],
)
def test_a_section_with_a_malformed_file_is_left_out_and_named(ran, name, key, value, title):
    data = json.loads((ran / name).read_text()) | {key: value}
    (ran / name).write_text(json.dumps(data))
    text = Reader(run_page(ran)).text
    assert title is None or f"{title}:" in text
    assert "Reproduce" in text or name == "job.json"


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(FileError, match="is not the record of a job; give the folder that a job"):
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
    whole = long_table([("A", "name")], ((n,) for n in range(ROWS_SHOWN)), "x")
    assert (len(whole.rows), whole.total, whole.rest) == (ROWS_SHOWN, ROWS_SHOWN, None)


def test_a_failed_job_shows_its_error(tmp_path):
    record = Record(tmp_path)
    record.write_result(
        Result("Failed", "oom", "RuntimeError: no memory", "Traceback: line 1", 2.0)
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


def test_other_pages_are_made_by_the_same_template():
    text = page(
        "A sweep", [PageSection("rows", "Rows", html_text("<p>one</p>"))], problems=["none"]
    )
    found = Reader(text)
    assert [attrs["id"] for attrs in found.all("section") if "id" in attrs] == ["rows"]
    assert "<p>one</p>" in text


def html_text(text: str):
    from markupsafe import Markup

    return Markup(text)


def test_sections_and_templates_match():
    assert sorted(section.name for section in SECTIONS) == sorted(
        path.stem for path in (TEMPLATES / "sections").iterdir()
    )


# ------------------------------------------------------------------------------------- the picture


def marked(svg: str, kind: str) -> list[ET.Element]:
    root = ET.fromstring(svg)
    return [g for g in root.iter(f"{SVG}g") if f"fp-in-{kind}" in g.get("class", "").split()]


def texts(element: ET.Element) -> str:
    return " ".join("".join(text.itertext()) for text in element.iter(f"{SVG}text"))


def test_the_picture_shows_where_the_layout_is_lost():
    flow = blocks(3)
    svg = flow_svg(flow)
    lost = marked(svg, "break")
    assert len(lost) == flow.summary["breaks"] == 3
    assert all("InstanceNorm3d, once" in texts(g) and "4.0 KiB" in texts(g) for g in lost)  # fmt: skip
    assert len(marked(svg, "regain")) == flow.summary["regains"] == 3
    phrase = texts(ET.fromstring(svg))
    assert "3 breaks, all InstanceNorm3d" in phrase
    assert "Lost first in body.0.norm: InstanceNorm3d." in phrase
    assert "lost 3 times, regained 3 times; 3 of 3 convolutions returned it" in phrase


def test_a_flow_without_a_break_says_so():
    svg = flow_svg(blocks(3, broken=0))
    assert marked(svg, "break") == []
    assert "channels_last_3d is never lost; 3 of 3 convolutions returned it." in texts(ET.fromstring(svg))  # fmt: skip
    assert "Lost first" not in svg


def test_counts_and_phases_are_shown():
    flow = blocks(1)
    events = (event("body.0.norm", count=12), event("body.0.conv", phase="backward"))
    titles = [t.text for t in ET.fromstring(flow_svg(replace(flow, events=events))).iter(f"{SVG}title")]  # fmt: skip
    assert any("; InstanceNorm3d, 12 times; 4.0 KiB copied" in phrase for phrase in titles)
    assert any(title.endswith("InstanceNorm3d, once in backward") for title in titles)


@pytest.mark.parametrize("layout", ["channels_last", "channels_last_3d", "contiguous", "ambiguous", "other"])  # fmt: skip
def test_each_layout_has_a_letter_besides_its_colour(layout):
    svg = flow_svg(flow_of([module("", layout)]))
    letter = {"channels_last": "L", "channels_last_3d": "L", "contiguous": "C", "ambiguous": "A", "other": "O"}[layout]  # fmt: skip
    letters = [t.text for t in ET.fromstring(svg).iter(f"{SVG}text") if "fp-letter" in t.get("class", "")]  # fmt: skip
    assert letters == [letter, letter]  # in the legend and in the row


def test_the_picture_is_valid_with_hostile_names(tmp_path):
    write_flow_svg(hostile_flow(), tmp_path / "flow.svg")
    text = (tmp_path / "flow.svg").read_bytes().decode("utf-8")
    root = ET.fromstring(text)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {
        *("svg", "title", "desc", "style", "rect", "text", "tspan", "path", "g"),
    }
    assert re.findall("https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]
    assert "n" * 400 not in text
    assert "&lt;script&gt;" in text


def test_a_small_tree_is_shown_as_it_is():
    flow = blocks(9, broken=0)
    assert len(flow.modules) <= SMALL
    assert [row.module for row in rows(flow, limit=LIMIT)] == list(flow.modules)


def test_modules_without_events_are_folded_into_one_row():
    shown = rows(blocks(100, broken=1), limit=LIMIT)
    assert len(shown) < 10
    assert shown[-1].label == "1 to 99"
    assert shown[-1].totals.modules == 99 * 4
    assert "396 modules, all channels_last_3d" in flow_svg(blocks(100, broken=1))


def test_if_all_modules_lose_the_layout_the_first_are_shown():
    shown = rows(blocks(5000), limit=LIMIT)
    seen = [row.module.name for row in shown if row.events and not row.folded]
    assert seen[:4] == ["body.0.conv", "body.0.norm", "body.1.conv", "body.1.norm"]
    assert shown[-1].folded
    assert "to 4999" in shown[-1].label


def deep(levels: int) -> Flow:
    names = ["", *(".".join("d" * level) for level in range(1, levels + 1))]
    return flow_of([module(name) for name in names], [event(names[-1])], [copied(names[-1])])


TREES = {
    "blocks": blocks(50),
    "many blocks": blocks(5000),
    "few of many": blocks(5000, broken=7),
    "deep": deep(700),
    "wide": flow_of([module(""), *(module(str(n)) for n in range(20_000))], [event(str(n)) for n in range(20_000)], [copied("3")]),
    "not in the tree": flow_of([module(""), module("a")], [event("elsewhere.x")], [copied("elsewhere.x")]),
    "alone": flow_of([module("")], [event("")], [copied("")]),
}  # fmt: skip


@pytest.mark.parametrize("limit", [LIMIT, 30])
@pytest.mark.parametrize("name", TREES)
def test_no_tree_has_too_many_rows_and_nothing_is_lost_in_folding(name, limit):
    flow = TREES[name]
    shown = rows(flow, limit=limit)
    assert len(shown) <= max(limit, min(SMALL, len(flow.modules)))
    found = flow.summary
    assert sum(row.totals.events["break"] for row in shown) == found["breaks"]
    assert sum(row.totals.events["regain"] for row in shown) == found["regains"]
    assert sum(row.totals.copied for row in shown) == found["copied_bytes"]
    index = {module.name: number for number, module in enumerate(flow.modules)}
    order = [index[row.module.name] for row in shown]
    assert order == sorted(order)
    ET.fromstring(flow_svg(flow, limit=limit))


def test_an_empty_flow_has_a_picture():
    ET.fromstring(flow_svg(replace(flow_of([]), wanted={}, status="cannot predict", reason="no")))


@pytest.mark.parametrize("text", ["short", "n" * 100, "\u5c42" * 40, "a" + "\u5c42" * 40])
def test_a_cut_text_is_no_wider_than_its_room(text):
    assert width_of(cut(text, 20)) <= 20
    assert cut(text, 20)[0] == text[0]
    assert cut(text, 20)[-1] == text[-1]


# ------------------------------------------------------------------------------------- light and dark


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("sheet", "pairs"), [("report.css", READABLE), ("flow_picture.css", READABLE_PICTURE)])  # fmt: skip
def test_every_text_can_be_read_in_light_and_dark(sheet, pairs, dark):
    light, _, rest = (TEMPLATES / sheet).read_text().partition("@media (prefers-color-scheme: dark)")  # fmt: skip
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", light))
    if dark:
        changed = dict(re.findall(r"--([\w-]+): (#\w{6})", rest))
        assert changed.keys() == colours.keys()
        colours |= changed
    for text, ground in pairs:
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)


# ------------------------------------------------------------------------------------- in a browser


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
        measured, console = opened(run_page(ran), tmp_path, width=390, details=details)
        assert console == []
        assert measured["wide"] == measured["room"] <= 390

    def test_two_wide_pictures_side_by_side_fit(self, ran, tmp_path):
        blocks(30).save(ran / "flow_before.json")
        measured, _ = opened(run_page(ran), tmp_path, width=1500)
        assert measured["wide"] == measured["room"]

    def test_a_page_of_20000_modules_has_few_elements(self, tmp_path):
        text = run_page(large(tmp_path / "run"))
        measured, console = opened(text, tmp_path, details=True)
        assert console == []
        # The first 2,000 rows of each table; the other rows are data, which a search reads.
        assert measured["elements"] < 120_000
        assert len(text) < 5_000_000

    def test_the_page_is_dark_where_that_is_preferred(self, ran, tmp_path):
        text = run_page(ran)
        light, _ = opened(text, tmp_path)
        dark, _ = opened(text, tmp_path, extra=["--blink-settings=preferredColorScheme=0"])
        assert (light["dark"], dark["dark"]) == ("rgb(245, 247, 250)", "rgb(13, 16, 21)")

    def test_the_search_finds_each_of_20000_modules(self, tmp_path):
        text = run_page(large(tmp_path / "run"))
        script = """
          const details = [...page.querySelectorAll("details")].find((one) => one.textContent.includes("All tensors"));
          details.open = true; await pause();
          const rows = () => [...details.querySelectorAll("tbody tr")], status = () => details.querySelector("[role=status]").textContent;
          const type = async (text) => { search.value = text; search.dispatchEvent(new Event("input")); await pause(); };
          const search = details.querySelector("input"), select = details.querySelector("select"), more = details.querySelector("button");
          seen.first = [rows().length, status(), more.textContent, details.querySelector(".cut") === null];
          more.click(); seen.more = [rows().length, status()];
          await type("body.4321. WEIGHT"); seen.found = [rows().map((row) => row.cells[0].textContent), status(), more.hidden];
          seen.cells = [...rows()[0].cells].map((cell) => cell.textContent);
          seen.status = rows()[0].cells[2].firstElementChild.className;
          await type("no such module"); seen.none = [rows().length, status()];
          await type("body.4321.");
          seen.options = [...select.options].map((one) => one.textContent);
          select.value = "skipped"; select.dispatchEvent(new Event("change")); await pause();
          seen.skipped = [rows().map((row) => row.cells[2].textContent), status()];
        """
        seen, console = acted(text, tmp_path, script)
        assert console == []
        rows_ = Audit.load(tmp_path / "run" / "audit.json").rows
        of_one = [row for row in rows_ if row.module.startswith("body.4321.")]
        weights = [row for row in of_one if "weight" in row.path]
        total = f"{len(rows_):,}"
        assert seen["first"] == [500, f"{total} of {total} rows, the first 500 shown", "Show 500 more", True]  # fmt: skip
        assert seen["more"] == [1000, f"{total} of {total} rows, the first 1,000 shown"]
        assert sorted(seen["found"][0]) == sorted(row.path for row in weights)
        assert seen["found"][1:] == [f"{len(weights)} of {total} rows", True]
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
        many = [one._replace(module=f"m{n}") for n in range(ROWS_SHOWN)]
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
          seen.names = [...frame.querySelectorAll("tbody tr")].map((row) => row.cells[1].textContent);
          seen.elements = [...new Set([...frame.querySelectorAll("tbody *")].map((one) => one.localName))].sort();
          search.value = "</script><script>parent"; search.dispatchEvent(new Event("input")); await pause();
          seen.found = frame.querySelectorAll("tbody tr").length;
          seen.scripts = [before, page.querySelectorAll("script").length];
          seen.hacked = [window.hacked ?? null, frame.ownerDocument.defaultView.hacked ?? null];
        """
        seen, console = acted(run_page(ran), tmp_path, script)
        assert console == []
        assert seen["names"] == [short(name, 400) for name in names]
        assert seen["elements"] == ["code", "span", "td", "th", "tr"]
        assert seen["found"] == 1
        assert seen["scripts"][0] == seen["scripts"][1]
        assert seen["hacked"] == [None, None]

    def test_a_foreign_script_does_not_run(self, ran, tmp_path):
        text = run_page(ran).replace("</body>", "<script>parent.hacked = 1</script></body>")
        seen, console = acted(text, tmp_path, "seen.hacked = window.hacked ?? null;")
        assert seen == {"hacked": None}
        assert "Content Security Policy" in " ".join(console)

    def test_without_scripts_the_first_rows_and_a_note_are_shown(self, tmp_path):  # fmt: skip
        text = run_page(large(tmp_path / "run"))
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
