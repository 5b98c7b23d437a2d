"""Tests of checkpoints: saving, loading straight into a prepared model, and files that are refused."""

import copy
import errno
import gc
import json
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from checkpoint_nets import (
    Awkward,
    FromItsWeights,
    NeedsItsWeights,
    pipeline,
    same_state,
    small,
    state_of,
)
from failing_calls import FailAt
from prepare.checkpoint import export, load, save
from prepare.checkpoint.init_empty import build_empty, empty_parameters
from prepare.cli import main as cli
from prepare.errors import (
    CheckpointError,
    ConfigError,
    FileError,
    KnownIssueError,
    PrepareError,
    RefusedError,
)
from prepare.pipeline import Pipeline
from prepare.step import TensorStep, Want

FORMATS = ("w.safetensors", "w.pt")
NOTHING = Pipeline([])


@pytest.fixture(params=FORMATS)
def path(request, tmp_path) -> Path:
    return tmp_path / request.param


def tensor_facts(model: nn.Module) -> dict:
    """Return the strides, dtype, requires_grad and values of every parameter and buffer."""
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers()),
    }
    return {name: (t.stride(), t.dtype, t.requires_grad, t.detach()) for name, t in tensors.items()}


def assert_same(one: nn.Module, other: nn.Module) -> None:
    first, second = tensor_facts(one), tensor_facts(other)
    assert first.keys() == second.keys()
    for name, (*form, values) in first.items():
        *expected_form, expected = second[name]
        assert form == expected_form, name
        assert torch.equal(values, expected), name


# ------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("how", ["function", "meta", "real"])
def test_loading_gives_the_same_tensors_as_apply(path, how):
    original = Awkward().eval()
    save(original, path, pipeline=pipeline())
    given = {"function": Awkward, "meta": build_empty(Awkward), "real": Awkward()}[how]
    loaded = load(path, given)  # by the recipe beside the file
    model = loaded.model.eval()
    assert_same(model, pipeline().apply(original))
    assert how == "function" or model is given
    assert loaded.pipeline.to_config() == pipeline().to_config()
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


def test_a_prepared_model_is_saved_as_the_same_bytes(tmp_path):
    plain, prepared = small(), small()
    prepared.load_state_dict(plain.state_dict())
    Pipeline.from_config({"conv2d_memory_format": {}}).apply(prepared)
    with pytest.raises(ValueError, match="non contiguous"):
        safetensors.torch.save_file(prepared.state_dict(), tmp_path / "theirs.safetensors")
    for name in FORMATS:
        save(plain, tmp_path / f"plain{name}")
        save(prepared, tmp_path / f"prepared{name}")
        both = [(tmp_path / f"{which}{name}").read_bytes() for which in ("plain", "prepared")]
        assert both[0] == both[1]


def test_saved_files_can_be_read_without_prepare(tmp_path):
    model = Awkward()
    state = model.state_dict()
    save(model, tmp_path / "w.safetensors")
    found = safetensors.torch.load_file(tmp_path / "w.safetensors")
    assert found.keys() == state.keys() - {"head.weight"}  # tied: stored once
    assert all(torch.equal(found[name], state[name]) for name in found)
    again = Awkward()
    safetensors.torch.load_model(again, tmp_path / "w.safetensors")
    assert all(torch.equal(again.state_dict()[name], state[name]) for name in state)
    save(model, tmp_path / "w.pt")
    found = torch.load(tmp_path / "w.pt", weights_only=True)
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()
    assert found._metadata["norm"] == {"version": 2}


def test_files_saved_without_prepare_can_be_loaded(tmp_path):
    model = small()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "a.safetensors", {"epoch": "3"})
    torch.save(model.to(memory_format=torch.channels_last).state_dict(), tmp_path / "a.pt")
    torch.save({"epoch": 3, "model": model.state_dict(), "ema": None}, tmp_path / "run.ckpt")
    for name in ("a.safetensors", "a.pt", "run.ckpt"):
        assert_same(load(tmp_path / name, small).model, small_like(model))


def small_like(model: nn.Module) -> nn.Module:
    like = small()
    like.load_state_dict(model.state_dict())
    return like


def test_a_sharded_checkpoint_of_transformers_loads_with_tied_weights(tmp_path):
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=90, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16,
    )  # fmt: skip
    theirs = BertForMaskedLM(config).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    index = tmp_path / "model.safetensors.index.json"
    ours = load(index, lambda: BertForMaskedLM(config)).model.eval()
    assert_same(ours, theirs)
    tokens = torch.arange(10)[None]
    assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


def test_a_model_with_fused_norms_is_saved_and_loaded(path):
    steps = {"fuse_conv_bn": {}, "conv2d_memory_format": {}}
    model = Pipeline.from_config(steps).apply(small().eval())
    save(model, path, pipeline=Pipeline.from_config(steps))
    assert "1.weight" not in model.state_dict()
    assert_same(load(path, lambda: small().eval()).model, model)
    given = small().eval()
    assert_same(load(path, given).model, model)
    given, damaged = small().eval(), bytearray(path.read_bytes())
    before = state_of(given)
    damaged[damaged.index(small_bytes(path))] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="sha256"):
        load(path, given)
    assert same_state(state_of(given), before)


def test_a_wrong_shard_of_an_index_is_named(tmp_path):
    safetensors.torch.save_file({"0.weight": torch.ones(2)}, tmp_path / "a.safetensors")
    index = tmp_path / "m.safetensors.index.json"
    for shard, wrong in (
        ("../a.safetensors", "none beside it"),
        ("/etc/passwd", "none beside it"),
        ("b.safetensors", "cannot be read: No such file or directory; did you mean"),
    ):
        index.write_text(json.dumps({"weight_map": {"0.weight": shard}}))
        with pytest.raises(CheckpointError, match=wrong):
            load(index, small)
    index.write_text(json.dumps({"weight_map": {"other": "a.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"a\.safetensors, other: is not there, and m\.safe"):
        load(index, small)


def test_parameters_take_no_memory_while_the_model_is_built():
    model = build_empty(lambda: nn.Sequential(*(nn.Linear(2**14, 2**14) for _ in range(64))))
    assert sum(p.nbytes for p in model.parameters()) > 2**36
    assert all(p.is_meta for p in model.parameters())
    ours = {}

    def elsewhere():
        ours["model"] = nn.Linear(2, 2)

    with empty_parameters():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert not ours["model"].weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux reports the peak"
)
def test_the_peak_is_the_prepared_model_and_the_largest_tensor(path):
    def build():
        return nn.Sequential(*(nn.Conv2d(512, 512, 3, bias=False) for _ in range(12)))

    model = build()
    largest = model[0].weight.nbytes
    save(model, path, pipeline=pipeline())
    prepared = sum(p.numel() * 2 for p in model.parameters())
    del model
    load(path, build)  # the first load imports and caches
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    loaded = load(path, build)
    extra = peak() - before
    assert loaded.model[0].weight.dtype is torch.bfloat16
    assert extra <= prepared + largest + 2**24, (extra, prepared, largest)
    assert prepared > 5 * largest


# ------------------------------------------------------------------------------ values that a file never contains


def test_a_model_that_reads_its_weights_while_built_gets_them(path):
    for kind in (FromItsWeights, NeedsItsWeights):
        original = kind()
        save(original, path)
        loaded = load(path, kind).model
        assert torch.equal(loaded.conv.weight, original.conv.weight)
        assert not any(t.is_meta for t in loaded.buffers())


def test_an_unsaved_buffer_on_meta_is_refused_without_a_change(path):
    save(Awkward(), path)
    with torch.device("meta"):
        model = Awkward()
    before = state_of(model)
    with pytest.raises(CheckpointError) as caught:
        load(path, model, pipeline=NOTHING)
    assert [problem.where for problem in caught.value.problems] == [f"{path}, positions"]
    assert "give a function that builds the model" in str(caught.value)
    model.positions = torch.arange(5)
    with pytest.raises(CheckpointError, match="frequencies: holds no values"):
        load(path, model, pipeline=NOTHING)
    model.positions = before["positions"][4]
    assert same_state(state_of(model) | {"positions": before["positions"]}, before)


def test_lazy_and_scripted_models_are_refused_without_a_change(path):
    save(nn.Sequential(nn.Linear(2, 3)), path)
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(RefusedError, match=r"0\.weight: has no shape yet"):
        load(path, lazy, strict=False)
    assert isinstance(lazy[0].weight, nn.UninitializedParameter)
    with pytest.warns(DeprecationWarning, match="deprecated"):
        scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 3)))
    with pytest.raises(RefusedError, match="load first, then script or trace it"):
        load(path, scripted)


# ---------------------------------------------------------------------------------- names


def test_missing_and_unexpected_tensors_raise_only_if_strict(path):
    save(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), path)

    def build():
        return nn.ModuleDict({"a": nn.Linear(2, 2), "c": nn.Linear(2, 2, bias=False)})

    with pytest.raises(CheckpointError) as caught:
        load(path, build)
    told = [(p.where.rpartition(", ")[2], p.wrong) for p in caught.value.problems]
    assert told == [
        ("c.weight", "is not in the file"),
        ("b.weight", "has no place in the model"),
        ("b.bias", "has no place in the model"),
    ]
    with pytest.raises(CheckpointError, match=r"c\.weight: is not in the file, and on the meta"):
        load(path, build, strict=False)
    model = build()
    kept = model["c"].weight.detach().clone()
    loaded = load(path, model, strict=False)
    assert loaded.missing == ("c.weight",)
    assert loaded.unexpected == ("b.weight", "b.bias")
    assert torch.equal(model["c"].weight, kept)


def test_rename_maps_names_and_may_leave_some_out(path):
    model = small()
    wrapped = nn.ModuleDict({"module": model, "extra": nn.Linear(2, 2)})
    save(wrapped, path)

    def rename(name):
        return name.removeprefix("module.") if name.startswith("module.") else None

    assert_same(load(path, small, rename=rename).model, small_like(model))
    with pytest.raises(CheckpointError, match="is renamed to 'x', and so is"):
        load(path, small, rename=lambda _: "x")


def test_hooks_of_modules_that_rename_are_run(path):
    with pytest.warns(FutureWarning, match="deprecated"):
        old = nn.utils.weight_norm(nn.Conv2d(2, 2, 3))  # its names are weight_g and weight_v
    save(old, path)
    new = load(path, lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 3))).model
    image = torch.randn(1, 2, 5, 5)
    assert torch.allclose(new(image), old(image))


def test_a_hook_that_computes_from_the_file_is_refused(path):
    class Fused(nn.Linear):
        def _load_from_state_dict(self, state, prefix, *rest):
            state[prefix + "weight"] = state[prefix + "weight"].t()  # square: no shape would tell
            super()._load_from_state_dict(state, prefix, *rest)

    save(nn.Linear(3, 3), path)
    with pytest.raises(
        CheckpointError, match="weight: is computed from the file by the code of its"
    ):
        load(path, lambda: Fused(3, 3))


def test_key_chooses_an_entry_of_a_file_with_several(tmp_path):
    path = tmp_path / "run.pt"
    model, other = small(), small()
    torch.save({"model": model.state_dict(), "ema": other.state_dict(), "epoch": 2}, path)
    with pytest.raises(CheckpointError, match="choose one: key='model'; there are model, ema"):
        load(path, small)
    assert_same(load(path, small, key="ema").model, small_like(other))
    with pytest.raises(CheckpointError, match="did you mean 'model'"):
        load(path, small, key="modle")
    save(model, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="has no entries, so none called 'model'"):
        load(tmp_path / "w.safetensors", small, key="model")


def test_post_load_hooks_get_the_model_with_its_values(path):
    save(small(), path)
    told = []

    def build():
        model = small()
        model.register_load_state_dict_post_hook(lambda m, keys: told.append((m, *keys)))
        return model

    model = load(path, build).model
    assert told == [(model, [], [])]


def test_known_issues_are_errors_unless_they_are_ignored(path):
    def build():
        return nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.SiLU(), nn.Conv2d(4, 4, 3)
        )

    layout = Pipeline.from_config({"device": {"device": "cpu"}, "conv2d_memory_format": {}})
    save(build(), path, pipeline=layout)
    model = build()
    before = state_of(model)
    with pytest.raises(KnownIssueError):
        load(path, model)
    assert same_state(state_of(model), before)
    assert load(path, model, known_issues="ignore").model[0].weight.stride(1) == 1


def test_tied_weights_that_differ_in_the_file_are_an_error(path):
    class Untied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 8), nn.Linear(8, 7, bias=False)

    class Tied(Untied):
        def __init__(self):
            super().__init__()
            self.head.weight = self.embedding.weight

    save(Untied(), path)
    for check in ("auto", "never"):
        with pytest.raises(CheckpointError, match=r"is another tensor than embedding\.weight"):
            load(path, Tied, check=check)
    save(Tied(), path)
    both = load(path, Untied).model  # stored once, and both get it
    assert torch.equal(both.embedding.weight, both.head.weight)


# ------------------------------------------------------------------------ shapes, types, the model's state


def test_every_tensor_of_another_shape_or_dtype_is_named(path):
    save(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)), path)
    with pytest.raises(CheckpointError) as caught:
        load(path, lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(5, 6)))
    assert [str(problem) for problem in caught.value.problems] == [
        f"{path}, 1.weight: has the shape [4, 3] in the file, and [6, 5] in the model",
        f"{path}, 1.bias: has the shape [4] in the file, and [6] in the model",
    ]
    model = nn.Linear(2, 2)
    model.register_buffer("count", torch.tensor([1, 2]))
    save(model, path)
    model.count = torch.tensor([1.0, 2.0])
    with pytest.raises(
        CheckpointError, match="count: has the dtype int64 in the file, and float32"
    ):
        load(path, model)


def test_float_dtypes_are_cast_as_model_and_pipeline_require(path):
    exact = small()
    save(
        Pipeline.from_config({"half": {"dtype": "bfloat16", "keep": []}}).apply(small_like(exact)),
        path,
    )
    loaded = load(path, small, pipeline=NOTHING).model
    assert loaded[0].weight.dtype is torch.float32
    assert torch.equal(loaded[0].weight, exact[0].weight.bfloat16().float())
    save(exact, path)
    half = Pipeline.from_config({"half": {"dtype": "float16"}})
    assert torch.equal(load(path, small, pipeline=half).model[0].weight, exact[0].weight.half())
    with torch.no_grad():
        exact[0].weight[1, 0, 0, 0] = 7e4
    save(exact, path)
    with pytest.raises(RefusedError, match=r"0\.weight: 1 of its values would become inf"):
        load(path, small, pipeline=half)


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


def small_bytes(path: Path) -> bytes:
    """Return the bytes of one of its tensors, as they are in the file."""
    from prepare.checkpoint.open_weights import open_weights
    from prepare.checkpoint.stored_tensor import raw

    stored = open_weights(path).stored["0.weight"]
    return bytes(raw(next(stored.pieces())[1]))


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


def test_a_resumed_optimizer_matches_the_loaded_layout(path):
    """The checkpoint is of a contiguous run, and the model that goes on is channels-last."""
    steps = {"conv2d_memory_format": {}}
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 3, 3))
    batches = [torch.randn(2, 3, 9, 9) for _ in range(6)]

    def train(model, optimizer, some):
        for batch in some:
            optimizer.zero_grad(set_to_none=True)
            model(batch).square().mean().backward()
            optimizer.step()

    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    train(plain, optimizer, batches[:3])
    save(plain, path)
    kept = copy.deepcopy(optimizer.state_dict())

    def build():
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 3, 3))

    loaded = load(path, build, pipeline=Pipeline.from_config(steps))
    resumed = torch.optim.AdamW(loaded.model.parameters(), lr=1e-2, fused=True)
    loaded.pipeline.apply(loaded.model, optimizer=resumed)
    resumed.load_state_dict(kept)
    train(loaded.model, resumed, batches[3:])
    train(plain, optimizer, batches[3:])
    assert loaded.model[0].weight.stride() == (27, 1, 9, 3)
    for ours, theirs in zip(loaded.model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_apply_on_a_meta_model_names_load():
    with pytest.raises(
        RefusedError, match=r"meta holds no data; load it with prepare\.checkpoint\.load"
    ):
        Pipeline.from_config({"device": {"device": "cpu"}}).apply(nn.Linear(2, 2, device="meta"))


# ------------------------------------------------------------------------------------ saving


def test_the_manifest_has_the_recipe_and_every_tensor(path):
    model = Awkward()
    save(model, path, pipeline=pipeline())
    beside = path.with_name(f"{path.name}.json")
    found = json.loads(beside.read_text())
    assert found["steps"] == pipeline().to_config()
    assert found["tied"] == {"head.weight": "embedding.weight"}
    state = model.state_dict()
    assert [row[0] for row in found["tensors"]] == [name for name in state if name != "head.weight"]
    rows = {name: (dtype, shape) for name, dtype, shape, _ in found["tensors"]}
    assert rows["table"] == ("float32", [3, 4])
    assert rows["phase"] == ("complex64", [1])
    beside.unlink()
    assert load(path, Awkward, rename=None, strict=False).pipeline.to_config() == {}
    with pytest.raises(CheckpointError, match=rf"has no {path.name}\.json beside it"):
        load(path, Awkward, check="always")


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


# ------------------------------------------------------------------------------------ export


def test_an_exported_model_has_only_classes_of_torch(tmp_path):
    torch.manual_seed(0)
    model = Awkward().eval()
    names = {name: id(p) for name, p in model.named_parameters()}
    classes = [type(module) for module in model.modules()]
    kept = model.conv.register_forward_hook(lambda *_: None)
    plain = {name: t.stride() for name, t in model.state_dict().items()}
    steps = {
        "conv2d_memory_format": {},
        "repair_layout": {"force": True},
        "input_format": {"attach": True},
    }
    image = torch.randn(2, 3, 9, 9)
    expected = model(image)
    Pipeline.from_config(steps | {"compile": {"backend": "eager"}}).apply(model)
    assert [type(module) for module in model.modules()] != classes
    assert export(model) is model
    assert [type(module) for module in model.modules()] == classes
    assert {name: t.stride() for name, t in model.state_dict().items()} == plain
    assert {name: id(p) for name, p in model.named_parameters()} == names
    assert not model._forward_pre_hooks
    assert model._compiled_call_impl is None
    assert kept.id in model.conv._forward_hooks
    kept.remove()
    assert torch.equal(model(image), expected)
    whole = small().append(nn.InstanceNorm2d(2))
    Pipeline.from_config(steps).apply(whole)
    torch.save(whole, tmp_path / "ours.pt")
    torch.save(export(whole), tmp_path / "theirs.pt")
    assert b"prepare" in (tmp_path / "ours.pt").read_bytes()
    assert b"prepare" not in (tmp_path / "theirs.pt").read_bytes()


def test_a_model_that_cannot_be_exported_stays_prepared():
    model = small()
    prepared = Pipeline.from_config({"conv2d_memory_format": {}, "compile": {"backend": "eager"}})
    prepared.apply(model)
    model.forward(torch.randn(1, 3, 5, 5)).sum().backward()
    before = state_of(model)
    with pytest.raises(RefusedError, match=r"holds a \.grad"):
        export(model)
    assert same_state(state_of(model), before)
    assert not prepared.plan(model)


# ------------------------------------------------------------------------------ networks of other packages


NETWORKS = sorted(
    path.stem for path in (Path(__file__).parents[2] / "conf" / "model").glob("*_*.yaml")
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("name", NETWORKS)
def test_every_configured_network_loads_as_apply_prepares_it(path, name):
    import yaml
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    config = yaml.safe_load(
        (Path(__file__).parents[2] / "conf" / "model" / f"{name}.yaml").read_text()
    )
    named = {k: v for k, v in config.get("model", config).items() if k not in ("defaults", "input")}

    def build():
        return instantiate(named, _convert_="all").eval()

    try:
        original = build()
    except InstantiationException as error:
        pytest.skip(f"cannot be built here: {str(error).splitlines()[0]}")
    save(original, path)
    steps = {"half": {"dtype": "bfloat16"}, "conv2d_memory_format": {}, "conv3d_memory_format": {}}
    prepared = Pipeline.from_config(steps | {"repair_layout": {}})
    loaded = load(path, build, pipeline=prepared).model
    assert_same(loaded, prepared.apply(original))
    assert [type(m) for m in loaded.modules()] == [type(m) for m in original.modules()]
    assert all(p.is_meta for p in build_empty(build).parameters())


# ------------------------------------------------------------------------------- the command line


RUN = ["model=unet2d", "device=cpu", "bench=none", "flow=none", "memfmt=channels_last"]
RUN += ["input.shape=[1,1,16,16]", "model.width=4", "model.depth=2"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("verify", ["none", "short"])
def test_a_job_loads_weights_first_and_saves_the_prepared_ones(here, verify, capsys):
    assert cli.run([*RUN, "verify=none", "seed=1", "save=first.safetensors"]) == 0
    argv = [*RUN, f"verify={verify}", "precision=bfloat16", "hydra.run.dir=out"]
    assert cli.run([*argv, "weights=first.safetensors", "save=second.pt"]) == 0
    said = capsys.readouterr().out
    assert "weights: those of first.safetensors" in said
    assert "weights: written to second.pt, with second.pt.json" in said
    first = safetensors.torch.load_file("first.safetensors")
    second = torch.load("second.pt", weights_only=True)
    weight = "encoder.0.conv1.weight"
    assert torch.equal(second[weight], first[weight].bfloat16())
    audit = json.loads((here / "out" / "audit.json").read_text())
    rows = {f"{row['module']}.{row['tensor']}": row for row in audit["rows"]}
    assert rows[weight]["before"] == {"stride": [9, 9, 3, 1], "dtype": "float32", "device": "cpu"}
    assert rows[weight]["status"] == "converted"
    assert rows["encoder.0.norm1.weight"]["status"] == "skipped"


def test_many_tensors_of_another_shape_are_one_line(here):
    save(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), "narrow.pt")
    wrong = (
        r"^narrow.pt: 6 tensors have another shape than in the model, first 0.weight: "
        r"\[2, 2\] in the file, \[4, 4\] in the model; give the file of this model, or build "
        r"the model with the sizes that it was saved with$"
    )
    with pytest.raises(CheckpointError, match=wrong):
        load("narrow.pt", nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))


def test_a_file_that_does_not_fit_fails_the_job_in_one_line(here, capsys):
    save(small(), "other.pt")
    assert cli.run([*RUN, "weights=other.pt"]) == 1
    said = capsys.readouterr().err
    assert "other.pt, encoder.0.conv1.weight: is not in the file\n" in said
    assert said.endswith(" more); give another file\n")
    Path("text.pt").write_text("hello")
    assert cli.run([*RUN, "weights=text.pt"]) == 1
    assert "text.pt: is neither a safetensors file nor one of torch's" in capsys.readouterr().err


def test_saving_weights_never_overwrites_a_file(here, capsys):
    Path("there.pt").write_text("mine")
    for argv, wrong in (
        (
            ["save=there.pt"],
            "save: there.pt is there already; move it away, or give another name\n",
        ),
        (
            ["save=nowhere/w.pt"],
            "save: nowhere/w.pt cannot be written; there is no folder nowhere\n",
        ),
        (["save=w.txt"], "save: w.txt has no suffix of weights; did you mean '.pt'?"),
        (["save=w.pt", "task=plan"], "save: task=plan does not prepare weights to save"),
        (["weights=ther.pt"], "weights: ther.pt is not there; did you mean there.pt?\n"),
        (["weights=."], "weights: . is a folder; give one of its files: there.pt\n"),
        (
            ["-m", "seed=1,2", "save=w.pt"],
            "save: 'w.pt' is one file for 2 runs; save from single runs",
        ),
    ):
        assert cli.run([*RUN, *argv]) == 2
        assert capsys.readouterr().err.startswith(wrong), argv
    assert [each.name for each in here.iterdir()] == ["there.pt"]
    assert Path("there.pt").read_text() == "mine"
