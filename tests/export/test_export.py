"""Exports: stages and verdicts, input layouts, the record, and steps that do not go along."""

import dataclasses
import hashlib

import pytest
import torch
from torch import nn

from keeping_nets import chunked, video
from prepare.core.document import ReportContext
from prepare.core.utils.child_process import ForkedRunner
from prepare.errors import ConfigError, ExportError, FileError, RefusedError
from prepare.pipeline import Pipeline
from prepare.stages.export import EXPORTERS, Export, export, load_again
from prepare.stages.export.document import export_document

CONTIGUOUS = {"layout": "contiguous", "batch": 3}


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.InstanceNorm2d(4, affine=True),
        nn.ReLU(),
        nn.Conv2d(4, 2, 1),
    ).eval()


def batch(size=3):
    return torch.randn(size, 3, 6, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def exported(tmp_path, in_process):
    def run(to, model=None, steps=None, given=None, **options):
        pipeline = None if steps is None else Pipeline.from_config(steps)
        given = batch() if given is None else given
        return export(
            network() if model is None else model, given, to=to, folder=tmp_path / "out",
            pipeline=pipeline, **options,
        )  # fmt: skip

    return run


def answers(found, batch=3):
    return {check.layout: check.answer for check in found.checks if check.batch == batch}


def test_a_right_artefact_passes_every_stage(exported):
    found = exported("Stub", steps={"conv2d_memory_format": {}, "input_format": {}})
    assert (found.status, found.reason) == ("pass", "")
    names = [(stage.name, stage.status) for stage in found.stages]
    order = ("prepare", "capture", "lower", "write", "load", "compare")
    assert names == [(name, "pass") for name in order]
    assert answers(found) == dict.fromkeys(
        ("contiguous", "channels_last", "transposed", "gaps"), "right"
    )
    assert {check.batch for check in found.checks} == {1, 2, 3}
    assert found.worst.error < found.worst.allowed


class Peak(nn.Module):
    """Divides by the largest number that was ever seen."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("peak", torch.zeros(()))

    def forward(self, x):
        self.peak.copy_(torch.maximum(self.peak, x.abs().amax()))
        return self.conv(x) / (self.peak + 1)


def test_an_artefact_holds_the_state_of_the_model(exported, tmp_path):
    model = Peak().eval()
    found = exported("torch_export", model, {"conv2d_memory_format": {}, "input_format": {}})
    assert (found.status, float(model.peak)) == ("pass", 0.0)
    assert [float(b) for b in torch.export.load(tmp_path / "out/model.pt2").buffers()] == [0.0]


def test_a_layout_that_is_answered_wrongly_fails(exported):
    found = exported("IgnoresStrides")
    assert found.status == "fail"
    wrong = dict.fromkeys(("channels_last", "transposed", "gaps"), "wrong")
    assert found.contract.layouts == {"contiguous": "right"} | wrong
    assert found.reason.startswith(
        "compare: channels_last input of batch 3: wrong: output is off by"
    )


def test_a_contract_may_require_contiguous_inputs(exported):
    found = exported("RequiresContiguous")
    assert found.status == "fail"
    assert found.reason.endswith("; promise contiguous inputs")
    found = exported("RequiresContiguous", promised=True)
    assert found.status == "pass"
    assert found.contract.requires_contiguous
    assert found.worst.error < found.worst.allowed
    assert found.contract.layouts["channels_last"] == "wrong"
    assert "wrong, but not allowed by the contract: channels_last" in found.stages[-1].note


def test_a_promise_of_contiguous_inputs_excuses_no_wrong_values(exported, monkeypatch):
    monkeypatch.setattr(EXPORTERS["RequiresContiguous"], "taken", lambda self, x, kept: x.flip(2))
    found = exported("RequiresContiguous", promised=True)
    assert found.status == "fail"
    assert "contiguous input of batch 3: wrong" in found.reason
    assert "promise contiguous inputs" not in found.reason


def test_weights_become_contiguous_for_formats_without_strides(exported, tmp_path):
    model = network()
    steps = {"conv2d_memory_format": {}, "input_format": {}}
    found = exported("RequiresContiguous", model, steps, promised=True)
    (taken,) = found.taken_out
    assert (taken.step, taken.modules) == ("conv2d_memory_format", ("0", "3"))
    kept = torch.load(tmp_path / "out" / "model.stub", weights_only=False)["model"]
    assert [kept[n].weight.stride() for n in (0, 3)] == [(27, 9, 3, 1), (4, 1, 1, 1)]
    assert torch.equal(kept[0].weight, model[0].weight)


def test_a_layout_that_is_refused_clearly_passes(exported):
    found = exported("RefusesStrides")
    assert found.status == "pass"
    assert found.contract.layouts["contiguous"] == "right"
    assert found.contract.layouts["channels_last"] == "refused"
    assert "refused clearly: channels_last input of batch 3" in found.stages[-1].note
    refused = next(check for check in found.checks if check.layout == "gaps")
    assert "ValueError: strides" in refused.note


def test_a_contiguous_input_may_not_be_refused(exported):
    found = exported("RefusesAll")
    assert found.status == "fail"
    assert found.reason == (
        "compare: contiguous input of batch 3: refused: ValueError: the input is not supported"
    )


def test_another_batch_may_be_refused_unless_it_is_promised(exported):
    assert exported("OneBatch").status == "pass"
    found = exported("OneBatch", dynamic=[0])
    assert found.status == "fail"
    assert "contiguous input of batch 1: refused: ValueError: the batch has to be 3" in found.reason


def test_a_death_of_the_other_process_fails_that_call_only(exported, in_process, monkeypatch):
    runner = ForkedRunner(load_again.answer)
    monkeypatch.setattr(in_process, "ask", runner.ask)
    found = exported("Dies")
    runner.stop()
    assert answers(found)["contiguous"] == "right"
    assert answers(found)["channels_last"] == "crashed"
    assert {check.batch: check.answer for check in found.checks} == {
        1: "right",
        2: "right",
        3: "crashed",
    }
    assert found.status == "fail"
    assert "code 7" in found.reason


def test_a_stage_that_cannot_be_done_ends_the_export(exported):
    found = exported("CannotLower")
    assert found.status == "refused"
    assert found.reason == "lower: NotImplementedError: no operator einsum"
    assert [stage.name for stage in found.stages] == ["prepare", "capture", "lower"]
    assert (found.artefact, found.sha256, found.checks) == ("", "", ())


def test_the_cause_of_an_error_is_named(exported, monkeypatch):
    def lower(self, program, metadata):
        cause = ValueError("no volumes\nat all")
        error = cause.__cause__ = RuntimeError("a pass \x1b[96mfailed\x1b[0m")  # a circle ends
        raise error from cause

    monkeypatch.setattr(EXPORTERS["Stub"], "lower", lower)
    found = exported("Stub")
    assert found.reason == "lower: RuntimeError: a pass failed; ValueError: no volumes"
    (advice,) = export_document(ReportContext(found={"export": found})).advice
    assert advice.remark == "the report has the stage that failed"
    half = dataclasses.replace(found, recipe="steps: {half: {dtype: bfloat16}}")
    (advice,) = export_document(ReportContext(found={"export": half})).advice
    assert "try it without the step half" in advice.remark


def test_an_artefact_that_cannot_be_loaded_is_refused(exported):
    found = exported("CannotLoad")
    assert found.status == "refused"
    assert "OSError: no" in found.reason


def test_the_record_holds_the_artefact_and_its_contract(exported, tmp_path):
    steps = {"half": {"dtype": "bfloat16"}, "conv2d_memory_format": {}, "input_format": {}}
    found = exported("Listing", steps=steps, dynamic=[0])
    assert found.status == "pass"
    content = (tmp_path / "out" / "model.stub").read_bytes()
    assert found.sha256 == hashlib.sha256(content).hexdigest()
    assert found.bytes > len(content)
    assert set(found.files) == {"model.stub", "model.json"}
    assert "bfloat16" in found.recipe
    assert found.recipe_inside
    assert found.contract.formats_inputs
    (given,) = found.contract.inputs
    assert (given.name, given.shape, given.dtype) == ("input", (None, 3, 6, 6), "float32")
    assert given.strides == (108, 36, 6, 1)
    assert found.versions["torch"].startswith("2.")
    path = tmp_path / "export.json"
    found.save(path)
    assert Export.load(path) == found


def test_a_second_export_replaces_the_first(exported, tmp_path):
    exported("Listing")
    (tmp_path / "out" / "model.other").write_text("from before")
    again = exported("Listing")
    assert again.status == "pass"
    assert set(again.files) == {"model.stub", "model.json"}


def test_a_file_that_cannot_be_written_is_named(exported, monkeypatch):
    def full(self, lowered, path, metadata):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EXPORTERS["Stub"], "write", full)
    with pytest.raises(FileError, match=r"model.stub: cannot be written: .*No space left"):
        exported("Stub")


def test_a_record_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "export.json"
    path.write_text('{"format": "prepare.bench", "version": 1}')
    with pytest.raises(ExportError, match="this is a prepare.bench, not a prepare.export"):
        Export.load(path)


def test_an_artefact_without_the_recipe_says_so(exported):
    found = exported("NoRecipe")
    assert not found.recipe_inside
    assert found.stages[4].note == "the recipe is beside the artefact, not in it"


def test_steps_that_cannot_go_along_are_named(exported, monkeypatch):
    steps = {
        "conv2d_memory_format": {}, "repair_layout": {"force": True},
        "input_format": {"attach": True}, "compile": {"backend": "eager"},
    }  # fmt: skip
    monkeypatch.setattr(EXPORTERS["Stub"], "keeps", ("input_format",))
    model = network()
    found = exported("Stub", model, steps)
    assert found.status == "pass"
    taken = {item.step: item.modules for item in found.taken_out}
    assert taken == {"input_format": ("",), "compile": ("",), "repair_layout": ("1",)}
    assert type(model[1]) is nn.InstanceNorm2d


def test_steps_that_a_format_holds_go_along(exported):
    steps = {"conv2d_memory_format": {}, "repair_layout": {"force": True}, "input_format": {}}
    assert exported("Stub", steps=steps).taken_out == ()


class Named(nn.Module):
    """Return an object of a class that another process need not know."""

    @dataclasses.dataclass
    class Output:
        scores: torch.Tensor
        hidden: tuple

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 1)

    def forward(self, pixels):
        y = self.layer(pixels)
        return self.Output(y, (y * 2, None))


def test_outputs_of_a_class_become_plain_tensors(exported, monkeypatch):
    seen = []
    monkeypatch.setattr(
        EXPORTERS["Stub"], "run_captured", lambda self, program: seen.append(program) or program
    )
    found = exported("Stub", Named().eval())
    assert found.status == "pass"
    assert [type(each) for each in seen[0](batch())] == [torch.Tensor, torch.Tensor]
    assert not found.contract.formats_inputs
    assert found.contract.inputs[0].name == "pixels"


class Counting(nn.Module):
    """Return its sizes beside a tensor, or what `more` is."""

    def __init__(self, more=None):
        super().__init__()
        self.layer, self.more, self.off = nn.Conv2d(3, 2, 1), more, 0

    def forward(self, x):
        more = len(x) + self.off if self.more is None else self.more
        return {"n": more, "logits": self.layer(x)}


@pytest.mark.parametrize("more", [None, 3, 0.5, True])
@pytest.mark.parametrize("only_tensors", [False, True])
def test_a_number_among_outputs_is_compared_by_value(exported, monkeypatch, more, only_tensors):
    seen = []
    monkeypatch.setattr(EXPORTERS["Stub"], "only_tensors", only_tensors)
    monkeypatch.setattr(
        EXPORTERS["Stub"], "run_captured", lambda self, program: seen.append(program) or program
    )
    found = exported("Stub", Counting(more).eval(), {"half": {"dtype": "bfloat16"}}, dynamic=[0])
    assert (found.status, found.reason) == ("pass", "")
    assert isinstance(seen[0](batch())["n"], torch.Tensor) is only_tensors


def test_a_number_that_is_off_by_one_is_wrong(exported, monkeypatch):
    def off(self, program):
        program.model.off = 1
        return program

    monkeypatch.setattr(EXPORTERS["Stub"], "run_captured", off)
    steps = {"half": {"dtype": "bfloat16"}, "input_format": {}}
    many = torch.randn(200, 3, 1, 1)  # off by less than the tolerance of bfloat16
    found = exported("Stub", Counting().eval(), steps, given=many)
    stage = next(each for each in found.stages if each.name == "capture")
    assert (stage.status, stage.note[:16]) == ("fail", "output.n is off ")


def test_the_model_that_is_given_is_not_changed(exported):
    model = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    exported("Stub", model, {"half": {"dtype": "bfloat16"}, "input_format": {"attach": True}})
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not model._forward_pre_hooks


def test_an_artefact_is_timed_with_both_models(exported):
    found = exported("Stub", steps={"conv2d_memory_format": {}, "input_format": {}}, budget=0.3)
    assert [row.name for row in found.time.rows] == ["unprepared", "prepared", "artefact"]
    assert exported("IgnoresStrides", budget=0.3).time is None


@pytest.mark.parametrize(
    "file", ["../evil", "/tmp/evil", "a/b", "..", "", ".hidden", "a\\b", "a\nb"]
)
def test_a_name_with_a_folder_is_refused(exported, tmp_path, file):
    with pytest.raises(ConfigError, match=r"export.file: .* is not a plain name; give letters"):
        exported("Stub", file=file)
    assert not list(tmp_path.iterdir())


def test_a_link_in_the_folder_is_not_written_through(exported, tmp_path):
    (tmp_path / "out").mkdir()
    outside = tmp_path / "precious"
    outside.write_text("mine")
    for name in ("model.stub", "model.json"):
        (tmp_path / "out" / name).symlink_to(outside)
    assert exported("Listing").status == "pass"
    assert outside.read_text() == "mine"
    assert not (tmp_path / "out" / "model.stub").is_symlink()


def test_names_in_the_metadata_write_no_file(exported, tmp_path, monkeypatch):
    hostile = {str(tmp_path / "evil"): "x", "../evil": "y"}
    monkeypatch.setattr(EXPORTERS["Stub"], "metadata", lambda self, path: hostile)
    assert exported("Stub").status == "pass"
    assert {path.name for path in tmp_path.rglob("*")} == {"out", "model.stub"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dynamic": [9]}, "export.dynamic: 9 is not a dimension; give 0 for the batch, as in [0]"),
        ({"dynamc": [0]}, "export.dynamc: no such option; did you mean 'dynamic'?"),
        ({"dynamic": "x"}, "export.dynamic"),
    ],
)
def test_options_are_checked(exported, options, text):
    with pytest.raises(ConfigError) as caught:
        exported("Stub", **options)
    assert text in str(caught.value)


def test_an_unknown_exporter_names_the_nearest(exported):
    with pytest.raises(ConfigError, match="no such exporter; did you mean 'onnx'"):
        exported("onxx")


def test_a_missing_package_is_named(exported):
    text = (
        r"Lacking needs no_such_package; install the extra: pip install 'torch-prepare\[export\]'"
    )
    with pytest.raises(ConfigError, match=text):
        exported("Lacking")


def test_a_model_in_training_is_refused(exported):
    with pytest.raises(RefusedError, match="it is in training mode; call model.eval"):
        exported("Stub", network().train())


def test_a_batch_without_a_tensor_is_refused(exported):
    with pytest.raises(RefusedError, match="it holds no tensor"):
        exported("Stub", given=(1,))


def test_rewritten_calls_are_taken_out_and_named(exported, monkeypatch):
    steps = {"conv3d_memory_format": {}, "keep_layout": {}, "input_format": {}}
    monkeypatch.setattr(EXPORTERS["Stub"], "keeps", ("input_format",))
    found = exported("Stub", chunked().eval(), steps, video(2))
    assert found.status == "pass"
    taken = {item.step: item.modules for item in found.taken_out}
    assert set(taken) == {"keep_layout"}
    assert "conv" in taken["keep_layout"]


def test_a_compiled_submodule_is_taken_out_and_named(exported):
    model = network()
    model[0].compile(backend="eager")
    found = exported("Stub", model)
    assert found.status == "pass"
    assert [(item.step, item.modules) for item in found.taken_out] == [("compile", ("0",))]


def test_a_model_on_another_device_is_refused(exported):
    with pytest.raises(RefusedError, match="is on meta, and artefacts are checked on the CPU"):
        exported("Stub", network().to("meta"))


def test_an_opset_is_checked():
    with pytest.raises(ConfigError, match="export.opset: 3 is not an opset; give one from 18"):
        EXPORTERS["onnx"].from_options({"opset": 3})


def test_aoti_runs_with_checks_of_its_inputs():
    aoti = EXPORTERS["aoti"]
    assert aoti.from_options({}).environment == {"AOTI_RUNTIME_CHECK_INPUTS": "1"}
    assert aoti.from_options({"check_inputs": False}).environment == {}
