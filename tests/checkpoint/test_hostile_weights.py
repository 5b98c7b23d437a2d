"""Tests of damaged and malicious files of weights: no code is run, and every flipped bit is detected."""

import io
import json
import os
import pickle
import random
import shutil
import struct
import tarfile
import zipfile
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from checkpoint_nets import FORMATS, same_state, small, state_of
from prepare.checkpoint import file_formats, load, open_weights, save
from prepare.checkpoint.init_empty import build_empty
from prepare.errors import CheckpointError


@pytest.fixture(autouse=True)
def _nobody_saves_meanwhile(monkeypatch):
    monkeypatch.setattr(open_weights, "_LOOKS", 0)


CREATED = "prepare-test-was-run"


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))


@pytest.fixture(params=FORMATS)
def saved(request, tmp_path):
    """A file, its model, and a model to load it into."""
    model = net()
    path = tmp_path / request.param
    save(model, path)
    return path, model.state_dict()


def outcome(path: Path, right: dict | None = None, model: nn.Module | None = None) -> str:
    """Return `refused`, `right` or `wrong`; after an error the given model must be unchanged."""
    model = build_empty(net) if model is None else model
    before = state_of(model)
    try:
        load(path, model)
    except CheckpointError as error:
        assert path.name in str(error)
        assert all(problem.where.isprintable() for problem in error.problems)
        assert same_state(state_of(model), before)
        return "refused"
    found = model.state_dict()
    same = right is not None and all(torch.equal(found[name], right[name]) for name in right)
    return "right" if same else "wrong"


def test_a_truncated_file_is_refused(saved):
    path, _ = saved
    data = path.read_bytes()
    for _ in range(2):  # with a manifest, and without one
        for part in range(64):
            path.write_bytes(data[: len(data) * part // 64])
            assert outcome(path) == "refused", part
        path.with_name(f"{path.name}.json").unlink(missing_ok=True)


def flips(path: Path, right: dict, places, *, beside: bool = False) -> None:
    target = path.with_name(f"{path.name}.json") if beside else path
    data = target.read_bytes()
    found = {"refused": 0, "right": 0, "wrong": 0}
    for byte, bit in places(len(data)):
        target.write_bytes(data[:byte] + bytes([data[byte] ^ (1 << bit)]) + data[byte + 1 :])
        found[outcome(path, right)] += 1
    assert found["wrong"] == 0
    # An archive of torch has padding, where a bit has no effect.
    assert found["refused"] >= 40


@pytest.mark.parametrize("beside", [False, True], ids=["weights", "manifest"])
def test_flipped_bits_are_detected(saved, beside):
    def some(length):
        draw = random.Random(7)
        return [(draw.randrange(length), draw.randrange(8)) for _ in range(120)]

    flips(*saved, some, beside=beside)


@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True], ids=["weights", "manifest"])
def test_a_flipped_bit_in_any_byte_is_detected(saved, beside):
    flips(*saved, lambda length: [(b, b * 5 % 8) for b in range(length)], beside=beside)


# ------------------------------------------------------------------------------------ pickled code


class MaliciousPickle:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


MAKE = f"open({CREATED!r}, 'w').close()"
# Calls of which most create a file when a pickle that holds them is run.
CALLS = [
    (os.system, f"touch {CREATED}"), (eval, MAKE), (exec, MAKE), (open, CREATED, "w"), (Path.touch, Path(CREATED)),
    (os.popen, f"touch {CREATED}"), (__import__, "os"), (torch.hub.load, "nobody/nothing", "x"),
    (torch.load, CREATED), (torch.jit.load, CREATED), (nn.Linear, 2, 2), (bytearray, 1 << 45),
]  # fmt: skip


def archive(
    path: Path,
    pickled: bytes,
    *,
    kind=zipfile.ZIP_STORED,
    twice: bool = False,
    order: bytes = b"little",
):
    """Write a torch file with this pickle."""
    with zipfile.ZipFile(path, "w", kind) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/version", "3\n")
        file.writestr("archive/byteorder", order)
        file.writestr("archive/data/0", b"\0" * 64)
        if twice:
            with pytest.warns(UserWarning, match="Duplicate name"):
                file.writestr("archive/data.pkl", pickled)


def test_no_pickled_code_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "w.pt"
    count = 0
    for malicious in (MaliciousPickle(*call) for call in CALLS):
        among = {"0.weight": torch.ones(3, 5), "x": [malicious]}
        for held, protocol in product((malicious, {"0.weight": malicious}, among), (2, 4)):
            data = pickle.dumps(held, protocol=protocol)
            for write in (archive, Path.write_bytes, tar):  # the second as torch before 1.6
                write(path, data)
                assert outcome(path) == "refused"
                assert outcome(path, model=net()) == "refused"
                count += 1
        torch.save({"0.weight": malicious}, path)
        assert outcome(path) == "refused"
    assert count >= 100
    assert not (tmp_path / CREATED).exists()


def tar(path: Path, data: bytes) -> None:
    """Write the oldest format, of which torch's own safe loader once ran code (CVE-2025-32434)."""
    with tarfile.open(path, "w") as file:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))


# ------------------------------------------------------------------------------------ false headers


def header(entries: object, values: bytes = b"", *, length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + values


def entry(dtype="F32", shape=(5,), offsets=(0, 20)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HUGE = 2**40
FALSE_FILES = {
    "nothing": b"",
    "text": b"hello, these are no weights at all\n",
    "zeros": b"\0" * 100,
    "a header of 2^40 bytes": header({}, length=HUGE),
    "a header of 2^63 bytes": header({}, length=2**63),
    "a header of -1 bytes": b"\xff" * 8 + b"{}",
    "a header cut": header(b'{"0.weight": {"dtype"'),
    "a header that is a list": header(b"[]"),
    "a header that is not UTF-8": header(b'{"\xff": 1}'),
    "a header of brackets": header(b'{"a":' + b"[" * 100_000),
    "a number of a million digits": header(b'{"a":' + b"9" * 1_000_000 + b"}"),
    "a name twice": header(b'{"a":{"dtype":"F32","shape":[5],"data_offsets":[0,20]},'
                           b'"a":{"dtype":"F32","shape":[5],"data_offsets":[0,20]}}', b"\0" * 20),
    "a shape of 2^40": header({"0.bias": entry(shape=[HUGE], offsets=[0, 4 * HUGE])}, b"\0" * 20),
    "a shape of 2^40 in few bytes": header({"0.bias": entry(shape=[HUGE])}, b"\0" * 20),
    "a shape of 2^40 by 2^40": header({"0.bias": entry(shape=[HUGE, HUGE])}, b"\0" * 20),
    "a shape below 0": header({"0.bias": entry(shape=[-5])}, b"\0" * 20),
    "a shape of halves": header({"0.bias": entry(shape=[2.5, 2])}, b"\0" * 20),
    "a shape that is true": header({"0.bias": entry(shape=[True, 5])}, b"\0" * 20),
    "an unknown dtype": header({"0.bias": entry(dtype="F33")}, b"\0" * 20),
    "a dtype that is a list": header({"0.bias": entry(dtype=["F32"])}, b"\0" * 20),
    "a dtype of another size": header({"0.bias": entry(dtype="F64")}, b"\0" * 20),
    "offsets beyond the end": header({"0.bias": entry(offsets=[0, 20])}, b"\0" * 10),
    "offsets that begin late": header({"0.bias": entry(offsets=[4, 24])}, b"\0" * 24),
    "offsets backwards": header({"0.bias": entry(offsets=[20, 0])}, b"\0" * 20),
    "offsets that overlap": header({"a": entry(), "b": entry(offsets=[10, 30])}, b"\0" * 30),
    "one offset": header({"0.bias": entry(offsets=[0])}, b"\0" * 20),
    "bytes of no tensor": header({"0.bias": entry()}, b"\0" * 30),
    "an entry that is a number": header({"0.bias": 5}),
    "an entry with more keys": header({"0.bias": entry() | {"code": "x"}}, b"\0" * 20),
}  # fmt: skip


@pytest.mark.parametrize("case", FALSE_FILES)
def test_a_file_with_a_false_header_is_refused(tmp_path, case):
    path = tmp_path / "w.safetensors"
    path.write_bytes(FALSE_FILES[case])
    assert outcome(path) == "refused"


@pytest.mark.parametrize("case", ["expanded", "huge", "strided", "meta", "sparse", "numbers", "list",
                                 "compressed", "twice", "script", "empty zip", "two entries"])  # fmt: skip
def test_a_torch_file_with_false_content_is_refused(tmp_path, case):
    path = tmp_path / "w.pt"
    state = net().state_dict()
    if case in ("compressed", "twice"):
        kind = zipfile.ZIP_DEFLATED if case == "compressed" else zipfile.ZIP_STORED
        archive(path, pickle.dumps({}, protocol=2), kind=kind, twice=case == "twice")
    elif case == "script":
        torch.jit.save(torch.jit.script(nn.ReLU()), path)
    elif case == "empty zip":
        zipfile.ZipFile(path, "w").close()
    else:
        torch.save({
            "expanded": lambda: state | {"0.bias": torch.zeros(1).expand(HUGE)},
            "huge": lambda: state | {"0.bias": torch.zeros(1).expand(2**31, 2**31)},
            "strided": lambda: state | {"0.weight": torch.zeros(5, 3)},
            "meta": lambda: state | {"0.bias": torch.zeros(3, device="meta")},
            "sparse": lambda: state | {"0.bias": torch.zeros(3).to_sparse()},
            "numbers": lambda: {"a": [1, 2, 3]},
            "list": lambda: list(state.values()),
            "two entries": lambda: {"a": state, "b": state},
        }[case](), path)  # fmt: skip
    assert outcome(path) == "refused"


def test_a_manifest_that_does_not_fit_the_weights_is_refused(saved):
    path, right = saved
    beside = path.with_name(f"{path.name}.json")
    kept = beside.read_bytes()
    for text in (b"", b"[]", b"{}", b"\xff", b"[" * 100_000, kept[:-20], kept.replace(b"float32", b"float16"),
                 kept.replace(b'"version": 1', b'"version": 2'), kept.replace(b"0.bias", b"0.BIAS")):  # fmt: skip
        beside.write_bytes(text)
        assert outcome(path, right) == "refused", text[:50]
    other = path.with_name(f"other{path.suffix}")
    save(small(), other)
    shutil.copy(other.with_name(f"{other.name}.json"), beside)
    assert outcome(path, right) == "refused"
    beside.unlink()
    assert outcome(path, right) == "right"


def test_names_of_any_kind_are_saved_loaded_and_printable(tmp_path):
    for name in ("a\nb", "<script>", "=1+1", "[red]", "a/b", "é" * 300, "\udc80", "__metadata__ "):
        for file in FORMATS:
            model = nn.Module()
            model.register_parameter(name, nn.Parameter(torch.ones(2)))
            path = tmp_path / file
            if (name, file) == ("\udc80", "w.safetensors"):  # no reader of the format takes it
                with pytest.raises(CheckpointError, match="for that name; take a .pt file"):
                    save(model, path)
                continue
            save(model, path)
            with pytest.raises(CheckpointError) as caught:
                load(path, net)
            assert all(str(problem).isprintable() for problem in caught.value.problems)

            def build(name=name):
                model = nn.Module()
                model.register_parameter(name, nn.Parameter(torch.zeros(2)))
                return model

            assert torch.equal(load(path, build).model.get_parameter(name), torch.ones(2))


def nest(depth: int) -> bytes:
    """Return the operations that leave a tuple of twice a tuple of twice a tuple ... on the stack."""
    pairs = (b"h%c\x86q%c" % (n, n + 1) for n in range(depth))
    return b")q\0" + b"".join(pairs)


BOMBS = {
    "a key": b"\x80\2}" + nest(60) + b"K\1s.",
    "one key of several": b"\x80\2}(K\1K\1" + nest(60) + b"K\1u.",
    "the argument of a call": b"\x80\2ctorch\nSize\n" + nest(60) + b"\x85R.",
    "a value": b"\x80\2}K\1" + nest(60) + b"s.",
    "half the depth": b"\x80\2}" + nest(30) + b"K\1s.",
    "many keys": b"\x80\2}" + nest(17) + b"K\0s" + b"h\x11K\1s" * 200 + b".",
    "lists": b"\x80\2]" + b"]a" * 1_000_001 + b".",
    "a long tuple in a tuple": b"\x80\2}" + nest(21) + b"K\1s.",
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_pickle_of_many_values_is_refused(tmp_path, bomb):
    path = tmp_path / "model.pt"
    archive(path, BOMBS[bomb])
    with pytest.raises(CheckpointError, match="more values than a") as caught:
        load(path, net)
    assert len(str(caught.value)) < 300


def test_a_class_of_a_very_long_name_is_refused_before_torch_reads_it(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "load", None)
    path = tmp_path / "model.pt"
    archive(path, b"\x80\2ctorch\n" + b"S" * 2_000_000 + b"\n.")
    with pytest.raises(
        CheckpointError, match="names a class by more than 1,000 characters"
    ) as caught:
        load(path, net)
    assert len(str(caught.value)) < 300


def test_a_pt_has_no_more_values_than_its_bytes_pay_for(tmp_path, monkeypatch):
    monkeypatch.setattr(file_formats, "_OPERATIONS", 60)
    path = tmp_path / "model.pt"
    torch.save({str(n): torch.zeros(1) for n in range(4)}, path)
    with pytest.raises(CheckpointError, match="more values than are read from a file of its size"):
        load(path, net)
    torch.save({str(n): torch.zeros(50_000) for n in range(4)}, path)
    with pytest.raises(CheckpointError, match="has no place in the model"):
        load(path, net)


def test_an_archive_of_too_many_records_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(file_formats, "_MOST_TENSORS", 9)
    path = tmp_path / "model.pt"
    torch.save({str(n): torch.zeros(1) for n in range(9)}, path)
    with pytest.raises(CheckpointError, match="it has more than 9 records"):
        load(path, net)


def test_a_key_that_is_no_text_is_named_by_its_kind(tmp_path):
    path = tmp_path / "model.pt"
    archive(path, b"\x80\2}" + nest(8) + b"K\1s.")
    with pytest.raises(CheckpointError, match="a dict with 1 entries: a tuple; ") as caught:
        load(path, net)
    assert len(str(caught.value)) < 300


def test_a_large_byteorder_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "model.pt"
    archive(path, b"\x80\2}.", order=b"big" + b" " * 1_000_000)
    read = zipfile.ZipFile.read
    names = []
    monkeypatch.setattr(
        zipfile.ZipFile, "read", lambda file, name: names.append(name) or read(file, name)
    )
    with pytest.raises(CheckpointError, match="is an archive that torch did not write"):
        load(path, net)
    assert "archive/byteorder" not in [name.filename for name in names]


def test_a_header_of_millions_of_values_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(header(b'{"a":[' + b"{}," * 2_000_000 + b"{}]}"))
    with pytest.raises(CheckpointError, match="would take more than 128 MB of memory"):
        load(path, net)


def test_a_file_that_lists_too_many_tensors_is_refused(tmp_path):
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    path = tmp_path / "model.safetensors"
    path.write_bytes(header(json.dumps({f"{i}": entry for i in range(20_001)}).encode()))
    with pytest.raises(CheckpointError, match="describes more than 20,000 tensors"):
        load(path, net)
    path.write_bytes(header(b"{" + b" " * (1 << 25) + b"}"))
    with pytest.raises(CheckpointError, match="describes more than 20,000 tensors"):
        load(path, net)
    path = tmp_path / "model.pt"
    archive(path, b"\x80\2}.")
    data = bytearray(path.read_bytes())
    size = data.rindex(b"PK\5\6") + 12
    data[size : size + 4] = struct.pack("<I", 6_000_000)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="has more than 20,000 records"):
        load(path, net)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model.safetensors.json"])
def test_an_index_or_manifest_of_millions_of_values_is_refused(tmp_path, name):
    weights = tmp_path / "model.safetensors"
    save(net(), weights)
    (tmp_path / name).write_text('{"weight_map":[' + "{}," * 2_000_000 + "{}]}")
    with pytest.raises(CheckpointError, match="would take more than 128 MB of memory"):
        load(tmp_path / name if "index" in name else weights, net)
