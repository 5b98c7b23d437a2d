"""Checkpoints: saved, and loaded straight into a prepared model, with little memory."""

import gc
import json
import os
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from checkpoint_nets import (
    NOTHING,
    Awkward,
    FromItsWeights,
    NeedsItsWeights,
    pipeline,
    small,
    small_like,
    write,
)
from prepare.checkpoint import load, save
from prepare.checkpoint.weights import build_empty
from prepare.errors import CheckpointError, ConfigError, PrepareError, RefusedError
from prepare.pipeline import Pipeline
from prepare.step import TensorStep, Want
from small_nets import facts, same


@pytest.mark.parametrize("how", ["function", "meta", "real"])
def test_loading_gives_the_same_tensors_as_apply(path, how):
    original = Awkward().eval()
    write(original, path)
    given = {"function": Awkward, "meta": build_empty(Awkward), "real": Awkward()}[how]
    loaded = load(path, given, pipeline=pipeline())
    model = loaded.model.eval()
    same(model, pipeline().apply(original))
    assert how == "function" or model is given
    assert not loaded.pipeline.plan(model)
    assert (loaded.missing, loaded.unexpected) == ((), ())
    assert model.head.weight is model.embedding.weight
    assert model.conv.weight.is_special
    assert torch.equal(model.positions, torch.arange(5))
    assert torch.equal(model.frequencies, torch.linspace(0, 1, 3))
    image = torch.randn(2, 3, 9, 9)
    assert torch.equal(model(image), original(image))
    sound = torch.randn(2, 4, dtype=torch.bfloat16)
    assert torch.equal(model.recurrent(sound)[0], original.recurrent(sound)[0])


def test_the_recipe_in_the_file_is_the_default_pipeline(tmp_path):
    original = Awkward().eval()
    save(pipeline().apply(original), tmp_path / "w.safetensors", pipeline=pipeline())
    loaded = load(tmp_path / "w.safetensors", Awkward)
    assert loaded.pipeline.to_config() == pipeline().to_config()
    same(loaded.model, original)
    float64 = load(tmp_path / "w.safetensors", Awkward, pipeline=NOTHING).model
    assert float64.conv.weight.dtype is torch.float32
    elsewhere = Pipeline.from_config({"device": {"device": "cuda:99"}})
    with pytest.raises(RefusedError, match="cuda:99"):
        load(tmp_path / "w.safetensors", Awkward, pipeline=elsewhere)
    assert load(tmp_path / "w.safetensors", Awkward, pipeline=elsewhere, device="cpu")


def test_a_saved_file_is_read_without_prepare(tmp_path):
    model = Awkward()
    save(pipeline().apply(model), tmp_path / "w.safetensors", pipeline=pipeline())
    state = safetensors.torch.load_file(tmp_path / "w.safetensors")
    assert "head.weight" not in state  # tied, and stored once
    assert all(t.is_contiguous() for t in state.values())
    result = Awkward().bfloat16().load_state_dict(state, strict=False)
    assert set(result.missing_keys) == {"head.weight"}


def sharded(folder: Path, shards: dict[str, dict]) -> Path:
    for name, tensors in shards.items():
        safetensors.torch.save_file(tensors, folder / name)
    names = {tensor: file for file, tensors in shards.items() for tensor in tensors}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return index


def test_the_shards_of_an_index_are_one_state(tmp_path):
    model = small()
    state = model.state_dict()
    parts = {"a.safetensors": {}, "b.safetensors": {}}
    for number, (name, tensor) in enumerate(state.items()):
        parts[("a.safetensors", "b.safetensors")[number % 2]][name] = tensor
    same(load(sharded(tmp_path, parts), small).model, small_like(model))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"other": "a.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"a\.safetensors, other: is not there"):
        load(index, small)
    index.write_text(json.dumps({"weight_map": {"other": "../a.safetensors"}}))
    with pytest.raises(CheckpointError, match="which is not in its folder"):
        load(index, small)


def anonymous() -> int:
    """Return the bytes of this process that no file backs, and that only it has."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Anonymous")).split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux reports it")
def test_loading_holds_the_weights_once(path, monkeypatch):
    def build():
        return nn.Sequential(*(nn.Conv2d(256, 256, 3, bias=False) for _ in range(12)))

    size = sum(p.nbytes for p in build().parameters())
    write(build(), path)
    layout = Pipeline.from_config({"conv2d_memory_format": {}})
    load(path, build, pipeline=layout)  # the first load imports and caches
    gc.collect()
    before, peak = anonymous(), []
    apply = Pipeline.apply
    monkeypatch.setattr(
        Pipeline, "apply", lambda *a, **k: (apply(*a, **k), peak.append(anonymous()))[0]
    )
    loaded = load(path, build, pipeline=layout)
    assert loaded.model[0].weight.stride(1) == 1
    assert max(peak) - before < 1.3 * size
    path.write_bytes(b"")  # nothing is mapped any more: a new content changes no weight
    assert loaded.model[0].weight.isfinite().all()


def test_a_model_that_reads_its_weights_while_built_gets_them(path):
    for kind in (FromItsWeights, NeedsItsWeights):
        original = kind()
        write(original, path)
        loaded = load(path, kind).model
        assert torch.equal(loaded.conv.weight, original.conv.weight)
        assert not any(t.is_meta for t in loaded.buffers())


def test_missing_and_unexpected_tensors_raise_only_if_strict(path):
    write(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), path)

    def build():
        return nn.ModuleDict({"a": nn.Linear(2, 2), "c": nn.Linear(2, 2, bias=False)})

    with pytest.raises(CheckpointError) as caught:
        load(path, build)
    told = [p.where.rpartition(", ")[2] for p in caught.value.problems]
    assert sorted(told) == ["b.bias", "b.weight", "c.weight"]
    with pytest.raises(CheckpointError, match=r"c\.weight: holds no values"):
        load(path, build, strict=False)
    model = build()
    kept = model["c"].weight.detach().clone()
    loaded = load(path, model, strict=False)
    assert loaded.missing == ("c.weight",)
    assert sorted(loaded.unexpected) == ["b.bias", "b.weight"]
    assert torch.equal(model["c"].weight, kept)


WRAPPED = {
    "module.": lambda model: nn.ModuleDict({"module": model}),
    "_orig_mod.": lambda model: nn.ModuleDict({"_orig_mod": model}),
    "model.": lambda model: nn.ModuleDict({"model": model, "loss": nn.Linear(2, 2)}),
    "module._orig_mod.": lambda m: nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": m})}),
}


@pytest.mark.parametrize("prefix", WRAPPED)
def test_a_prefix_of_every_name_is_named_and_stripped_on_request(path, prefix):
    model = small()
    write(WRAPPED[prefix](model), path)
    built = small()
    with pytest.raises(CheckpointError) as caught:
        load(path, built)
    (problem,) = caught.value.problems
    assert problem.where == str(path)
    assert problem.remedy.endswith(f"strip={prefix!r}")
    loaded = load(path, built, strip=prefix.removesuffix("."), strict=prefix != "model.")
    same(loaded.model, small_like(model))
    assert loaded.missing == ()
    extra = ["loss.bias", "loss.weight"] if prefix == "model." else []
    assert sorted(loaded.unexpected) == extra
    with pytest.raises(ConfigError, match=r"begins with 'modle\.'"):
        load(path, built, strip="modle.")


class Doubled(nn.Linear):
    """Writes into the tensors of the file, and transposes them."""

    def _load_from_state_dict(self, state, prefix, *rest):
        state[prefix + "weight"].data.mul_(2)
        state[prefix + "weight"] = state[prefix + "weight"].t()  # square: no shape would tell
        super()._load_from_state_dict(state, prefix, *rest)


class Turned(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_load_state_dict_pre_hook(Turned.turn)

    def turn(self, state, prefix, *_):
        state[prefix + "weight"] = state[prefix + "weight"].roll(1, 0)


@pytest.mark.parametrize("kind", [Doubled, Turned])
@pytest.mark.parametrize("given", ["function", "model"])
def test_loading_code_of_a_module_does_as_in_torch(path, kind, given):
    def build():
        return nn.Sequential(nn.Linear(3, 3), kind(3, 3))

    stored = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    write(stored, path)
    expected, content = build(), path.read_bytes()
    expected.load_state_dict({name: t.clone() for name, t in stored.state_dict().items()})
    half = Pipeline.from_config({"half": {"dtype": "bfloat16"}})
    loaded = load(path, build if given == "function" else build(), pipeline=half)
    same(loaded.model, half.apply(expected))
    assert path.read_bytes() == content


def test_tied_weights_of_a_file_fill_both_places(path):
    def untied():
        layers = {"embedding": nn.Embedding(7, 8), "head": nn.Linear(8, 7, bias=False)}
        return nn.ModuleDict(layers)

    tied = untied()
    tied["head"].weight = tied["embedding"].weight
    write(tied, path)
    both = load(path, untied).model
    assert torch.equal(both["embedding"].weight, both["head"].weight)


def test_every_tensor_of_another_shape_or_dtype_is_named(path):
    write(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)), path)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(5, 6))
    for given in (lambda: model, model):
        before = facts(model)
        with pytest.raises(CheckpointError) as caught:
            load(path, given)
        assert ["1.weight" in p.wrong or "1.bias" in p.wrong for p in caught.value.problems] == [
            True,
            True,
        ]
        assert facts(model) == before
    model = nn.Linear(2, 2)
    model.register_buffer("count", torch.tensor([1, 2]))
    write(model, path)
    model.count = torch.tensor([1.0, 2.0])
    with pytest.raises(
        CheckpointError, match="count: has the dtype int64 in the file, and float32"
    ):
        load(path, model)


def test_float_dtypes_are_cast_as_model_and_pipeline_require(path):
    exact = small()
    low = Pipeline.from_config({"half": {"dtype": "bfloat16", "keep": []}}).apply(small_like(exact))
    write(low, path)
    loaded = load(path, small, pipeline=NOTHING).model
    assert loaded[0].weight.dtype is torch.float32
    assert torch.equal(loaded[0].weight, exact[0].weight.bfloat16().float())
    write(exact, path)
    half = Pipeline.from_config({"half": {"dtype": "float16"}})
    assert torch.equal(load(path, small, pipeline=half).model[0].weight, exact[0].weight.half())
    with torch.no_grad():
        exact[0].weight[1, 0, 0, 0] = 7e4
    write(exact, path)
    with pytest.raises(RefusedError, match=r"0\.weight: 1 of its values would become inf"):
        load(path, small, pipeline=half)


def test_a_failure_leaves_the_given_model_unchanged(path, plugin):
    write(small(), path)

    class Never(TensorStep):
        name = "never"
        asked = 0

        def want(self, tensor):
            Never.asked += 1
            if Never.asked > 14:  # not while the values are read, but in `apply`
                raise OSError("of the plugin")
            return Want(dtype="float64") if tensor.tensor.is_floating_point() else None

    for model in (small(), build_empty(small)):
        Never.asked = 0
        model.register_buffer("wide", torch.full((1,), 2.0).expand(3), persistent=False)
        before = facts(model)
        with pytest.raises(PrepareError, match="of the plugin"):
            load(path, model, pipeline=Pipeline([Never()]))
        assert facts(model) == before
        assert model.wide.tolist() == [2.0] * 3


class Evil:
    def __reduce__(self):
        return (os.system, ("touch executed",))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello, this is no file of weights at all",
        pickle.dumps({"weight": Evil()}),
        b"PK\x03\x04" + bytes(100),
        (100).to_bytes(8, "little") + b"{" + bytes(20),
        (10**12).to_bytes(8, "little") + b'{"a": 1}',
    ],
    ids=["empty", "text", "pickled code", "zip", "cut header", "huge header"],
)
def test_a_damaged_or_hostile_file_is_one_error(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    for name in ("w.safetensors", "w.pt"):
        Path(name).write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            load(name, small)
        assert caught.value.problems[0].where == name
        assert "\n" not in str(caught.value)
    torch.save({"model": Evil()}, "evil.pt")
    with pytest.raises(CheckpointError, match="weights_only=False"):
        load("evil.pt", small)
    assert not Path("executed").exists()


def test_values_that_a_file_of_weights_cannot_hold_are_named(tmp_path):
    class State(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

    for model, name in ((State(1, 1), "_extra_state"), (nn.Linear(1, 1, device="meta"), "weight")):
        with pytest.raises(CheckpointError) as caught:
            save(model, tmp_path / "w.safetensors")
        assert caught.value.problems[0].where.endswith(name)
    model = nn.Linear(1, 1)
    model.register_buffer("z", torch.zeros(1, dtype=torch.complex128))
    with pytest.raises(PrepareError, match="complex128"):
        save(model, tmp_path / "w.safetensors")
    with pytest.raises(ConfigError, match=r"did you mean '\.safetensors'"):
        save(model, tmp_path / "w.safetensor")
    assert list(tmp_path.iterdir()) == []
