"""task=export on the command line: the record, the page, exit codes and messages."""

import json

import pytest

from prepare.app.cli.main import run as command
from prepare.app.report.objects import html
from prepare.core.document import ReportContext
from prepare.stages.export import Export, load_again
from prepare.stages.export.stage import ExportTask

WORDS = ("model._target_=sample_nets.small", "input.shape=[2,3,12,12]", "device=cpu", "flow=none")


@pytest.fixture
def go(tmp_path, monkeypatch, capsys, in_process):
    """Run task=export in an empty folder, in this process; return its folder and output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def run(to, *argv, code=0):
        own = ("task=export", "export=torch_export", f"export.exporter={to}", "bench=none")
        place = ("hydra.run.dir=run", "overwrite=true")
        assert command([*WORDS, *own, *place, *argv]) == code
        return tmp_path / "run", capsys.readouterr()

    return run


def test_an_export_is_recorded_and_on_the_page(go):
    folder, said = go("Stub", "memfmt=channels_last", "verify=none", "export.dynamic=[0]")
    found = Export.load(folder / "export.json")
    assert found.status == "pass"
    assert found.options["dynamic"] == [0]
    assert (folder / "model.stub").stat().st_size == found.bytes
    assert "Stub pass: " in said.out
    shown = " ".join(said.out.split())
    assert "right: contiguous" in shown
    page = (folder / "report.html").read_text()
    assert '<section id="export"' in page
    for text in ("Answers of the artefact", found.sha256, "[any, 3, 12, 12]", "in the artefact"):
        assert text in page
    assert "Right as Stub" in page
    figures = json.loads((folder / "result.json").read_text())["figures"]
    assert (figures["exporter"], figures["exported"]) == ("Stub", "pass")
    assert figures["artefact_error"] < figures["artefact_allowed"]
    assert "Stub pass: model.stub" in repr(found)
    assert "compare  pass" in str(found)
    assert "the artefact" in html(found)


def test_an_unprepared_model_is_exported_too(go):
    folder, _ = go("Stub", "~memfmt", "verify=none")
    found = Export.load(folder / "export.json")
    assert found.status == "pass"
    (advice,) = ExportTask.document(ReportContext(found={"export": found})).advice
    assert (advice.kind, advice.answer) == ("good", "Use model.stub")


def test_a_method_is_exported_with_the_names_of_its_arguments(go):
    words = ("model._target_=coder_nets.Coder", "model.method=decode", "input.shape=[2,8,3,6,7]")
    folder, _ = go("Stub", "memfmt=channels_last_3d", "verify=none", *words)
    (given,) = Export.load(folder / "export.json").contract.inputs
    assert given.name == "latents"


def test_a_wrong_artefact_has_exit_code_3(go):
    folder, said = go("IgnoresStrides", "verify=none", code=3)
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["reason"]) == ("verification_failed", "export")
    assert "batch 2: wrong" in result["error"]
    assert "wrong: channels_last" in " ".join(said.out.split())
    page = (folder / "report.html").read_text()
    assert "Wrong as IgnoresStrides" in page
    assert "wrong: channels_last" in page
    assert "Do not" in page


def test_a_contract_of_contiguous_inputs_is_shown(go):
    folder, said = go("RequiresContiguous", "verify=none", "+export.promised=true")
    assert "contiguous inputs" in " ".join(said.out.split())
    assert "contiguous inputs" in (folder / "report.html").read_text()


def test_an_export_that_cannot_be_done_has_exit_code_1(go):
    folder, said = go("CannotLower", "verify=none", code=1)
    assert json.loads((folder / "result.json").read_text())["reason"] == "export"
    assert (said.out + said.err).count("operator einsum") == 1
    page = (folder / "report.html").read_text()
    for text in ("no operator einsum", "Not exported to CannotLower", "Choose another format"):
        assert text in page
    assert Export.load(folder / "export.json").status == "refused"


def test_what_is_missing_is_told_before_the_model_is_built(go):
    _, said = go("Lacking", code=2)
    assert "needs no_such_package" in said.err
    _, said = go("Stub", "input.shape=null", code=2)
    assert "input.shape=[...]" in said.err


def test_a_stop_during_the_export_keeps_the_record(go, monkeypatch):
    def stopped(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(load_again, "Worker", stopped)
    folder, said = go("Stub", "memfmt=channels_last", "verify=none", code=130)
    assert ": the export" in said.err
    assert (folder / "audit.json").exists()
