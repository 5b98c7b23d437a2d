"""Tuning from end to end: the result, the cache, the record, the command line, and several ranks."""

import json
import math
import os
import random
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from paths import PYTHONPATH
from prepare import recipe
from prepare.cli import main as cli
from prepare.core.utils.accelerator import NAMES
from prepare.errors import ConfigError, ModelError, RefusedError, TuneError
from prepare.pipeline import Pipeline
from prepare.report.sentences import tune_sentence
from prepare.report.terminal.tune import show_tune
from prepare.step import ModuleStep
from prepare.tune import CandidateResult, Tuning, candidate_run, session, tune
from prepare.tune import cache as caching
from prepare.tune.candidate_run import PreparedCandidate
from prepare.tune.candidates import AS_DECLARED, Candidate, candidates
from prepare.tune.contestants import CheckResult
from prepare.tune.records import UNPREPARED
from sample_nets import model_state, small, wrong_in_training

BATCH = torch.ones(2, 3, 12, 12)


# ------------------------------------------------------------------------------ whole tunings


@pytest.fixture
def timed(monkeypatch):
    """Set the time of a call of each candidate, by name; all else is real."""
    means = {}

    class Timed(PreparedCandidate):
        def __init__(self, model, candidate, pool, **how):
            super().__init__(model, candidate, pool, **how)
            self._mean = means.get(candidate.name, 0.1)
            self._order, self.seconds = random.Random(candidate.name), 1e-3

        def turn(self, number):
            return self._mean * math.exp(self._order.gauss(0, 0.002))

    monkeypatch.setattr(session, "PreparedCandidate", Timed)
    return means


def found_with(timed, means, model, batch=BATCH, **how):
    timed.update(means)
    return tune(model, batch, **({"cache": False, "budget": 5.0} | how))


def test_a_tuning_has_a_pipeline_a_recipe_and_a_row_per_candidate(timed, tmp_path):
    model = small().eval()
    found = found_with(timed, {"channels_last": 0.05}, model)
    assert (found.winner, found.mode, found.from_cache) == ("channels_last", "eval", False)
    assert found.rows[0].name == found.winner
    assert found.row("channels_last").verified == "pass"
    assert found.row("channels_last").error <= found.row("channels_last").allowed
    assert found.row(UNPREPARED).ratio == 1.0
    assert found.row("channels_last").ratio == pytest.approx(0.5, rel=0.02)
    assert found.recipe == {"conv2d_memory_format": {
        "memory_format": "channels_last", "include": [], "exclude": []}}  # fmt: skip
    found.pipeline.save(tmp_path / "recipe.yaml")
    assert recipe.load(tmp_path / "recipe.yaml") == found.recipe
    assert found.table.splitlines()[0].startswith("channels_last ")
    assert len(found.table.splitlines()) == len(found.rows)
    assert not found.pipeline.plan(found.pipeline.apply(model))


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_tuning_leaves_the_model_and_global_state_unchanged(timed, mode):
    model = wrong_in_training()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before, state, training = model_state(model), torch.get_rng_state(), model.training
    kinds = [type(module) for module in model.modules()]
    found_with(timed, {}, model, mode=mode)
    assert model_state(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.training, [type(m) for m in model.modules()]) == (training, kinds)
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))


@pytest.mark.parametrize("at", [1, 4, 9])
def test_an_interrupt_leaves_the_model_and_the_cache_unchanged(timed, monkeypatch, at, tmp_path):
    model, calls = wrong_in_training(), []
    before, kinds = model_state(model), [type(module) for module in model.modules()]
    plain = session.PreparedCandidate.turn

    def interrupted(self, number):
        calls.append(number)
        if len(calls) == at:
            raise KeyboardInterrupt
        return plain(self, number)

    monkeypatch.setattr(session.PreparedCandidate, "turn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(model, BATCH, cache=tmp_path / "cache", budget=2.0)
    assert (model_state(model), [type(m) for m in model.modules()]) == (before, kinds)
    assert not list(tmp_path.rglob("*"))


def test_a_layout_with_wrong_gradients_does_not_win_in_training(timed):
    torch.manual_seed(0)
    batch = torch.randn(1, 3, 16, 16)
    fast = {"channels_last": 0.01, "channels_last + input": 0.01, "channels_last + repair": 0.05}
    found = found_with(timed, fast, wrong_in_training(), batch, mode="train")
    assert found.winner == "channels_last + repair"
    assert found.row("channels_last").status == "failed"
    assert "gives wrong gradients" in found.row("channels_last").reason


def test_a_recipe_with_wrong_outputs_does_not_win(timed, plugin):
    @plugin("bends")
    class Bends(ModuleStep):
        """Replace the activation."""

        def targets(self, model):
            return (name for name, module in model.named_modules() if type(module) is nn.ReLU)

        def rewrite(self, model, name):
            return {name: nn.Tanh()}

    declared = {"bends": {}}
    found = found_with(timed, {AS_DECLARED: 0.01}, small().eval(), declared=declared)
    lost = found.row(AS_DECLARED)
    assert (found.winner, lost.status, lost.verified) == (UNPREPARED, "wrong", "fail")
    assert lost.error > lost.allowed


def test_bfloat16_wins_where_allowed_fast_and_correct(timed):
    found = found_with(timed, {"bfloat16": 0.03}, small().eval(), allow=["bfloat16"])
    assert found.winner == "bfloat16"
    assert found.pipeline.apply(small())(BATCH).dtype == torch.bfloat16


class Pools(nn.Module):
    def forward(self, x):
        return nn.functional.avg_pool3d(x, 2)


def test_a_candidate_that_raises_has_the_reason(timed):
    model = nn.Sequential(nn.Conv3d(1, 2, 3), Pools())
    found = found_with(timed, {}, model, torch.ones(1, 1, 8, 8, 8), allow=["bfloat16"])
    lost = found.row("bfloat16")
    assert lost.status == "failed"
    assert "not implemented for 'BFloat16'" in lost.reason
    assert found.row(UNPREPARED).status == "winner"


def test_progress_names_the_stage_the_leader_and_the_time_left(timed):
    from contextlib import contextmanager

    said = []

    @contextmanager
    def progress(text):
        said.append(text)
        yield

    found_with(timed, {"channels_last": 0.05}, small().eval(), progress=progress)
    assert said[0] == "trying unprepared; 5 s left"
    assert any(
        text.startswith("verifying channels_last; best so far channels_last (0.50 of")
        for text in said
    )
    assert said[-1].endswith(" s left")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"allow": ["fp16"]}, "tune.allow: 'fp16' is not allowed; did you mean 'half'? allowed: bfloat16, half, compile, openvino"),
        ({"allow": "bfloat"}, "tune.allow: 'bfloat' is not allowed; did you mean 'bfloat16'? allowed: bfloat16, half, compile, openvino"),
        ({"budget": 0}, "tune.budget: 0.0 is not a time; give seconds, as in 60"),
        ({"budget": math.inf}, "tune.budget: inf is not a time; give seconds, as in 60"),
        ({"allow": ["half"], "mode": "train"}, 'allow: parameters in float16 cannot be trained, and this is mode="train"; allow bfloat16, or tune under autocast with amp="float16"'),
        ({"allow": ["openvino"], "mode": "train"}, 'allow: OpenVINO is for inference, and this is mode="train"; allow compile'),
        ({"mode": "test"}, "mode: 'test' is not a mode; allowed: eval, train"),
    ],
)  # fmt: skip
def test_an_invalid_argument_is_reported_with_its_remedy(how, message):
    with pytest.raises((ConfigError, RefusedError)) as error:
        tune(small(), BATCH, **how)
    assert str(error.value) == message


def test_a_model_that_cannot_be_tuned_is_refused():
    with pytest.raises(RefusedError, match="lazy module"):
        tune(nn.LazyConv2d(3, 3), BATCH)
    with pytest.raises(RefusedError, match="meta holds no data"):
        tune(nn.Conv2d(3, 3, 3, device="meta"), BATCH)
    with pytest.raises(RefusedError, match="inference_mode"), torch.inference_mode():
        tune(small(), BATCH)
    with pytest.raises(ModelError, match="the unprepared model: forward of 0"):
        tune(small(), torch.ones(2, 5, 12, 12), cache=False)
    stubborn = small()
    stubborn.handle = sys.stdout
    with pytest.raises(RefusedError, match="cannot be copied"):
        tune(stubborn, BATCH)


def test_all_candidates_use_the_turn_plan_of_the_baseline(monkeypatch):
    plans = []
    plain = PreparedCandidate._timed

    def timed(self, batch, plan):
        plans.append(plan)
        return plain(self, batch, plan)

    monkeypatch.setattr(PreparedCandidate, "_timed", timed)
    tune(small(), BATCH, budget=0.5, cache=False)
    assert len({plan for plan in plans if plan.warm}) == 1


@pytest.mark.parametrize(("budget", "seconds"), [(2.0, 30.0), (90.0, 90.0)])
def test_a_verification_may_take_as_long_as_the_tuning(monkeypatch, budget, seconds):
    given, check_model = [], candidate_run.check_model

    def told(*args, **how):
        given.append(how["seconds"])
        return check_model(*args, **how)

    monkeypatch.setattr(candidate_run, "check_model", told)
    candidate, model = Candidate("flat", {"conv2d_memory_format": {}}), small().eval()
    runner = PreparedCandidate(model, candidate, [BATCH], mode="eval", clock=time.perf_counter)
    assert runner.check(model, BATCH, {}, budget=budget).status == "pass"
    assert given == [seconds]


# ------------------------------------------------------------------------------ the cache


def test_a_cached_winner_is_verified_again(timed, tmp_path):
    how = {"cache": tmp_path}
    first = found_with(timed, {"channels_last": 0.05}, small().eval(), **how)
    again = found_with(timed, {"channels_last": 0.5}, small().eval(), **how)
    assert (first.from_cache, again.from_cache) == (False, True)
    assert (again.winner, again.made, again.rows[1:]) == (first.winner, first.made, first.rows[1:])
    assert again.notes[0].startswith("from the cache, and verified again: measured ")
    assert " ago, on " in again.notes[0]
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


OTHERS = {
    "another batch size": {"batch": BATCH[:1]},
    "another dtype": {"batch": BATCH.double()},
    "another layout of the input": {"batch": BATCH.to(memory_format=torch.channels_last)},
    "more time": {"budget": 6.0},
    "more allowed": {"allow": ["bfloat16"]},
    "training": {"mode": "train"},
    "something declared": {"declared": {"half": {"dtype": "bfloat16"}}},
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_cache_holds_only_for_the_same_conditions(timed, tmp_path, name):
    how = {"cache": tmp_path, "budget": 1.0}
    model = small().double() if "dtype" in name else small()
    found_with(timed, {}, small().eval(), **how)
    assert not found_with(timed, {}, model.eval(), **(how | OTHERS[name])).from_cache


def test_conditions_include_the_machine_and_the_structure(monkeypatch):
    found = candidates(small(), declared={}, allow=(), mode="eval")

    def conditions(model=None):
        return caching.conditions(model or small(), BATCH, found, mode="eval", amp="none")

    before = conditions()
    assert conditions() == before
    wider = nn.Sequential(nn.Conv2d(3, 9, 3))
    padded = small()
    padded[0].padding = (1, 1)
    lies = small().to(memory_format=torch.channels_last)
    assert all(conditions(model) != before for model in (wider, padded, lies))
    with monkeypatch.context() as patched:
        patched.setattr(
            "prepare.core.utils.environment._instructions", lambda described: ["another"]
        )
        assert conditions() != before  # a processor of the same name, with other instructions
    assert conditions() == before
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert conditions() != before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cudnn": "9.10.2"}, "cuDNN was none, now 9.10.2"),
        ({"cuda": "12.8"}, "CUDA was none, now 12.8"),
        ({"driver": "580.1"}, "driver was none, now 580.1"),
        ({"architectures": ["sm_86"]}, "architecture was none, now sm_86"),
        ({"hip": "7.0"}, "HIP was none, now 7.0"),
        ({"macos": "26.7"}, "macOS was none, now 26.7"),
    ],
)
def test_a_stale_tuning_is_measured_again_and_says_why(timed, tmp_path, monkeypatch, change, says):
    without = {"backend": "cpu", **dict.fromkeys(NAMES)}
    monkeypatch.setattr("prepare.core.utils.environment.accelerator", lambda: without)
    found_with(timed, {}, small().eval(), cache=tmp_path)
    assert found_with(timed, {}, small().eval(), cache=tmp_path).from_cache
    now = without | change
    monkeypatch.setattr("prepare.core.utils.environment.accelerator", lambda: now)
    again = found_with(timed, {}, small().eval(), cache=tmp_path)
    assert not again.from_cache
    (note,) = [note for note in again.notes if "is stale" in note]
    assert note.endswith(says)
    assert found_with(timed, {}, small().eval(), cache=tmp_path).from_cache


def test_a_cached_winner_that_fails_is_measured_again(timed, tmp_path, monkeypatch):
    how = {"cache": tmp_path}
    found_with(timed, {"channels_last": 0.05}, small().eval(), **how)
    monkeypatch.setattr(
        session.PreparedCandidate, "check", lambda *_, **__: CheckResult("fail", "outputs: off")
    )
    again = found_with(timed, {}, small().eval(), **how)
    assert (again.from_cache, again.winner) == (False, UNPREPARED)
    assert "the cached winner channels_last was not used: outputs: off" in again.notes


def test_an_unusable_cache_is_a_note_not_an_error(timed, tmp_path):
    how = {"cache": tmp_path, "budget": 1.0}
    found_with(timed, {}, small().eval(), **how)
    (file,) = tmp_path.iterdir()
    file.write_text("{")
    found = found_with(timed, {}, small().eval(), **how)
    assert not found.from_cache
    assert [note for note in found.notes if "the cache was not used" in note]
    blocked = tmp_path / "file"
    blocked.write_text("")
    found = found_with(timed, {}, small().eval(), **(how | {"cache": blocked / "folder"}))
    assert found.notes[-1].startswith("the result was not cached: ")
    assert (
        found_with(timed, {}, small().eval(), **(how | {"cache": False})).notes[-1:]
        != found.notes[-1:]
    )


def test_the_cache_is_in_the_cache_folder_of_the_system(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert caching.default_folder() == tmp_path / "prepare" / "tune"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert caching.default_folder() == tmp_path / ".cache" / "prepare" / "tune"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 seconds ago"), (61, "1 minute ago"), (7300, "2 hours ago"), (200000, "2 days ago")],
)
def test_the_age_of_a_tuning_is_shown_in_words(seconds, words):
    from datetime import datetime, timedelta

    assert (
        caching.age((datetime.now().astimezone() - timedelta(seconds=seconds)).isoformat()) == words
    )


# ------------------------------------------------------------------------------ the record


def record(**changes):
    steps = {"half": {"dtype": "bfloat16", "keep": []}}
    rows = (
        CandidateResult(name="bfloat16", steps=steps, status="winner", reason="takes 0.50 of the time", cost=4,
            seconds=0.05, ratio=0.5, ratio_interval=(0.48, 0.52), rounds=20, verified="pass", error=1e-3,
            allowed=1e-2),
        CandidateResult(name=UNPREPARED, steps={}, status="slower", reason="takes 2.00 times as long", cost=0,
            seconds=0.1, ratio=1.0, rounds=20, error=0.0),
        CandidateResult(name="[red]compile", steps={}, status="not measured", reason="no time", cost=6),
    )  # fmt: skip
    whole = {
        "rows": rows, "winner": "bfloat16", "mode": "eval", "allow": ("bfloat16",), "budget": 60.0,
        "seconds": 12.0, "rounds": 20, "noise": 1.02, "made": "2026-01-01T00:00:00+00:00",
        "from_cache": False, "conditions": {}, "environment": {}, "notes": ("mind this",),
    }  # fmt: skip
    return Tuning(**(whole | changes))


def test_a_tuning_survives_saving_and_loading(tmp_path):
    record().save(tmp_path / "tune.json")
    assert Tuning.load(tmp_path / "tune.json") == record()


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"format": "prepare.bench"}, "this is a prepare.bench, not a prepare.tune"),
        ({"version": 2}, "version 2 is not known here"),
        ({"winner": "nobody"}, "this is not a tuning: KeyError: 'nobody'"),
        ({"rows": [{}]}, "this is not a tuning: ValueError: the keys are"),
        ({"more": 1}, "this is not a tuning: ValueError: the keys are"),
        ({"rows": 3}, "this is not a tuning: TypeError"),
    ],
)
def test_a_file_that_is_not_a_tuning_is_refused_with_the_reason(tmp_path, change, wrong):
    path = tmp_path / "tune.json"
    record().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(TuneError) as error:
        Tuning.load(path)
    assert wrong in str(error.value)


def test_an_unknown_status_is_refused(tmp_path):
    path = tmp_path / "tune.json"
    record().save(path)
    path.write_text(path.read_text().replace('"slower"', '"sluggish"'))
    with pytest.raises(TuneError, match="'sluggish' is not a status"):
        Tuning.load(path)


def test_the_terminal_shows_every_candidate_and_its_reason(capsys):
    show_tune(record(), "runs/1/tune.json")
    out = capsys.readouterr().out
    assert tune_sentence(record()) in out
    for text in ("2.0x faster", "-52 to -48 %", "slower than the winner", "[red]compile: not measured: no time", "note: mind this",
                 "20 rounds in 12.0 s; differences below 2.0 % are noise", "runs/1/tune.json"):  # fmt: skip
        assert text in out


# ------------------------------------------------------------------------------ the command line


TUNE = ("model._target_=sample_nets.small", "input.shape=[2,3,12,12]", "device=cpu", "bench=none")


@pytest.fixture
def go(tmp_path, monkeypatch, capsys):
    """Run task=tune in an empty folder, in this process; return the folder and the output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*argv, code=0):
        own = ("task=tune", "hydra.run.dir=run", "overwrite=true", f"tune.cache={tmp_path}/kept")
        assert cli.run([*TUNE, *own, *argv]) == code
        return tmp_path / "run", capsys.readouterr()

    return run


def test_the_winner_is_applied_audited_and_recorded(timed, go):
    timed.update({"channels_last + input": 0.05})
    folder, said = go("tune.budget=5")
    found = Tuning.load(folder / "tune.json")
    assert found.winner == "channels_last + input"
    assert recipe.load(folder / "recipe.yaml") == found.recipe
    assert (
        json.loads((folder / "audit.json").read_text())["summary"]["convolutions"]["converted"] == 2
    )
    assert json.loads((folder / "verify.json").read_text())["status"] == "pass"
    assert "tune (inference): channels_last + input: 2.0x faster (50 % less time" in said.out
    assert "Sequential is prepared: device cpu, conv2d_memory_format channels_last" in said.out
    page = (folder / "report.html").read_text()
    assert '<section id="tune"' in page
    assert all(row.name in page for row in found.rows)
    assert "Speed against error" in page
    again = Pipeline.load(folder / "recipe.yaml")
    assert again.to_config() == found.recipe
    assert not again.plan(again.apply(small().eval()))


def test_the_options_of_the_command_line_reach_the_tuning(timed, go):
    timed.update({"bfloat16": 0.03})
    folder, said = go("tune.budget=4", "tune.allow=[bfloat16]", "memfmt=contiguous")
    found = Tuning.load(folder / "tune.json")
    assert (found.winner, found.budget, found.allow) == ("bfloat16", 4.0, ("bfloat16",))
    assert found.row(AS_DECLARED).steps["conv2d_memory_format"]["memory_format"] == "contiguous"
    assert all("device" in row.steps for row in found.rows)
    assert [path.suffix for path in (folder.parent / "kept").iterdir()] == [".json"]
    _, said = go("tune.budget=4", "tune.allow=[bfloat16]", "memfmt=contiguous")
    assert "note: from the cache, and verified again: measured" in said.out
    folder, _ = go("tune.budget=1", "mode=train", "model._target_=sample_nets.Net")
    assert Tuning.load(folder / "tune.json").mode == "train"


def test_tuning_needs_an_example_input(go):
    _, said = go("input.shape=null", code=2)
    assert "input: task=tune needs an example input; give one with input.shape=[...]" in said.err


# ------------------------------------------------------------------------------ several ranks

RANK = """
import sys
import torch
import torch.distributed as dist
from prepare import tune as module
from prepare.errors import RefusedError
from prepare.tune.session import TuningSession
from sample_nets import small

rank, file, wrong = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "wrong"
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
if rank:
    TuningSession.run = None  # only rank 0 may measure
torch.manual_seed(rank)
try:
    found = module.tune(small(), torch.ones(2, 2 if wrong else 3, 12, 12), budget=0.5, cache=False)
    print(found.winner, found.seconds, sorted(found.recipe))
except Exception as error:
    print(type(error).__name__, error)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["right", pytest.param("wrong", marks=pytest.mark.slow)])
def test_rank_0_decides_for_all_ranks(tmp_path, how):
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), how], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": PYTHONPATH},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    first, second = (out for out, _ in said)
    if how == "right":
        assert first == second != ""
    else:
        assert first.startswith("ModelError the unprepared model: forward of 0")
        assert second.startswith("RefusedError rank 0: the unprepared model: forward of 0")


# ------------------------------------------------------------------------------ real tunings


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_real_tuning_finds_a_correct_winner(mode):
    found = tune(small(), BATCH, mode=mode, allow=["bfloat16"], budget=1.0, cache=False)
    assert found.rows[0].status == "winner"
    assert found.rows[0].verified in (["", "pass"] if found.winner == UNPREPARED else ["pass"])
    model = found.pipeline.apply(small().train(mode == "train"))
    assert model(BATCH).shape == (2, 4, 8, 8)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_real_tuning_runs_compilers(mode):
    found = tune(small(), BATCH, mode=mode, allow=["compile"], budget=60.0, cache=False)
    compiled = [row for row in found.rows if "compile" in row.steps and row.rounds]
    assert compiled
    assert {row.status for row in compiled} <= {"winner", "slower", "not faster"}


# ------------------------------------------------------------------------------ autocast


def test_a_tuning_is_of_its_autocast_and_its_key_holds_it(timed, tmp_path):
    found = [
        found_with(timed, {}, small(), cache=str(tmp_path), amp=amp)
        for amp in ("none", "bfloat16", "bfloat16")
    ]
    assert [tuning.amp for tuning in found] == ["none", "bfloat16", "bfloat16"]
    assert [tuning.from_cache for tuning in found] == [False, False, True]
    keys = [tuning.conditions["amp"] for tuning in found]
    assert keys == ["none", "bfloat16", "bfloat16"]


def test_candidates_for_autocast_avoid_the_known_issues_of_its_dtype():
    model = nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU()).train()

    def found(amp):
        return candidates(model, declared={}, allow=(), mode="train", amp=amp)

    assert all("repair_layout" in each.steps for each in found("bfloat16")[1:])
    assert not all("repair_layout" in each.steps for each in found("none")[1:])


def test_a_tuning_refuses_an_unknown_amp():
    with pytest.raises(RefusedError, match="amp: 'half' is not allowed"):
        tune(small(), BATCH, amp="half")


# ------------------------------------------------------------------------------ the user's own limits


def test_a_recipe_whose_metric_drops_too_much_cannot_win(timed):
    def plain(model, batch):
        return float(model[0].weight.is_contiguous())

    means = {"channels_last": 0.01, "channels_last + input": 0.01}
    found = found_with(timed, means, small().eval(), metric=plain, max_drop=0.5)
    assert found.winner == UNPREPARED
    assert found.row("channels_last").status == "wrong"
    assert "metric: plain 1 on the unprepared model, 0 on" in found.row("channels_last").reason
    assert found.conditions["max_drop"] == 0.5
    assert found.conditions["metric"].endswith("plain")


def test_a_recipe_that_needs_too_much_memory_is_dropped(timed, monkeypatch):
    means = {"channels_last": 0.01}
    monkeypatch.setattr(candidate_run.Variant, "peak", lambda *_: (2**31, ""))
    found = found_with(timed, means, small().eval(), max_memory="1GiB")
    assert found.winner == UNPREPARED
    row = found.row("channels_last")
    assert (row.status, row.reason) == (
        "failed",
        "a call needs 2.0 GiB, and max_memory is 1.0 GiB",
    )
    assert found.conditions["max_memory"] == 2**30
    assert found_with(timed, means, small().eval(), max_memory="3GiB").winner == "channels_last"


@pytest.mark.parametrize("wrong", ["lots", 0, True])
def test_a_memory_limit_that_is_not_a_size_is_refused(wrong):
    with pytest.raises(ConfigError, match="max_memory: "):
        tune(small(), BATCH, max_memory=wrong)


# ------------------------------------------------------------------------------ the first call


def test_the_first_call_counts_where_the_number_of_calls_is_known(monkeypatch):
    def slow_first_call(self, plan, *, real=PreparedCandidate._warm_up):
        real(self, plan)
        prepared = "conv2d_memory_format" in self.pipeline.steps
        self.first_seconds = 100.0 if prepared else 0.0

    def timed_by_recipe(self, batch, plan):
        return 0.01 if "conv2d_memory_format" in self.pipeline.steps else 0.1

    monkeypatch.setattr(PreparedCandidate, "_warm_up", slow_first_call)
    monkeypatch.setattr(PreparedCandidate, "_timed", timed_by_recipe)
    often, rarely = (
        tune(small().eval(), BATCH, cache=False, budget=2.0, calls=calls) for calls in (10**6, 10)
    )
    assert often.winner != UNPREPARED
    assert rarely.winner == UNPREPARED
    assert rarely.row("channels_last").first_seconds == 100.0
    assert rarely.row("channels_last").seconds == pytest.approx(10.01)
    assert (often.conditions["calls"], rarely.conditions["calls"]) == (10**6, 10)


def test_a_number_of_calls_below_one_is_refused():
    with pytest.raises(ConfigError, match="calls: 0 is not a number of calls; give one from 1 on"):
        tune(small(), BATCH, calls=0)
