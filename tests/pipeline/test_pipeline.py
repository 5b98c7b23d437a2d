"""Declare, plan and apply: accepted and refused configurations, and what stays unchanged."""

import pytest
import torch
from torch import nn

from prepare.errors import (
    ConfigError,
    ConflictError,
    NothingMatchesError,
    PatternError,
    RefusedError,
    StepError,
    UnknownStepError,
)
from prepare.pipeline import Pipeline
from prepare.registry import STEPS
from prepare.step import ModelStep, ModuleStep, TensorStep, Want
from small_nets import Tied, bits, clone, facts, mixed, same, small_2d, small_3d

BOTH = {"half": {}, "conv2d_memory_format": {}}


# Declaring


def test_null_drops_a_step_and_an_empty_mapping_takes_its_defaults():
    pipeline = Pipeline.from_config({"half": None, "conv2d_memory_format": {}})
    assert pipeline.to_config() == {
        "conv2d_memory_format": {"memory_format": "channels_last", "include": [], "exclude": []}
    }


def test_a_configuration_round_trips():
    declared = {"half": {"dtype": "bf16", "keep": ["type:LayerNorm", "norms"]}, "input_format": {}}
    config = Pipeline.from_config(declared).to_config()
    assert Pipeline.from_config(config).to_config() == config
    assert config["half"] == {"dtype": "bfloat16", "keep": ["type:LayerNorm", "norms"]}


def test_a_recipe_gives_the_same_pipeline_without_hydra(tmp_path):
    pipeline = Pipeline.from_config({"device": {}, **BOTH, "input_format": {"attach": True}})
    pipeline.save(tmp_path / "recipe.yaml")
    assert Pipeline.load(tmp_path / "recipe.yaml").to_config() == pipeline.to_config()
    assert "keep: norms" in (tmp_path / "recipe.yaml").read_text()
    moved = Pipeline.load(tmp_path / "recipe.yaml", device="meta").to_config()
    assert moved == pipeline.to_config() | {"device": {"device": "meta"}}


def test_device_auto_is_resolved_when_the_pipeline_is_built():
    resolved = Pipeline.from_config({"device": {"device": "auto"}}).to_config()["device"]["device"]
    assert resolved in ("cpu", "cuda", "mps")
    assert Pipeline.from_config({"device": {}}).to_config()["device"]["device"] == resolved


def test_omegaconf_containers_become_plain_data():
    """No DictConfig or ListConfig may leak into a step, a plan or a recipe."""
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create(
        {
            "d": "bfloat16",
            "steps": {"half": {"dtype": "${d}", "keep": ["type:LayerNorm"]}, "device": None},
        }
    )
    pipeline = Pipeline.from_config(config.steps)
    assert pipeline.steps["half"].dtype == "bfloat16"

    def plain(value):
        assert type(value).__module__ == "builtins", type(value)
        for item in (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        ):
            plain(item)

    plain(pipeline.to_config())
    for field in ("dtype", "keep"):
        assert type(getattr(pipeline.steps["half"], field)).__module__ == "builtins"


def test_a_missing_or_broken_interpolation_is_one_clear_error():
    omegaconf = pytest.importorskip("omegaconf")
    for value, message in (("???", "dtype"), ("${nowhere}", "nowhere")):
        config = omegaconf.OmegaConf.create({"half": {"dtype": value}})
        with pytest.raises(ConfigError, match=f"steps.half: .*{message}"):
            Pipeline.from_config(config)


@pytest.mark.parametrize(
    "word",
    ["float16", "half", "fp16", "FP16", "torch.float16", torch.float16],
)
def test_dtypes_accept_torch_objects_and_common_spellings(word):
    assert Pipeline.from_config({"half": {"dtype": word}}).to_config()["half"]["dtype"] == "float16"


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("channels_last", "channels_last"),
        ("nhwc", "channels_last"),
        ("cl", "channels_last"),
        (torch.channels_last, "channels_last"),
        ("torch.channels_last", "channels_last"),
        ("nchw", "contiguous"),
        (torch.contiguous_format, "contiguous"),
    ],
)
def test_memory_formats_accept_torch_objects_and_spellings(word, meant):
    config = Pipeline.from_config({"conv2d_memory_format": {"memory_format": word}}).to_config()
    assert config["conv2d_memory_format"]["memory_format"] == meant


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "steps: list is not a mapping; give {name: options}"),
        (
            {"hlaf": {}},
            "steps.hlaf: no such step; did you mean 'half'? steps: " + ", ".join(STEPS),
        ),
        (
            {"half": 3},
            "steps.half: 3 is not a mapping of options; give them as {OPTION:value}, or null to drop the step",
        ),
        (
            {"half": {"dtpye": "float16"}},
            "steps.half.dtpye: no such option; did you mean 'dtype'? options: dtype, keep",
        ),
        (
            {"half": {"dtype": "flaot16"}},
            "steps.half.dtype: 'flaot16' is not allowed; did you mean 'float16'? "
            "allowed: float16, bfloat16",
        ),
        (
            {"half": {"dtype": 16}},
            "steps.half.dtype: 16 is not allowed; allowed: float16, bfloat16",
        ),
        (
            {"half": {"keep": 3}},
            "steps.half.keep: 3 is not allowed; give norms or a list of patterns",
        ),
        (
            {"half": {"keep": ["re:("]}},
            "steps.half.keep: 're:(' is not a regular expression: missing ), unterminated subpattern at position 0",
        ),
        ({"half": {"keep": [""]}}, "steps.half.keep: '' is an empty pattern"),
        ({"half": {"keep": ["type:"]}}, "steps.half.keep: 'type:' is an empty pattern"),
        (
            {"conv3d_memory_format": {"memory_format": "channels_last"}},
            "steps.conv3d_memory_format.memory_format: 'channels_last' is not allowed; "
            "did you mean 'channels_last_3d'? allowed: contiguous, channels_last_3d",
        ),
        (
            {"device": {"device": "cudaa"}},
            "steps.device.device: 'cudaa' is not a device; did you mean 'cuda'? "
            "allowed: auto, cpu, cuda, mps, xpu, meta",
        ),
        (
            {"input_format": {"attach": "yes"}},
            "steps.input_format.attach: 'yes' is not allowed; give true or false",
        ),
    ],
)
def test_a_configuration_error_says_where_what_and_the_remedy(steps, message):
    with pytest.raises(ConfigError) as caught:
        Pipeline.from_config(steps)
    assert str(caught.value) == message


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        Pipeline.from_config({"half": {"dtype": 1, "x": 2}, "nothing": {}, "device": {"device": 3}})
    assert [problem.where for problem in caught.value.problems] == [
        "steps.half.dtype",
        "steps.half.x",
        "steps.nothing",
        "steps.device.device",
    ]


def test_an_unknown_step_holds_its_data():
    with pytest.raises(UnknownStepError) as caught:
        STEPS["haf"]
    assert caught.value.problems[0].where == "steps.haf"


# Precision


def test_half_keeps_batch_and_instance_norms_in_float32():
    model = nn.ModuleDict({"flat": small_2d(), "deep": small_3d()})
    Pipeline.from_config({"half": {}}).apply(model)
    kept = {name for name, t in model.state_dict().items() if t.dtype is torch.float32}
    assert kept == {
        "flat.1.weight", "flat.1.bias", "flat.1.running_mean", "flat.1.running_var",
        "deep.1.weight", "deep.1.bias",
    }  # fmt: skip
    assert all(b.dtype is torch.float32 for n, b in model.named_buffers() if "running" in n)
    assert model["flat"].eval()(torch.randn(1, 3, 8, 8).half()).isfinite().all()


def test_a_running_variance_above_65504_survives_half():
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2)).eval()
    model[1].running_var.fill_(7e4)
    x = torch.randn(1, 3, 4, 4)
    reference = model(x)
    Pipeline.from_config({"half": {}}).apply(model)
    assert torch.allclose(model(x.half()).float(), reference, rtol=0.05, atol=1e-3)
    assert reference.abs().max() > 0


def test_half_with_nothing_kept_is_exactly_half():
    model = mixed()
    same(Pipeline.from_config({"half": {"keep": []}}).apply(model), clone(model).half())


def test_integers_booleans_and_complex_tensors_are_never_cast():
    model = mixed()
    model.register_buffer("ids", torch.arange(4096))
    before = {name: (t.dtype, bits(t)) for name, t in model.state_dict().items()}
    Pipeline.from_config({"half": {"keep": []}}).apply(model)
    for name in ("ids", "count", "mask", "phase"):
        assert (model.state_dict()[name].dtype, bits(model.state_dict()[name])) == before[name]
    assert model.ids.unique().numel() == 4096
    assert model.phase.imag.abs().max() > 0


# Patterns


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("flat.*", {"flat.0", "flat.3", "flat.4"}),
        ("*.0", {"flat.0"}),
        ("type:ConvTranspose2d", {"flat.4"}),
        ("type:_ConvNd", {"flat.0", "flat.3", "flat.4", "tied.encoder", "tied.decoder"}),
        ("re:flat\\.[03]", {"flat.0", "flat.3"}),
        ("tied.encoder", {"tied.encoder", "tied.decoder"}),
    ],
)
def test_an_exclusion_covers_its_matches_and_tensors_tied_to_them(pattern, meant):
    model = mixed()
    plan = Pipeline.from_config({"conv2d_memory_format": {"exclude": [pattern]}}).plan(model)
    off = {t.module for t in plan.tensors if t.off}
    assert off == meant
    assert not any(t.changes for t in plan.tensors if t.module in meant)


def test_a_pattern_does_not_match_a_substring():
    model = nn.Sequential(*(nn.Conv2d(2, 2, 3) for _ in range(12)))
    Pipeline.from_config({"conv2d_memory_format": {"exclude": ["1"]}}).apply(model)
    left = [n for n, m in model.named_children() if m.weight.is_contiguous()]
    assert left == ["1"]


def test_include_narrows_and_exclude_wins():
    model = mixed()
    options = {"include": ["flat.*"], "exclude": ["flat.3"]}
    Pipeline.from_config({"conv2d_memory_format": options}).apply(model)
    assert model["flat"][0].weight.stride(1) == 1
    assert model["flat"][3].weight.stride() == (8, 1, 1, 1)
    assert model["tied"].encoder.weight.is_contiguous()


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("flatt.*", "'flat.*'"),
        ("flat", "'flat.*'"),
        ("type:Conv2", "'type:Conv2d'"),
        ("tied.encodr", "'tied.encoder'"),
        ("type:BatchNorm2d", "'type:"),
    ],
)
def test_an_unmatched_pattern_is_an_error_with_near_misses(pattern, near):
    model = mixed()
    before = facts(model)
    pipeline = Pipeline.from_config({"conv2d_memory_format": {"exclude": [pattern]}})
    with pytest.raises(PatternError, match="matches no module that conv2d_memory_format") as caught:
        pipeline.apply(model)
    assert f"did you mean {near}" in str(caught.value)
    assert facts(model) == before
    pipeline.apply(model, strict=False)
    assert model["flat"][0].weight.stride(1) == 1


def test_the_word_norms_may_match_nothing():
    model = nn.Sequential(nn.Conv2d(1, 1, 1))
    assert Pipeline.from_config({"half": {}}).apply(model)[0].weight.dtype is torch.float16


# Requests without effect


def test_a_format_without_any_match_is_an_error_with_a_suggestion():
    from prepare.models.unet import UNet3d

    model = UNet3d(in_channels=1, out_channels=2, width=2)
    with pytest.raises(NothingMatchesError) as caught:
        Pipeline.from_config({"half": {}, "conv2d_memory_format": {}}).apply(model)
    assert str(caught.value) == (
        "steps.conv2d_memory_format: UNet3d has no Conv2d and 18 Conv3d; "
        'did you mean the step "conv3d_memory_format": {}?'
    )
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "and nothing is half done"


def test_the_formats_of_a_pipeline_are_one_request():
    model = small_2d()
    Pipeline.from_config({"conv2d_memory_format": {}, "conv3d_memory_format": {}}).apply(model)
    assert model[0].weight.stride(1) == 1
    with pytest.raises(NothingMatchesError, match="Linear has no Conv2d and no Conv3d"):
        Pipeline.from_config({"conv2d_memory_format": {}, "conv3d_memory_format": {}}).apply(
            nn.Linear(1, 1)
        )


def test_strict_false_reports_a_dead_request_and_does_the_rest():
    model = small_3d()
    pipeline = Pipeline.from_config({"half": {}, "conv2d_memory_format": {}})
    pipeline.apply(model, strict=False)
    assert model[0].weight.dtype is torch.float16
    assert 'did you mean the step "conv3d_memory_format"' in str(pipeline.plan(model).errors[0])


# Conflicts and refusals


def test_a_conflict_of_two_steps_names_both(plugin):
    @plugin("brain")
    class Brain(TensorStep):
        """Casts all to bfloat16."""

        def want(self, tensor):
            return Want(dtype=torch.bfloat16)

    model = nn.Linear(2, 2)
    with pytest.raises(ConflictError) as caught:
        Pipeline.from_config({"half": {}, "brain": {}}).plan(model)
    assert [str(problem) for problem in caught.value.problems] == [
        f"{name}: half wants float16, and brain wants bfloat16; drop one step, or exclude the module"
        for name in ("weight", "bias")
    ]


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:99", "cuda:99 is not available here; available: cpu"),
        ("meta", "meta holds no data; build the model there"),
    ],
)
def test_an_unavailable_device_is_refused(device, message):
    model = nn.Linear(2, 2)
    before = facts(model)
    with pytest.raises(RefusedError, match=message):
        Pipeline.from_config({"device": {"device": device}}).apply(model)
    assert facts(model) == before


@pytest.mark.parametrize(
    ("want", "message"),
    [
        (
            Want(memory_format="channels_last"),
            "returned channels_last for a tensor of 2 dimensions",
        ),
        (
            Want(memory_format="diagonal"),
            "returned the memory format 'diagonal', which is not one of",
        ),
        (Want(dtype="float17"), "returned the dtype 'float17', which torch does not have"),
        ("float16", "want\\(\\) returned 'float16'; return a Want or None"),
        (None, None),
    ],
)
def test_a_step_that_wants_the_impossible_is_at_fault(plugin, want, message):
    @plugin("odd")
    class Odd(TensorStep):
        """Wants the parametrized value."""

        def want(self, tensor):
            return want

    pipeline = Pipeline.from_config({"odd": {}})
    if message is None:
        assert not pipeline.plan(nn.Linear(2, 2))
        return
    with pytest.raises(StepError, match=f"steps.odd: .*{message}"):
        pipeline.plan(nn.Linear(2, 2))


def test_a_step_that_raises_is_named_with_the_tensor(plugin):
    @plugin("broken")
    class Broken(TensorStep):
        """Raises."""

        def want(self, tensor):
            raise KeyError(tensor.name)

    with pytest.raises(
        StepError, match="steps.broken: want\\(\\) raised on weight: KeyError: 'weight'"
    ):
        Pipeline.from_config({"broken": {}}).plan(nn.Linear(2, 2))


# Structure and runtime steps


@pytest.fixture
def marks(plugin):
    """Two structure steps that note their order, and a runtime step."""

    def structure(name):
        @plugin(name)
        class Mark(ModuleStep):
            """Notes its name on every linear layer."""

            def targets(self, model):
                linear = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
                return [n for n, m in linear if name not in getattr(m, "marks", ())]

            def rewrite(self, model, path):
                module = model.get_submodule(path)
                module.marks = (*getattr(module, "marks", ()), name)
                return {path: module}

        return Mark

    structure("first")
    structure("second")

    @plugin("flag")
    class Flag(ModelStep):
        """Sets a flag."""

        def targets(self, model):
            return () if getattr(model, "flag", False) else ("",)

        def act(self, model):
            model.flag = True


def test_structure_steps_run_in_the_order_of_the_mapping(marks):
    for order in (["first", "second"], ["second", "first"]):
        model = nn.Sequential(nn.Linear(1, 1))
        Pipeline.from_config({name: {} for name in order}).apply(model)
        assert list(model[0].marks) == order


def test_a_plan_of_structure_steps_works_on_a_copy_of_the_tree(marks):
    model = nn.Sequential(nn.Linear(1, 1))
    pipeline = Pipeline.from_config({"flag": {}, "first": {}, "half": {}})
    plan = pipeline.plan(model)
    assert [(a.step, a.phase, a.modules) for a in plan.actions] == [
        ("first", "structure", ("0",)),
        ("flag", "runtime", ("",)),
    ]
    assert not hasattr(model[0], "marks")
    pipeline.apply(model)
    assert (model[0].marks, model.flag) == (("first",), True)
    assert not pipeline.plan(model)


def test_a_replacement_module_is_prepared_too(plugin):
    @plugin("swap")
    class Swap(ModuleStep):
        """Puts a linear layer in the place of every identity."""

        def targets(self, model):
            return [n for n, m in model.named_modules() if isinstance(m, nn.Identity)]

        def rewrite(self, model, name):
            return {name: nn.Linear(2, 2)}

    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity()))
    Pipeline.from_config({"swap": {}, "half": {}}).apply(model)
    assert model[0].weight.dtype is model[1][0].weight.dtype is torch.float16


def test_a_failure_in_a_later_step_leaves_the_model_as_it_was(marks, plugin):
    @plugin("fails")
    class Fails(ModelStep):
        """Raises when it acts."""

        def targets(self, model):
            return ("",)

        def act(self, model):
            model.half_done = True
            raise RuntimeError("no")

    model = nn.Sequential(nn.Linear(1, 1), nn.Conv2d(2, 2, 3))
    before = facts(model)
    with pytest.raises(RuntimeError, match="no"):
        Pipeline.from_config(
            {"first": {}, "half": {}, "conv2d_memory_format": {}, "fails": {}}
        ).apply(model)
    assert facts(model) == before
    assert not hasattr(model[0], "marks")
    assert not hasattr(model, "half_done")


def test_a_step_that_never_finishes_is_at_fault(plugin):
    @plugin("endless")
    class Endless(ModelStep):
        """Always has a target."""

        def targets(self, model):
            return ("",)

        def act(self, model):
            pass

    with pytest.raises(StepError, match="steps.endless: still has work to do"):
        Pipeline.from_config({"endless": {}}).apply(nn.Linear(1, 1))


# Identity of tensors


def test_the_plan_as_plain_data_has_bytes_steps_and_reasons():
    import json

    plan = Pipeline.from_config({"device": {"device": "cpu"}, **BOTH}).plan(small_2d())
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["format"] == "prepare.plan"
    first = next(t for t in data["tensors"] if (t["module"], t["tensor"]) == ("0", "weight"))
    assert first["old"] == {"stride": [27, 9, 3, 1], "dtype": "float32", "device": "cpu"}
    assert first["new"] == {"stride": [27, 1, 9, 3], "dtype": "float16", "device": "cpu"}
    wanted_by = {"device": ["device"], "dtype": ["half"], "memory_format": ["conv2d_memory_format"]}
    assert first["by"] == wanted_by
    assert data["summary"]["by_step"] == {"conv2d_memory_format": 3, "half": 6}, (
        "device has nothing to do"
    )
    assert (first["bytes_old"], first["bytes_new"]) == (8 * 27 * 4, 8 * 27 * 2)
    norm = next(t for t in data["tensors"] if (t["module"], t["tensor"]) == ("1", "weight"))
    assert norm["off"] == {"half": "keep: norms"}
    assert (
        data["summary"]["bytes_before"] - data["summary"]["bytes_after"]
        == data["summary"]["bytes_written"]
    )


def test_a_tied_tensor_is_moved_once_and_counted_once():
    plan = Pipeline.from_config({"half": {}}).plan(Tied())
    assert plan.summary()["to_change"] == 4
    assert plan.summary()["bytes_after"] == (4 * 4 * 9 + 4 + 4 + 24) * 2 + 3 * 8


def test_each_tensor_is_allocated_once_and_copied_once(monkeypatch):
    counts = {"empty": 0, "copy": 0}
    real = torch.empty_strided
    monkeypatch.setattr(
        torch,
        "empty_strided",
        lambda *a, **k: counts.update(empty=counts["empty"] + 1) or real(*a, **k),
    )
    model = small_2d()
    pipeline = Pipeline.from_config(
        {"device": {"device": "cpu"}, "half": {"keep": []}, "conv2d_memory_format": {}}
    )
    from torch.utils._python_dispatch import TorchDispatchMode

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts["copy"] += "copy_" in func.__name__
            return func(*args, **(kwargs or {}))

    with Copies():
        pipeline.apply(model)
    floats = sum(t.is_floating_point() for t in model.state_dict().values())
    assert counts == {"empty": floats, "copy": floats}


def test_requires_grad_and_hooks_of_parameters_are_kept():
    model = small_2d()
    model[0].weight.requires_grad_(requires_grad=False)
    seen = []
    model[3].weight.register_hook(seen.append)
    Pipeline.from_config({"half": {"dtype": "bfloat16"}, "conv2d_memory_format": {}}).apply(model)
    assert [p.requires_grad for p in model.parameters()].count(False) == 1
    model(torch.randn(2, 3, 8, 8).bfloat16()).float().sum().backward()
    assert len(seen) == 1
    assert model[0].weight.grad is None
