"""The answers at the top of a job's page, and the names of what loses the layout."""

import ast
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import made
import prepare
from prepare.app.job.record import Job, Result
from prepare.app.job.results import Results
from prepare.app.report.documents import answers, shown_of, stage_documents
from prepare.app.report.documents import verdict as verdict_of
from prepare.app.report.render import breakable, short
from prepare.app.report.sentences import verified_text
from prepare.audit import Audit
from prepare.core.utils.numbers import part_of_tolerance, share_text
from prepare.core.utils.wording import command_line_words
from prepare.errors import Problem
from prepare.stages.flow.document import layout_causes, named, source_name
from prepare.stages.flow.records import Copy, Event, Remedy
from prepare.stages.verify.document import error_text, verdict_sentence
from prepare.stages.verify.stage import VerifyStage

RUN = Results(name="run", audit=Audit([], {"convolutions": {}}))


def event(name, kind, cause, *, size=0) -> Event:
    return made.event(name, type=kind, operation=f"aten.{cause}", bytes=size, cause=cause)


def copied(name, operation, size) -> Copy:
    return made.copied(name, size, operation=f"aten.{operation}", type="X", why="")


@pytest.fixture(autouse=True)
def _as_on_the_command_line():
    with command_line_words():
        yield


def having(run=RUN, **found):
    return replace(run, found=found)


def found(run) -> list[tuple[str, str, str]]:
    documents = stage_documents(shown_of(run))
    return [(answer.kind, answer.answer, answer.remark) for answer in answers(run, documents)]


def verdict(run) -> str:
    return verdict_of(run, stage_documents(shown_of(run)))


def test_a_wrong_result_is_said_first_and_not_to_be_used():
    wrong = replace(made.verification(0.3, status="fail"), culprit="norm", advice="")
    run = having(verify=wrong, flow=made.flow(0))
    assert found(run)[0] == ("bad", "No", "outputs: 0.3 of the scale; first in norm")
    assert found(run)[-1] == ("bad", "Do not use it", "")
    assert verdict(run).startswith("Wrong: outputs: 0.3 of the scale; first in norm. ")


def test_the_error_is_that_of_the_outputs_and_its_share():
    allowed = made.verification().checks[0].allowed
    run = having(verify=made.verification(0.04 * allowed))
    remark = "outputs at 4 % of the tolerance, gradients right"
    expected = ("good", "Yes", remark)
    assert found(run)[0] == expected
    assert [share_text(part) for part in (0.0001, 45.6, 46340)] == [
        "<1 %",
        "46 times",
        "more than 1,000 times",
    ]


def test_an_error_is_divided_by_its_tolerance_in_one_place():
    package = Path(prepare.__file__).parent
    divided = [
        path.name
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Div)
        and ast.unparse(node.left).endswith("error")
        and ast.unparse(node.right).endswith(("allowed", "tolerance"))
    ]
    assert divided == ["numbers.py"]
    assert part_of_tolerance(0.0, 0.0) == 0.0
    assert part_of_tolerance(1.0, 0.0) == float("inf")
    assert part_of_tolerance(None, 1.0) is part_of_tolerance(1.0, None) is None


def test_a_run_has_one_word_for_the_tolerance():
    allowed = made.verification().checks[0].allowed
    fine, bad = made.verification(0.04 * allowed), made.verification(0.3, status="fail")
    texts = [str(fine), str(bad), verdict_sentence(fine), error_text(fine)]
    texts.append(verified_text(VerifyStage.figures({"verify": fine})))
    assert sum("tolerance" in text for text in texts) >= 4
    assert not re.search("limit|allowed", " ".join(texts))


def test_the_speed_of_a_wrong_model_is_not_a_success():
    wrong = made.verification(0.3, status="fail")
    kind, answer, remark = found(having(verify=wrong, bench=made.bench(0.5)))[1]
    assert (kind, answer) == ("plain", "2.0x faster, 50.0 instead of 100 ms")
    assert remark.endswith("; but the outputs are wrong")


def test_wrong_gradients_in_another_mode_are_a_warning():
    run = having(verify=made.verification(wrong=1))
    assert found(run)[0][:2] == ("warn", "Yes, in mode eval only")


def test_a_lost_layout_names_causes_and_remedy():
    remedy = Remedy(steps=("repair_layout",), breaks=0, copied_bytes=0)
    flow = replace(made.flow(13), remedy=remedy)
    run = having(verify=made.verification(), flow=flow)
    remark = "13 InstanceNorm3d; 52.0 KiB copied per forward"
    assert ("bad", "Lost at 13 places", remark) in found(run)
    assert found(run)[-1][:2] == (
        "warn",
        "Add +steps.repair_layout={} (keeps the layout at 13 of 13 places)",
    )
    assert verdict(run).endswith(" Layout lost at 13 places.")


def test_a_kept_layout_says_what_the_repairs_changed():
    run = having(flow=made.flow(0), flow_before=made.flow(13))
    kept = "0 of 0 convolutions return channels_last_3d; lost at 13 places without the repairs"
    assert ("good", "Kept", kept) in found(run)


def test_nothing_checked_is_not_called_right():
    assert [answer[:2] for answer in found(RUN)[:3]] == [
        ("plain", "Not measured"),
        ("plain", "Not measured"),
        ("plain", "Not measured"),
    ]


NEVER = made.convolution("c", "contiguous", backend="")
FLOWS = {
    "none": None,
    "kept": made.flow(0),
    "lost": made.flow(13),
    "never": replace(made.flow(0), convolutions=(NEVER,)),
    "unclear": replace(made.flow(0), status="cannot predict", reason="a value decides"),
    "contiguous": replace(made.flow(0), wanted={5: "contiguous"}),
}
VERIFICATIONS = {
    "none": None,
    "pass": made.verification(),
    "fail": made.verification(0.3, status="fail"),
    "unclear": made.verification(status="cannot tell"),
    "training only": made.verification(wrong=1),
}
BENCHES = {
    "none": None,
    "not measured": made.bench(error="too long"),
    **{
        word: made.bench(verdict=word)
        for word in ("faster", "slower", "unclear", "no difference", "failed")
    },
}


@pytest.mark.parametrize("verified", VERIFICATIONS)
@pytest.mark.parametrize("timed", BENCHES)
@pytest.mark.parametrize("followed", FLOWS)
def test_a_recipe_is_advised_only_if_no_answer_is_open(followed, verified, timed):
    parts = {"flow": FLOWS[followed], "verify": VERIFICATIONS[verified], "bench": BENCHES[timed]}
    *cards, (_, next_, remark) = found(having(**{k: v for k, v in parts.items() if v is not None}))
    said = " ".join(" ".join(card) for card in cards).lower()
    open_ = any(word in said for word in ("unclear", "not measured", "never taken"))
    assert (next_ == "Use the recipe") <= (not open_)
    assert not next_.endswith("it before you use it") or open_ or "failed" in said
    good = (followed, verified, timed)
    if good[0] in ("kept", "lost", "contiguous") and good[1:] == ("pass", "faster"):
        assert next_ == "Use the recipe"
    assert ":" not in remark.replace("outputs: ", "")


def test_names_break_at_dots_and_numbers_do_not_break():
    assert breakable("add +steps.repair_layout={}") == "add +steps.<wbr>repair_layout={}"
    assert breakable("<b> 1.6e-06") == '&lt;b&gt; <span class="whole">1.6e-06</span>'


def test_a_failed_job_says_what_went_wrong():
    run = Results(name="run", result=Result("failed", "oom", "no memory\nmore", "Traceback"))
    assert found(run) == [
        ("bad", "Out of memory", "no memory"),
        ("warn", "Use a smaller input or model", ""),
    ]
    assert verdict(run) == "Failed: no memory"


def test_an_error_in_user_code_names_its_line_and_the_stage():
    error, where = (
        "nets.py:8, in forward: NameError: name 'x' is not defined",
        "nets.py:8, in forward",
    )
    ended = {"done": ["planning"], "during": "preparing", "place": where}
    result = Result("failed", "error", error, "Traceback", **ended)
    assert found(Results(name="run", result=result)) == [
        ("bad", "An exception", "NameError: name 'x' is not defined"),
        ("plain", "nets.py:8, in forward", ""),
        ("plain", "While preparing", "after 1 completed stage"),
        ("warn", "Correct that line", ""),
    ]


def test_an_error_of_a_configuration_ends_with_its_remedy():
    problem = Problem("input", "gives nothing", "set input.shape")
    result = Result("failed", "configuration", str(problem), problems=[problem])
    assert found(Results(name="run", result=result)) == [
        ("bad", "The configuration", "input: gives nothing"),
        ("warn", "Set input.shape", ""),
    ]


def test_an_interrupted_job_says_so_before_its_answers():
    stopped = Result("interrupted", "interrupted", "stopped by Ctrl-C; not done: timing")
    run = having(
        replace(RUN, result=stopped, stopped=stopped.error),
        verify=made.verification(),
        flow=made.flow(0),
    )
    assert verdict(run).startswith("Interrupted: stopped by Ctrl-C; not done: timing. Right. ")
    assert ("plain", "Not measured", "stopped before") in found(run)


@pytest.mark.parametrize(
    ("kind", "operator", "name"),
    [
        ("InstanceNorm2d", "instance_norm", "InstanceNorm2d"),
        ("UNetDecoder", "cat", "cat in UNetDecoder"),
        ("Conv3d", "convolution", "Conv3d"),
        ("Conv3d", "conv3d_reference", "conv3d_reference in Conv3d"),
        ("Net", "", "Net"),
    ],
)
def test_a_cause_is_named_by_class_and_operator(kind, operator, name):
    assert source_name(kind, operator) == name


def test_bytes_are_grouped_by_the_cause_that_made_the_copy():
    events = (
        event("a", "InstanceNorm3d", "instance_norm"),
        event("", "Net", "cat"),
    )
    copies = (
        copied("a", "instance_norm", 10),
        copied("b", "convolution", 20),
        copied("c", "convolution", 5),
        copied("d", "clone", 7),
    )
    flow = replace(made.flow(), events=events, copies=copies)
    causes = layout_causes(flow)
    assert [(c.name, c.count, c.copied) for c in causes] == [
        ("InstanceNorm3d", 1, 10),
        ("cat in Net", 1, 0),
        ("clone in X", 0, 7),
        ("convolution in X", 0, 25),
    ]
    assert sum(c.copied for c in causes) == flow.summary["copied_bytes"]
    assert named(causes) == "1 InstanceNorm3d, 1 cat in Net"


def test_a_busy_machine_is_said_beside_the_speed():
    bench = made.bench(0.9, verdict="unclear")
    busy = {**bench.settings, "cores_available": 2, "load_before": 3.9}
    bench = replace(bench, settings=busy, aa=replace(bench.aa, noise=1.2))
    run = having(bench=bench, flow=made.flow(0))
    said = "Speed unclear. This machine is busy (load 3.9 on 2 cores); repeat it later"
    assert said in verdict(run)


def test_the_advice_names_what_is_missing_or_without_effect():
    def advised(run):
        return found(run)[-1][1:]

    counted = {"convolutions": {"converted": 1, "ineffective": 2}}
    no_effect = having(replace(RUN, audit=Audit([], counted)), verify=made.verification())
    assert advised(no_effect) == ("Read the warnings", "some weights have another layout")
    job = Job(None, None, [], {})
    assert advised(replace(RUN, job=job, has_example=False)) == (
        "Give an example input",
        "",
    )
    unclear = having(bench=made.bench(1.0, verdict="unclear"))
    assert advised(unclear) == ("Time it longer with bench=full", "best on an idle machine")
    same = having(bench=made.bench(1.0, verdict="no difference"))
    assert advised(same) == ("Leave the model unprepared", "it is not faster")
    slower = having(bench=made.bench(1.2, verdict="slower"))
    assert advised(slower) == ("Leave the model unprepared", "it is slower")
    failed = having(bench=made.bench(error="there is no second model"))
    assert advised(failed) == ("Time it before you use it", "there is no second model")
    plan = {
        "problems": [],
        "warnings": [asdict(Problem(each, "is slow", "add the step it")) for each in "ab"],
    }
    assert advised(replace(no_effect, plan=plan)) == (
        "Add the step it",
        "some weights have another layout",
    )
    assert advised(RUN) == ("Verify it before you use it", "leave out verify=none")
    all_of_it = {"verify": made.verification(), "bench": made.bench(), "flow": made.flow(0)}
    assert advised(having(**all_of_it)) == ("Use the recipe", "in your code")


def test_a_layout_that_no_convolution_returned_is_not_advised():
    row = made.convolution("conv", "contiguous", backend="Slow3d")
    flow = replace(made.flow(0), convolutions=(row,))
    outputs = "0 of 1 convolution returns channels_last_3d"
    run = having(flow=flow)
    assert ("bad", "Never taken", outputs) in found(run)
    left = ("warn", "Leave it contiguous here", outputs)
    assert found(run)[-1] == left
    assert found(having(flow=flow, bench=made.bench(1.0, verdict="unclear")))[-1] == left
    assert found(having(flow=flow, bench=made.bench(0.5)))[-1] == left


def test_repairs_that_cost_what_the_layout_wins_are_not_advised():
    flow = replace(made.flow(2), remedy=Remedy(steps=("keep_layout",), breaks=0, copied_bytes=0))
    add = "Add +steps.keep_layout={} (keeps the layout at 2 of 2 places)"
    for verdict in ("slower", "no difference"):
        bench = made.bench(1.1, verdict=verdict)
        run = having(flow=flow, flow_before=made.flow(13), bench=bench)
        costs = ("bad", "Leave it contiguous here", "the repairs cost what the layout wins")
        assert found(run)[-1] == costs
        assert found(having(flow=flow, bench=bench))[-1] == ("warn", add, "")
    faster = found(having(flow=flow, bench=made.bench(0.5)))[-1]
    assert faster == ("warn", add, "and time it: it costs time too")


def test_the_flow_of_an_unprepared_model_says_how_to_prepare_it():
    run = Results(name="run", found={"flow": made.flow(0)})
    assert found(run)[-1] == ("plain", "Leave out task=flow to prepare it", "")


def test_a_long_text_is_cut_between_words():
    text = "2 add in WanResidualBlock, 2 more backward; 21 of 25 convolutions return another layout"
    cut = short(text, 60)
    head, tail = cut.split("…")
    assert text.startswith(head)
    assert text.endswith(tail)
    assert (head[-1], tail[0]) == (" ", " ")
    assert 40 < len(cut) <= 60
    assert len(short("n" * 100, 60)) == 60
