"""Checkpoints that fail to load or to be saved: model and files stay unchanged."""

import errno
import os

import pytest
import torch
from torch import nn

from checkpoint_nets import same_state, small, small_bytes, state_of
from failing_calls import FailAt
from prepare.checkpoint import load, save
from prepare.checkpoint.init_empty import build_empty
from prepare.checkpoint.manifest import read_manifest
from prepare.checkpoint.open_weights import open_weights
from prepare.errors import CheckpointError, ConfigError, FileError, PrepareError, RefusedError
from prepare.pipeline import Pipeline
from prepare.step import TensorStep, Want


@pytest.mark.parametrize("when", ["values", "apply"])
def test_a_failure_leaves_the_given_model_unchanged(path, when, plugin):
    save(small(), path)

    class Never(TensorStep):
        name = "never"
        asked = 0

        def want(self, tensor):
            Never.asked += 1
            if Never.asked > 14 and when == "apply":
                raise OSError("of the plugin")
            return Want(dtype="float64") if tensor.tensor.is_floating_point() else None

    if when == "values":
        raw = bytearray(path.read_bytes())
        place = raw.index(small_bytes(path))
        raw[place] ^= 1
        path.write_bytes(raw)
    for model in (small(), build_empty(small)):
        Never.asked = 0
        before = state_of(model)
        with pytest.raises(PrepareError, match="sha256" if when == "values" else "of the plugin"):
            load(path, model, pipeline=Pipeline([Never()]))
        assert same_state(state_of(model), before)


def test_loading_is_refused_where_apply_would_refuse(path):
    save(small(), path)
    model = small()
    model(torch.randn(1, 3, 5, 5)).sum().backward()
    with pytest.raises(RefusedError, match=r"holds a \.grad"):
        load(path, model, pipeline=Pipeline.from_config({"half": {"dtype": "bfloat16"}}))
    with torch.inference_mode(), pytest.raises(RefusedError, match="inference_mode"):
        load(path, small)
    shared = small()
    flat = torch.zeros(8)
    shared[1].weight.data, shared[1].bias.data = flat[:4], flat[4:]
    with pytest.raises(RefusedError, match="would be torn from them"):
        load(path, shared)
    elsewhere = Pipeline.from_config({"device": {"device": "cuda:99"}})
    with pytest.raises(RefusedError, match="cuda:99 is not available here"):
        load(path, small, pipeline=elsewhere)
    assert load(path, small, pipeline=elsewhere, device="cpu").model[0].weight.device.type == "cpu"
    with pytest.raises(RefusedError, match="gave an object of type int"):
        load(path, lambda: 3)
    with pytest.raises(ConfigError, match="did you mean 'never'"):
        load(path, small, check="nevr")


def test_apply_on_a_meta_model_names_load():
    with pytest.raises(
        RefusedError, match=r"meta holds no data; load it with prepare\.checkpoint\.load"
    ):
        Pipeline.from_config({"device": {"device": "cpu"}}).apply(nn.Linear(2, 2, device="meta"))


def test_values_that_a_file_of_weights_cannot_hold_are_named(tmp_path):
    class State(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(CheckpointError, match="_extra_state: is a dict of its module"):
        save(State(1, 1), tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="weight: holds no values; load it first"):
        save(nn.Linear(1, 1, device="meta"), tmp_path / "w.pt")
    model = nn.Linear(1, 1)
    model.register_buffer("z", torch.zeros(1, dtype=torch.complex128))
    with pytest.raises(
        CheckpointError, match=r"z: safetensors has no place for complex128; take a \.pt"
    ):
        save(model, tmp_path / "w.safetensors")
    with pytest.raises(
        ConfigError, match=r"path: .*has no suffix of weights; did you mean '\.safetensors'"
    ):
        save(model, tmp_path / "w.safetensor")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()],
                         ids=["disk full", "Ctrl-C"])  # fmt: skip
@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_a_failure_at_any_call_leaves_both_files_unchanged(path, old, error):
    folder, first, second = path.parent, nn.Linear(2, 3), nn.Linear(2, 3)
    failed = 0
    for n in range(1, 200):
        for each in folder.iterdir():
            each.unlink()
        if old:
            save(first, path)
        before = {each.name: each.read_bytes() for each in folder.iterdir()}
        with pytest.MonkeyPatch.context() as monkeypatch:
            fault = FailAt(monkeypatch, n, error)
            try:
                save(second, path)
            except (FileError, KeyboardInterrupt) as raised:
                assert isinstance(raised, KeyboardInterrupt) or "No space left" in str(raised)
        after = {each.name: each.read_bytes() for each in folder.iterdir()}
        assert after == before or set(after) == {path.name, f"{path.name}.json"}
        if after != before:
            # Only the last calls, which sync the folder, come after both files are in place.
            assert (
                load(path, lambda: nn.Linear(2, 3), check="always").model.weight[0, 0]
                == second.weight[0, 0]
            )
        if not fault.failed:
            break
        failed += 1
    assert failed > 12


def test_a_kill_between_the_two_files_is_detected(path):
    first, second = nn.Linear(2, 3), nn.Linear(2, 3)
    save(first, path)
    weights = path.read_bytes()
    save(second, path)
    path.write_bytes(weights)  # the manifest took its place, and the weights did not
    with pytest.raises(CheckpointError, match="its sha256 is another"):
        load(path, lambda: nn.Linear(2, 3))
    kept = load(path, lambda: nn.Linear(2, 3), check="never").model
    assert torch.equal(kept.weight, first.weight)


def test_path_and_model_in_the_wrong_order_are_named(path):
    with pytest.raises(ConfigError, match=r"load\(path, model\)"):
        load(small(), path)
    with pytest.raises(ConfigError, match=r"save\(model, path\)"):
        save(path, small())


@pytest.mark.parametrize("check", ["auto", "never"])
def test_who_reads_while_another_saves_gets_one_version(path, monkeypatch, check):
    recipes = [Pipeline.from_config({"half": {"dtype": d}}) for d in ("bfloat16", "float16")]
    save(small(), path, pipeline=recipes[0])
    later = [recipes[1]]

    def read(place):
        if later:
            save(small(), path, pipeline=later.pop())
        return read_manifest(place)

    monkeypatch.setattr("prepare.checkpoint.open_weights.read_manifest", read)
    opened = open_weights(path, check=check)
    assert not later
    assert opened.manifest.steps == recipes[1].to_recipe()


def test_who_reads_between_the_two_files_of_a_save_waits(path, monkeypatch):
    save(small(), path, pipeline=Pipeline.from_config({"half": {}}))
    old = path.read_bytes()
    save(small(), path)
    new, time = path.read_bytes(), path.stat().st_mtime_ns
    path.write_bytes(old)
    pauses = []

    def go_on(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            path.write_bytes(new)
            os.utime(path, ns=(time, time))

    monkeypatch.setattr("prepare.checkpoint.open_weights.time.sleep", go_on)
    assert not load(path, small).pipeline.steps
    assert len(pauses) == 3


def test_a_copy_whose_files_have_two_times_is_loaded(path):
    save(small(), path)
    os.utime(path, ns=(1, 1))
    assert load(path, small).model is not None
