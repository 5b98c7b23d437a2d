"""The doctor finds on this CPU what is known of it, and plans ask its answers."""

import json
import os
from dataclasses import replace

import pytest
import torch
from torch import nn

import planted_faults
from prepare.app.cli.main import run
from prepare.core.model import doctor_findings
from prepare.core.model.doctor_findings import answers_file, standing_here
from prepare.core.model.known_issues import issues
from prepare.core.utils.child_process import ForkedRunner
from prepare.errors import ConfigError, DoctorError, RefusedError
from prepare.pipeline import Pipeline
from prepare.stages.doctor import Diagnosis, Finding, examine
from prepare.stages.doctor.cases import CaseOutcome
from prepare.stages.doctor.examination import _ask, _finding, answer, run_probe
from prepare.stages.doctor.probes import KNOWN
from prepare.stages.doctor.records import VERDICTS, diagnosis_lines

ON_CPU = [issue for issue in issues() if "cpu" in issue.backend and issue.probe]
DECIDED = [
    issue
    for issue in ON_CPU
    if not issue.probe.endswith(("few_pixels_cpu", "float16_cpu", "small_cpu"))
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def finding(name="one", verdict="fine here", reason="measured", **more):
    return Finding(name=name, verdict=verdict, where="Conv2d", reason=reason, **more)


def diagnosis(*findings):
    return Diagnosis(device="cpu", findings=findings, seconds=2.0)


def test_every_probe_of_the_table_exists_and_has_an_entry():
    named = {issue.probe for issue in issues() if issue.probe}
    assert named == set(KNOWN)


@pytest.mark.slow
def test_what_is_known_of_this_cpu_is_found(cache):
    kernels = torch.backends.cpu.get_cpu_capability()  # of another CPU this fault does not show
    here = [
        i for i in DECIDED if kernels == "AVX512" or i.name != "depthwise_transposed_conv3d_cpu"
    ]
    seen, names = [], [issue.name for issue in here]
    found = examine("cpu", probes=names, progress=lambda *given: seen.append(given)).findings
    assert {each.name: each.verdict for each in found} == {
        issue.name: f"{issue.effect} here" for issue in here
    }
    assert all(each.remedy for each in found)
    assert seen[-1][1:] == (len(names), len(names))
    assert not cache.exists()  # plans ask only answers to all probes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a new process would take seconds")
@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        ("crash", "its process was killed by SIGSEGV"),
        ("end_silently", "its process ended with exit code 7"),
        ("ask_for_memory", "it needs more memory than 1.0 GiB"),
        ("raise_an_error", "it raises"),
        ("hang", "its process did not end in time, and was killed"),
    ],
)
def test_a_probe_that_breaks_down_is_a_finding(setup, reason, monkeypatch):
    def broken(request):
        getattr(planted_faults, setup)()
        return answer(request)

    monkeypatch.setitem(
        KNOWN, "hardswish_backward_mps", replace(KNOWN["hardswish_backward_mps"], seconds=2.0)
    )
    runner = ForkedRunner(broken)
    found = _ask(runner, {"probe": "hardswish_backward_mps", "device": "cpu", "memory": 1 << 30})
    runner.stop()
    assert found.bad == "wrong here"
    assert reason in found.text


@pytest.mark.slow
def test_probes_after_the_time_are_not_probed_and_say_why():
    found = examine("cpu", seconds=0.001, probes=["softmax_layout", "layer_norm_layout"]).findings
    assert [each.verdict for each in found] == ["lost here", "not probed"]
    assert found[1].reason == "no time was left"


def test_a_lost_layout_is_not_called_slow():
    assert run_probe("softmax_layout", "cpu").bad == "lost here"


def test_a_remedy_for_one_dtype_names_it():
    (half,) = (each for each in issues() if each.name == "batch_norm_statistics_float16")
    found = _finding(half, {half.probe: CaseOutcome("wrong here", "NaN")})
    assert found.remedy == "in float16 only: set precision=bfloat16"
    (norm,) = (each for each in issues() if each.name == "softmax_layout")
    found = _finding(norm, {norm.probe: CaseOutcome("lost here", "loses channels_last")})
    assert found.remedy == 'add "repair_layout": {}'


def test_wrong_arguments_of_examine_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        examine("cpu", seconds=0, probes=["softmax_layou"])
    assert "'softmax_layout'" in str(caught.value)
    assert "seconds: 0 is not positive; give seconds, as in 120" in str(caught.value)
    if not torch.cuda.is_available():
        with pytest.raises(RefusedError, match="cuda cannot be used here"):
            examine("cuda")


def remember(*findings):
    path = answers_file("cpu")
    path.parent.mkdir(parents=True, exist_ok=True)
    diagnosis(*findings).save(path)
    return path


def errors_of_plan():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8))
    return Pipeline.from_config({"conv2d_memory_format": {}}).plan(model).errors


def test_a_plan_asks_a_fresh_answer_before_the_table(monkeypatch):
    assert errors_of_plan()
    path = remember(finding("instance_norm_gradients_cpu"))
    assert not errors_of_plan()
    old = path.stat().st_mtime - 31 * 86400
    os.utime(path, (old, old))
    assert errors_of_plan()
    os.utime(path)
    assert not errors_of_plan()
    monkeypatch.setattr(doctor_findings, "machine_identity", lambda: {"torch": "another"})
    assert errors_of_plan()


def test_what_is_wrong_here_stands_against_the_table():
    remember(finding("batch_norm_backward_mps", "wrong here"))
    assert "batch_norm_backward_mps" in {issue.name for issue in standing_here("cpu")}
    remember(finding("softmax_layout", "not probed"))
    assert "softmax_layout" in {issue.name for issue in standing_here("cpu")}


def test_unreadable_answers_are_ignored():
    path = remember(finding("instance_norm_gradients_cpu"))
    path.write_text("{")
    assert errors_of_plan()


def test_a_diagnosis_is_read_as_it_was_written(tmp_path):
    before = diagnosis(finding(), finding("b", "wrong here"))
    before.save(tmp_path / "doctor.json")
    after = Diagnosis.load(tmp_path / "doctor.json")
    assert after == before
    assert (after.exit_code, diagnosis(finding()).exit_code) == (1, 0)
    data = json.loads((tmp_path / "doctor.json").read_text())
    data["findings"][0]["verdict"] = "good"
    (tmp_path / "doctor.json").write_text(json.dumps(data))
    with pytest.raises(DoctorError, match="'good' is not a verdict"):
        Diagnosis.load(tmp_path / "doctor.json")


def test_every_finding_is_shown():
    shown = diagnosis(
        finding("a", "wrong here", remedy="set x"),
        finding("b", "slow here", "2 times", remedy="use y"),
        finding("c", "not probed", "no time was left"),
        finding("d"),
        finding("e", "inexact here"),
        finding("f", "lost here", remedy="use y"),
    )
    text = "\n".join(diagnosis_lines(shown))
    assert "wrong here: Conv2d [a]: measured\n    set x" in text
    assert "fine here: d" in text
    assert (
        "1 wrong here, 1 inexact here, 1 slow here, 1 lost here, 1 fine here, 1 not probed"
        in shown.document().line
    )
    assert all(word in text for word in (*VERDICTS, "2 times", "no time was left", "use y"))


def test_each_remedy_is_said_once():
    shown = diagnosis(
        *(finding(name, "slow here", remedy="add repair_layout") for name in "abc"),
        *(finding(name, "not probed", "no time was left") for name in "de"),
    )
    text = "\n".join(diagnosis_lines(shown))
    assert text.count("add repair_layout") == 1
    assert "not probed: d, e: no time was left" in text


def test_the_command_prints_the_findings_and_exits_with_1(tmp_path, capsys, monkeypatch):
    found, asked = diagnosis(finding("a", "wrong here")), {}
    monkeypatch.setattr(
        "prepare.stages.doctor.examine", lambda *_, **given: asked.update(given) or found
    )
    monkeypatch.chdir(tmp_path)
    assert run(["doctor", "--seconds", "9"]) == 1
    assert asked["seconds"] == 9.0
    assert "Conv2d [a]: " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--colour"], "doctor: '--colour' is not an option; doctor [--device DEVICE]"),
        (["seconds=20"], "'seconds=20' is not an option; write --seconds 20"),
        (["--seconds", "soon"], "doctor: argument --seconds: invalid float value: 'soon'"),
        (["share"], "doctor share: was taken out; use what `doctor` prints"),
        (["--folder=x"], "doctor --folder: was taken out; use what `doctor` prints"),
        (["--dry-run"], "doctor --dry-run: was taken out; use doctor --device cpu"),
    ],
)
def test_wrong_words_give_one_line_and_exit_code_2(words, message, capsys, monkeypatch):
    monkeypatch.setattr("prepare.stages.doctor.examine", lambda *_, **__: diagnosis())
    assert run(["doctor", *words]) == 2
    (text,) = capsys.readouterr().err.splitlines()[-1:]
    assert message in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", set(KNOWN) - {"conv_transpose2d_compiled"})
def test_every_probe_runs_on_a_cpu(name):
    assert run_probe(name, "cpu").text
