"""Files that want to hang or fill who reads them: each is read or refused in a line, soon and in little memory."""

import json
import os
import random
import resource
import signal
import struct
import traceback
import zipfile
from contextvars import copy_context
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn

from failing_operations import first_middle_and_last, interrupt_at
from made import tuning, write_run
from mutations import places
from prepare import checkpoint, recipe
from prepare.app.cli.replay import _configuration
from prepare.app.job.outcome import failure
from prepare.app.job.record import Job, Record, Result
from prepare.app.job.results import read_plan, read_results, record_classes
from prepare.app.job.settings import read_settings
from prepare.app.report.compare_runs import read_differences
from prepare.app.sweep import locks
from prepare.app.sweep.manifest import SweepManifest, read_sweep_manifest, write_sweep_manifest
from prepare.audit import Audit, audit
from prepare.core.forward.explain_error import explained
from prepare.core.forward.workload import Size, place
from prepare.core.utils import files
from prepare.core.utils.machine import disturbed_part
from prepare.core.utils.options import read_size
from prepare.core.utils.text import csv_text
from prepare.errors import ConfigError, PrepareError
from prepare.pipeline import Pipeline
from prepare.stages.tune.cache import Cache, age

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="asks for limits and /proc of Linux"
)

SECONDS, MEMORY = 1, 300 << 20
STEPS = {
    "half": {"dtype": "bfloat16", "keep": ["re:1.*", "type:Conv?d"]},
    "conv2d_memory_format": {},
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1))


def _recipe(folder):
    Pipeline.from_config(STEPS).save(folder / "recipe.yaml")
    return "recipe.yaml", lambda path: Pipeline.from_recipe(recipe.load(path))


def _audit(folder):
    audit(net()).save(folder / "audit.json")
    return "audit.json", Audit.load


def _result(folder):
    Record(folder).write_result(Result("ok"))
    return "result.json", lambda path: Record(path.parent).result()


def _sweep(folder):
    write_sweep_manifest(folder, SweepManifest("a", [["seed=0"], ["seed=1"]], ["b", None]))
    return "sweep.json", lambda path: read_sweep_manifest(path.parent)


def _weights(folder, name, mutated):
    checkpoint.save(net(), folder / name, pipeline=Pipeline.from_config(STEPS))
    return mutated, lambda path: checkpoint.load(path.with_name(name), net)


def _index(folder):
    checkpoint.save(net(), folder / "a.safetensors")
    data = {"metadata": {}, "weight_map": dict.fromkeys(net().state_dict(), "a.safetensors")}
    (folder / "a.safetensors.index.json").write_text(json.dumps(data))
    return "a.safetensors.index.json", lambda path: checkpoint.load(path, net)


def composed(_words):
    raise ConfigError("model", "is not composed here")


def _bundle(folder, name):
    audit(net()).save(folder / "audit.json")
    Record(folder).write_job(Job(None, None, [], {"model": "custom"}))
    Record(folder).write_result(Result("ok"))
    _recipe(folder)
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "config.yaml").write_text(
        "model:\n  _target_: a.b\n  method: null\ninput:\n  shape: [1, 2]\n"
    )

    def read(path):
        where = path.parents[1] if ".hydra" in name else path.parent
        read_differences(where, where)
        _configuration(where, {}, SimpleNamespace(groups={"model": ["custom"]}, compose=composed))

    return name, read


def _of_run(folder, file):
    write_run(folder / "run")
    read = record_classes()[file].load if file in record_classes() else read_plan
    if file == "environment.json":
        read = read_results
    return f"run/{file}", lambda path: read(
        path if read not in (read_plan, read_results) else path.parent
    )


def _options(folder):
    inputs = {
        "workload": [{"shape": [1, 2, 3, 3], "weight": 3}, {"x": {"shape": [2], "kind": "randint"}}]
    }
    data = {
        "model": {"_target_": "a.b", "depth": 3},
        "input": inputs,
        "steps": STEPS,
        "seed": 0,
        "fail_on": [],
    }
    data |= {
        "bench": {"budget": 2.0},
        "verify": {"level": "short"},
        "tune": {"allow": ["bfloat16"]},
        "strict": True,
    }
    (folder / "options.json").write_text(json.dumps(data))

    def read(path):
        settings = read_settings(json.loads(path.read_bytes()), choices={"model": "custom"})
        Pipeline.from_config(settings.steps)

    return "options.json", read


def _cached_tuning(folder):
    path = Cache(str(folder))._path(tuning().conditions)
    tuning().save(path)

    def read(path):
        cache, known = Cache(str(path.parent)), tuning().conditions
        cache.find(known, budget=1.0)
        cache._note_stale(path, known)
        assert all(map(str.isprintable, cache.notes))

    return path.name, read


KINDS = {
    "recipe": _recipe,
    "audit": _audit,
    "result": _result,
    "sweep": _sweep,
    "manifest": lambda folder: _weights(folder, "a.safetensors", "a.safetensors.json"),
    "index": _index,
    "safetensors": lambda folder: _weights(folder, "a.safetensors", "a.safetensors"),
    "pt": lambda folder: _weights(folder, "a.pt", "a.pt"),
    "bundle": lambda folder: _bundle(folder, ".hydra/config.yaml"),
    "bundled job": lambda folder: _bundle(folder, "job.json"),
    "options": _options,
    "cached tuning": _cached_tuning,
    **{file: partial(_of_run, file=file) for file in (*record_classes(), "plan.json", "environment.json")},
}  # fmt: skip

# Pieces that a reader may take for much more than they are.
TEXTS = [
    b"[", b"{", b"{},", b"[],", b'{"a":', b'{"a":{}},', b'"', b"\\", b"9", b"1e9,", b"- ", b"  ", b"? ", b"!!set ", b"<<: ", b"'",
    b"\n", b"\t", b": ", b"a: &a [*a,*a]\n", b"&a ", b"*a ", b"|\n", b"%", b"#", b"\xf0\x9f\x98\x80", b"\\ud83d", b"-", b"(", b"(?#",
    b"re:(a*)*", b"type:", b"*", b"?", b"\0", b"\xff", b",", b"0x", b".", b"e", b"${", b"_target_: ", b"null,", b"nan,",
]  # fmt: skip
PICKLED = [b")", b"]", b"}", b"(", b"h\0h\0\x86q\0", b"h\1\x86q\1", b"h\1h\1h\1\x87q\1", b"K\1", b"s", b"u", b"t", b"R", b"]a", b"2",
           b"X\xff\xff\xff\x7f", b"\x8a\xff", b"N", b"e", b"Q", b"q\0", b"\x8f", b"\x90"]  # fmt: skip


HOSTILE = [
    10**3000, -1, 1 << 70, 1e308, float("nan"), True, None, [], {}, "", "\0", "\x1b[2J\nb", "\ud800", "=1+1", "9" * 5000, "2026-13-45",
    "re:(a+)+b", "re:" + "(a?)" * 40 + "a" * 40, "re:" + "(" * 5000, "*a" * 5000, "[" * 100_000, "type:" + "[a" * 5000, "a" * 2_000_000,
    "${a}", "../../x", "/dev/zero", [0] * 100_000, ["re:a*"] * 5_000, {str(i): i for i in range(50_000)}, json.loads("[" * 500 + "]" * 500),
    json.loads('{"a":' * 500 + "1" + "}" * 500), [{"shape": [1 << 40, 1 << 40]}], {"_target_": "os.system"}, [[1, 2], [3]], 0.5,
]  # fmt: skip


def mutated(data: bytes, rng: random.Random, pieces: list[bytes]) -> bytes:
    """Return a file with flipped, removed, repeated and inserted bytes: mostly one piece, many times."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        place, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        kind = rng.randrange(5)
        if kind == 0:
            data = (
                data[:place]
                + bytes(b ^ 1 << rng.randrange(8) for b in data[place : place + 1])
                + data[place + 1 :]
            )
        elif kind == 1:
            data = data[:place] + data[end:]
        elif kind == 2:
            span = data[place : min(end, place + 60)]
            data = data[:place] + span * rng.choice([2, 100, 30_000]) + data[place:]
        else:
            piece = rng.choice(pieces) * int(10 ** rng.uniform(0, 6.5))
            data = data[:place] + piece + (data[end:] if kind == 3 else data[place:])
        data = data[: 40 << 20] or b"x"
    return data


def hostile(data: bytes, rng: random.Random) -> bytes:
    """Return a file of which one value is another, which has no place there or takes much to read."""
    tree = json.loads(data) if data[:1] == b"{" else yaml.safe_load(data)
    *above, last = rng.choice([*places(tree, ())])
    value = rng.choice(HOSTILE)
    inner = tree
    for key in above:
        inner = inner[key]
    if rng.random() < 0.1 and isinstance(value, str) and isinstance(inner, dict):
        inner[value] = inner.pop(last)
    else:
        inner[last] = value
    return json.dumps(tree).encode()


def repacked(data: bytes, rng: random.Random) -> bytes:
    """Return a torch file whose pickle is mutated, in an archive that is right."""
    folder = Path("repacked")
    folder.write_bytes(data)
    with zipfile.ZipFile(folder) as old, zipfile.ZipFile("new", "w") as new:
        for record in old.infolist():
            content = old.read(record)
            if record.filename.endswith("data.pkl"):
                content = mutated(content, rng, PICKLED)
            new.writestr(record.filename, content)
    return Path("new").read_bytes()


def variant(kind: str, data: bytes, rng: random.Random) -> bytes:
    if kind == "pt":
        return repacked(data, rng) if rng.random() < 0.8 else mutated(data, rng, PICKLED)
    if kind == "safetensors":
        length = struct.unpack("<Q", data[:8])[0]
        text = mutated(data[8 : 8 + length], rng, TEXTS)
        told = len(text) if rng.random() < 0.9 else rng.choice([0, 1 << 40, 1 << 63, length])
        return struct.pack("<Q", told) + text + data[8 + length :]
    if kind == "options" or rng.random() < 0.4:
        return hostile(data, rng)
    return mutated(data, rng, TEXTS)


def what_is_wrong(read, path: Path) -> str:
    """Return what the reading of a file has against our promises; it must end within a second of a processor."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # what it sends ends the process
    try:
        read(path)
    except PrepareError as error:
        text = str(error)
        short = len(text) < 5_000 and all(map(str.isprintable, text.split("\n")))
        return "" if short else f"{len(text)} characters: {text[:300]}"
    except BaseException:
        return traceback.format_exc()[-2000:]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return ""


def wrong_in_child(read, path: Path, numbers: range, make) -> dict[int, str]:
    """Read the files that `make` gives for the numbers in forked children, which may use 300 MB; return what is wrong."""
    report, wrong = path.with_name("report"), {}
    while numbers:
        report.touch()
        if not (child := os.fork()):
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            size = int(Path("/proc/self/statm").read_text().split()[0])
            most = size * os.sysconf("SC_PAGE_SIZE") + MEMORY
            with report.open("a", buffering=1) as out:
                for number in numbers:
                    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
                    path.write_bytes(make(number))
                    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
                    print(number, file=out)
                    said = what_is_wrong(read, path)
                    print(json.dumps(said), file=out)
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        *lines, last = report.read_text().split("\n")
        assert not last
        said = [json.loads(line) for line in lines]
        report.unlink()
        wrong |= {said[i]: said[i + 1] for i in range(0, len(said) - 1, 2) if said[i + 1]}
        if ended:
            assert len(said) % 2, f"it ended between two files: {ended}"
            wrong[said[-1]] = (
                "it was killed: more than a second" if ended == -signal.SIGPROF else str(ended)
            )
            numbers = range(said[-1] + 1, numbers.stop)
        else:
            break
    return wrong


def in_limits(read, path: Path) -> str:
    """Return what is wrong with the reading of a file."""
    data = path.read_bytes()
    return wrong_in_child(read, path, range(1), lambda _: data).get(0, "")


def wrong_mutations(kind: str, folder: Path, count: int) -> dict[int, str]:
    name, read = KINDS[kind](folder)
    path = folder / name
    whole = path.read_bytes()
    wrong = wrong_in_child(
        read,
        path,
        range(count),
        lambda number: variant(kind, whole, random.Random(f"{kind} {number}")),
    )
    path.write_bytes(whole)
    return wrong


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_file_is_read_or_refused_within_limits(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert wrong_mutations(kind, tmp_path, 4) == {}


@pytest.mark.parametrize("kind", ["recipe", "audit", "manifest"])
def test_a_number_of_a_million_digits_is_refused(kind, tmp_path):
    name, read = KINDS[kind](tmp_path)
    path = tmp_path / name
    path.write_text(
        path.read_text()
        .replace(" 1", " 1" + "9" * 900_000 + ".5", 1)
        .replace(":1", ":1" + "9" * 3_000_000 + "e1", 1)
    )
    assert not in_limits(read, path)


TEXTS_THAT_HANG = {
    "line ends in a cell": lambda: csv_text([["\n" * 100_000, "\t" * 100_000, "\n " * 50_000]]),
    "digits in a size": lambda: place([Size("9" * 6000, 1.0, 0)], [Size("9" * 6000, 1.0, 0), Size("b", 1.0, 1)]),
    "digits of a busy machine": lambda: disturbed_part("1" * 100_000),
    "dots of a busy machine": lambda: disturbed_part("1.2.3 of 2 cores"),
    "no cores of a busy machine": lambda: disturbed_part("1 of 0 cores"),
    "percents of a busy machine": lambda: disturbed_part("1.2.3%"),
    "words of torch": lambda: explained(net(), RuntimeError("shape " * 100_000)),
    "bytes out of memory": lambda: failure(MemoryError("9" * 5000 + " bytes")),
    "a null byte in a path": lambda: checkpoint.save(net(), "a\0b.pt"),
    "a year of no age": lambda: age("0001-01-01T00:00:00+14:00") + age(""),
}  # fmt: skip


@pytest.mark.parametrize("what", TEXTS_THAT_HANG)
def test_a_text_that_wants_to_hang_is_read_or_refused(what, tmp_path):
    path = tmp_path / "file"
    path.touch()
    assert not in_limits(lambda _: TEXTS_THAT_HANG[what](), path)


@pytest.mark.parametrize("size", ["9" * 400 + "G", "9" * 400_000])
def test_a_size_of_many_digits_is_refused(size):
    with pytest.raises(ValueError, match="is not a size"):
        read_size(size)


def test_the_result_of_an_error_with_a_long_message_can_be_read(tmp_path):
    outcome = failure(RuntimeError("x" * 50_000_000))
    Record(tmp_path).write_result(outcome.result)
    assert Record(tmp_path).result() == outcome.result


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_thousand_mutated_files_are_read_or_refused(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert wrong_mutations(kind, tmp_path, 2_000) == {}


# ---- interrupts


def everything(model: nn.Module) -> list:
    """Return what an interrupted change of a model would leave behind."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        [(type(m), sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        [(name, id(t), t.dtype, t.shape, t.stride(), t.double().sum().item()) for name, t in tensors],
    ]  # fmt: skip


def load_case(folder: Path):
    path = folder / "a.safetensors"
    checkpoint.save(net(), path, pipeline=Pipeline.from_config(STEPS))

    def make():
        model = net()
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.add_(1)
        return model, lambda: checkpoint.load(path, model, known_issues="ignore")

    return make


def export_case(_: Path):
    def make():
        model = net()
        Pipeline.from_config({"conv2d_memory_format": {}, "input_format": {"attach": True}}).apply(
            model
        )
        return model, lambda: checkpoint.export(model)

    return make


def interrupted(make, lines: int | None) -> int:
    """Interrupt a call at its lines; return how often it was."""
    model, call = make()
    places, count = [], 0
    with interrupt_at(-1, places):
        call()
    wanted = signature(everything(model))
    numbers = first_middle_and_last(places)
    for number in numbers if lines is None else numbers[:: max(1, len(numbers) // lines)]:
        model, call = make()
        before = everything(model)
        try:
            with interrupt_at(number):
                call()
        except KeyboardInterrupt:
            count += 1
        now = everything(model)
        assert now == before or signature(now) == wanted, f"line {number}: {places[number - 1]}"
    return count


def signature(state: list) -> list:
    """Return what two models of the same kind have in common: all but the objects."""
    return [state[0], [(name, *rest) for name, _, *rest in state[1]]]


CASES = {"load": load_case, "export": export_case}


@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_of_load_and_export_leaves_a_whole_model(case, tmp_path):
    assert interrupted(CASES[case](tmp_path), 12) > 3


# Between `open` and its `with` an interrupt leaves a file to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_at_every_line_leaves_a_whole_model(case, tmp_path):
    assert interrupted(CASES[case](tmp_path), None) > 100


def test_an_interrupt_at_every_line_of_a_claim_leaves_it_free(tmp_path):
    def hold(path):
        with locks.claim(path) as held:
            assert held
            files.write_text(tmp_path / "a", "1")

    places = []
    with interrupt_at(-1, places):
        hold(tmp_path / "0")
    interrupts = 0
    for number in range(1, len(places) + 1):
        path = tmp_path / str(number)
        try:
            with interrupt_at(number):
                copy_context().run(hold, path)  # what it has set ends with it
        except KeyboardInterrupt:
            interrupts += 1
        assert not locks.is_held(path), f"{number}: {places[number - 1]}"
        with locks.claim(path) as held:
            assert held
    assert interrupts > 40
