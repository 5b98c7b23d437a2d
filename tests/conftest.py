"""Setup of every test: one thread, fixed random numbers, and no network beyond this machine."""

import gc
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

# Threads of torch that wait without spinning leave the cores to other test processes. libgomp reads this
# when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import torch

from prepare.core.utils.packages import switch_off_telemetry
from prepare.registry import STEPS, register

# `nohup`, and `&` in a script, let a process and its children ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# One thread, so that parallel test processes do not fight over cores.
torch.set_num_threads(1)
switch_off_telemetry()
# OpenVINO reports each import to its makers; without this package it does not.
sys.modules.setdefault("openvino_telemetry", None)
# The processes that tests start refuse the network too: they import `sitecustomize` from there.
NO_NETWORK = str(Path(__file__).parent / "support" / "no_network")
REFUSED = Path(tempfile.mkdtemp(prefix="prepare-tests-")) / "refused"
REFUSED.touch()
os.environ["PREPARE_TESTS_REFUSED"] = str(REFUSED)
# No test reads or writes what the user's own tunings have stored.
os.environ["XDG_CACHE_HOME"] = str(REFUSED.with_name("cache"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), NO_NETWORK]))
sys.path.append(NO_NETWORK)
import sitecustomize  # noqa: E402, F401

# A package with tests of its own, which test_testing.py runs where it is installed.
collect_ignore = ["example_plugin", "example_stage"]


# Processor seconds of the tests that are not quick: its own, and those of the processes that it starts.
DURATIONS = Path(__file__).with_name("durations.json")
QUICK, PROCESS = 0.2, 0.05
# Fixtures that start processes: which test pays for them depends on which comes first.
STARTS = {"ranks", "installed", "wheel", "site"}
# One test of each promise stays in the quick tier, although it is dear or starts a process.
SMOKE = (
    "tests/checkpoint/test_checkpoint.py::test_loading_gives_the_same_tensors_as_apply",
    "tests/cli/test_one_job.py::test_the_main_job_prepares_audits_and_leaves_its_record",
    "tests/core/test_unchanged.py::test_random_models_with_state_are_as_before",
    "tests/flow/test_flow_prediction.py::test_a_predicted_flow_equals_the_observed_one[unet3d]",
    "tests/pipeline/test_equality.py::test_half_and_both_formats_equal_torchs_own_calls",
    "tests/pipeline/test_random_models.py::",
    "tests/pipeline/test_random_special_tensors.py::",
    "tests/pipeline/test_undo.py::test_a_failure_at_any_torch_operation_leaves_the_model_as_it_was",
    "tests/steps/test_keeping_forms.py::test_replaced_calls_do_what_torchs_do_in_every_form",
    "tests/sweep/test_isolation.py::test_a_failing_job_is_reported_and_leaves_the_others_alone",
    "tests/sweep/test_resume.py::test_resume_repeats_only_jobs_that_did_not_end_well",
    "tests/test_docs.py::test_the_code_of_the_readme_runs",
    "tests/test_house.py::",
    "tests/tune/test_tune.py::test_of_recipes_that_are_as_fast_the_simplest_wins",
)
# What torch 2.5 cannot do: it lacks the kernel or the dtype, or its compiler and its export know less.
NOT_IN_2_5 = {
    "test_a_compiled_module_is_one_operation_with_a_note[observe]",
    "test_a_compiled_module_is_one_operation_with_a_note[predict]",
    "test_a_program_runs_as_without_us_and_is_prepared[traced]",
    "test_applying_loads_no_compiler_and_no_distributed_training",
    "test_float_dtypes_are_cast_as_model_and_pipeline_require[w.safetensors]",
    "test_patterns_hold_in_a_compiled_call",
    "test_the_error_is_at_most_that_of_torchs_kernel[pointwise-dtype2-8]",
}
STARTED = pytest.StashKey()
MEASURED = {}


def pytest_addoption(parser):
    parser.addoption("--durations-json", action="store_true", help=f"write {DURATIONS.name}")


def pytest_xdist_auto_num_workers(config):
    """Return none for a part of the tests: it is done before the workers have started."""
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return 0
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark what is too dear for each change, by what was measured; a test that is not in the list is quick."""
    measured = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    for item in items:
        if item.name in NOT_IN_2_5 and torch.__version__ < "2.6":
            item.add_marker(pytest.mark.skip(reason="torch 2.5 cannot do it"))
        own, children = measured.get(item.nodeid, (0.0, 0.0))
        if item.nodeid.startswith(SMOKE):
            continue
        if children >= PROCESS or STARTS & {*item.fixturenames}:
            item.add_marker("process")
        elif own >= QUICK:
            item.add_marker("heavy")


def processor_seconds():
    """Return the processor seconds of this process, and of those that it has started, dead or alive."""
    own = os.times()
    children = own.children_user + own.children_system
    for process in psutil.Process().children(recursive=True):
        try:
            children += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:  # since it was listed
            continue
    return own.user + own.system, children


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if item.config.getoption("durations_json"):
        item.stash[STARTED] = processor_seconds()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    if call.when == "teardown" and STARTED in item.stash:
        spent = zip(processor_seconds(), item.stash[STARTED], strict=True)
        item.user_properties.append(("processor_seconds", [round(b - a, 2) for b, a in spent]))


def pytest_runtest_logreport(report):
    seconds = dict(report.user_properties).get("processor_seconds")
    if report.when == "teardown" and seconds:
        MEASURED[report.nodeid] = seconds


def pytest_sessionfinish(session):
    """Replace what the file says of the tests that ran, where workers send their reports to."""
    if not MEASURED or hasattr(session.config, "workerinput"):
        return
    whole = session.config.args_source is pytest.Config.ArgsSource.TESTPATHS
    before = {} if whole or not DURATIONS.exists() else json.loads(DURATIONS.read_text())
    dear = {k: v for k, v in MEASURED.items() if sum(v) >= QUICK or v[1] >= PROCESS}
    kept = {k: v for k, v in before.items() if k not in MEASURED}
    lines = [f"  {json.dumps(k)}: {v}" for k, v in sorted({**kept, **dear}.items())]
    DURATIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def pytest_collection_finish():
    """Leave what has been imported out of garbage collections, which take a fifth of the time otherwise."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _same_logs():
    """Close the logs of runs in this process, and restore what Hydra has changed in its loggers."""
    loggers = [logging.getLogger(name) for name in ("", "prepare", "hydra")]
    before = [(log, log.handlers[:], log.level, log.propagate) for log in loggers]
    yield
    for log, handlers, level, propagate in before:
        for opened in set(log.handlers) - set(handlers):
            opened.close()
        log.handlers[:], log.propagate = handlers, propagate
        log.setLevel(level)


@pytest.fixture(autouse=True)
def _nothing_is_sent():
    before = REFUSED.stat().st_size
    yield
    refused = REFUSED.read_text()[before:]
    assert not refused, f"tried to reach another machine: {refused}"


@pytest.fixture
def plugin():
    """`register`, for steps of one test only."""
    before = {name: STEPS[name] for name in STEPS}
    yield register
    STEPS._classes.clear()
    STEPS._classes.update(before)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    import made

    return made.formats_by_precisions(tmp_path_factory.mktemp("made") / "swept")


@pytest.fixture
def swept(made_once, tmp_path):
    """Return the folder of a made-up sweep, a copy for this test."""
    return Path(shutil.copytree(made_once, tmp_path / "swept"))
