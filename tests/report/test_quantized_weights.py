"""Weights in 8 bits in the terminal and on the page: how many there are, and why others stay in float."""

from prepare.app.cli import main as cli
from prepare.app.report.sentences import quantized_text
from prepare.audit import audit
from prepare.pipeline import Pipeline
from quantize_checks import NEEDS_TORCHAO
from small_nets import perceptron

pytestmark = NEEDS_TORCHAO

LEFT = "torchao quantizes weights of Linear only"


def text_of(**options):
    model, pipeline = perceptron(), Pipeline.from_config({"quantize": options})
    plan = pipeline.plan(model)
    return quantized_text(audit(pipeline.apply(model), plan=plan).rows)


def test_weights_are_counted_once_with_what_was_left_and_why():
    only = f"left in float: 1 Conv2d, 1 Embedding ({LEFT})"
    assert text_of() == f"2 weights int8 per row; {only}"
    excluded = text_of(exclude=["first"], group_size=32)
    assert excluded == f"1 weight int8 per 32 values; {only}, 1 Linear (exclude: first)"


def test_without_8_bits_nothing_is_said():
    assert quantized_text(audit(perceptron()).rows) == ""


def test_a_run_shows_weights_in_8_bits(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["model._target_=small_nets.perceptron", "input.shape=[2,3,8,8]", "flow=none"]
    words += ["+steps.quantize={}", "bench=none", "verify=none", "hydra.run.dir=out"]
    words += ["--verbose"]
    assert cli.run(words) == 0
    printed = " ".join(capsys.readouterr().out.split())
    said = f"quantized 2 weights int8 per row; left in float: 1 Conv2d, 1 Embedding ({LEFT})"
    assert said in printed
    assert "memory 70.8 KiB before, 23.7 KiB after" in printed
    page = (tmp_path / "out" / "report.html").read_text()
    assert "2 weights int8 per row; left in float: 1 Conv2d, 1 Embedding" in page
    assert f"quantize: {LEFT}" in page
