"""The answers at the top of a job's page, and the names of what loses the layout."""

from dataclasses import asdict, replace

import pytest

import made
from prepare.app.job.record import Job, Result, Results
from prepare.app.report.answers import answers, stage_documents
from prepare.audit import Audit
from prepare.errors import Problem
from prepare.stages.flow.records import Copy, Remedy

SEEN = {"given": "", "gave": ""}
JOB = Job(None, None, [], {}, seen=SEEN)
RUN = Results(job=JOB, audit=Audit([], {"convolutions": {}}))


def copied(name, operation, size) -> Copy:
    return made.copied(name, size, operation=f"aten.{operation}", type="X", why="")


def having(run=RUN, **found):
    return replace(run, found=found)


def found(run) -> list[tuple[str, str, str]]:
    documents = stage_documents(run)
    return [(answer.kind, answer.answer, answer.remark) for answer in answers(run, documents)]


def test_a_wrong_result_is_said_first_and_not_to_be_used():
    wrong = replace(made.verification(0.3, status="fail"), culprit="norm", advice="")
    run = having(verify=wrong, flow=made.flow(0))
    assert found(run)[0] == ("bad", "No", "outputs: 0.3 of the scale; first in norm")
    assert found(run)[-1] == ("bad", "Do not use it", "")


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
        "Add the step repair_layout (keeps the layout at 13 of 13 places)",
    )


def test_nothing_checked_is_not_called_right():
    assert [answer[:2] for answer in found(RUN)[:3]] == [("plain", "Not measured")] * 3


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


def test_a_failed_job_says_what_went_wrong():
    run = Results(job=JOB, result=Result("failed", "oom", "no memory\nmore", "Traceback"))
    assert found(run) == [
        ("bad", "Out of memory", "no memory"),
        ("warn", "Use a smaller input or model", ""),
    ]


def test_an_error_of_a_configuration_ends_with_its_remedy():
    problem = Problem("input", "gives nothing", "set input.shape")
    result = Result("failed", "configuration", str(problem), problems=[problem])
    assert found(Results(job=JOB, result=result)) == [
        ("bad", "The configuration", "input: gives nothing"),
        ("warn", "Set input.shape", ""),
    ]


def test_the_advice_names_what_is_missing_or_without_effect():
    def advised(run):
        return found(run)[-1][1:]

    counted = {"convolutions": {"converted": 1, "ineffective": 2}}
    no_effect = having(replace(RUN, audit=Audit([], counted)), verify=made.verification())
    assert advised(no_effect) == ("Read the warnings", "some weights have another layout")
    job = Job(None, None, [], {})
    assert advised(replace(RUN, job=replace(job, seen=None))) == ("Give an example input", "")
    for timed, advice in (
        (made.bench(1.0, verdict="unclear"), ("Time it longer with bench.seconds=60", "best on an idle machine")),
        (made.bench(1.0, verdict="no difference"), ("Leave the model unprepared", "it is not faster")),
        (made.bench(1.2, verdict="slower"), ("Leave the model unprepared", "it is slower")),
        (made.bench(error="there is no second model"), ("Time it before you use it", "there is no second model")),
    ):  # fmt: skip
        assert advised(having(bench=timed)) == advice
    slow = [asdict(Problem(each, "is slow", "add the step it")) for each in "ab"]
    planned = replace(no_effect, plan={"problems": [], "warnings": slow})
    assert advised(planned) == ("Add the step it", "some weights have another layout")
    assert advised(RUN)[0] == "Verify it before you use it"
    assert "verify=none" in advised(RUN)[1]
    all_of_it = {"verify": made.verification(), "bench": made.bench(), "flow": made.flow(0)}
    assert advised(having(**all_of_it)) == ("Use the recipe", "in your code")


def test_the_flow_of_an_unprepared_model_says_how_to_prepare_it():
    run = Results(job=JOB, task="flow", found={"flow": made.flow(0)})
    assert found(run)[-1] == ("plain", "Leave out task=flow to prepare it", "")
