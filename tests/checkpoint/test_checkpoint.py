"""Checkpoints: saved, and loaded straight into a prepared model, with little memory."""

import gc
import json
import os
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from checkpoint_nets import (
    FORMATS,
    NOTHING,
    Awkward,
    FromItsWeights,
    NeedsItsWeights,
    assert_same,
    pipeline,
    same_state,
    small,
    small_bytes,
    small_like,
    state_of,
)
from prepare.checkpoint import load, save
from prepare.checkpoint.init_empty import build_empty, empty_parameters
from prepare.checkpoint.stored_tensor import drop_pages, is_mapped_file
from prepare.errors import CheckpointError, RefusedError
from prepare.pipeline import Pipeline


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


@pytest.mark.slow
def test_a_sharded_checkpoint_of_transformers_loads_with_tied_weights(tmp_path):
    transformers = pytest.importorskip("transformers")
    BertForMaskedLM = transformers.BertForMaskedLM
    config = transformers.BertConfig(
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
    os.mkfifo(tmp_path / "pipe")
    index = tmp_path / "m.safetensors.index.json"
    for shard, wrong in (
        ("../a.safetensors", "not in its folder"),
        ("/etc/passwd", "not in its folder"),
        ("b.safetensors", "cannot be read: No such file or directory; did you mean"),
        ("", "names the file '', which is not in its folder"),
        ("n" * 300, "n..., which is not in its folder"),
        ("\ud800", "cannot be read: .*surrogates not allowed"),
        ("a\0", "cannot be read: embedded null byte"),
        (".", "not in its folder"),
        ("pipe", "cannot be read: Not a regular file"),
    ):
        index.write_text(json.dumps({"weight_map": {"0.weight": shard}}))
        with pytest.raises(CheckpointError, match=wrong) as caught:
            load(index, small)
        assert str(caught.value).isprintable()
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


@pytest.mark.slow
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


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="Linux tells what is mapped")
def test_only_a_tensor_of_a_file_is_mapped_from_one(tmp_path):
    path = tmp_path / "values"
    path.write_bytes(bytes(range(256)) * 64)
    storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=1 << 14)
    tensor = torch.asarray(storage, dtype=torch.uint8)
    assert is_mapped_file(tensor)
    assert not is_mapped_file(tensor.clone())
    before = tensor.clone()
    drop_pages(tensor)
    assert torch.equal(tensor, before)


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
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 3)))
    with pytest.raises(RefusedError, match="load first, then script or trace it"):
        load(path, scripted)


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


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_model_without_tensors_is_saved_and_loaded(tmp_path, suffix):
    path = tmp_path / f"model.{suffix}"
    save(nn.Sequential(nn.ReLU()), path)
    assert load(path, nn.Sequential(nn.ReLU())).missing == ()
    torch.save({}, tmp_path / "empty.pt")
    with pytest.raises(CheckpointError, match="does not hold a mapping of names to tensors"):
        load(tmp_path / "empty.pt", nn.ReLU())
