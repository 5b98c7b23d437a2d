"""The step rewrite_conv: what it takes, what it refuses, its choice by an example, layouts, and its undo."""

import copy

import pytest
import torch
from torch import nn

import prepare
from prepare import predict
from prepare.audit import Audit, audit
from prepare.errors import ConfigError, PatternError
from prepare.pipeline import Pipeline
from prepare.steps import repair_layout, rewrite_conv
from prepare.steps.repairs import all_rewrites, choose_rewrites
from prepare.steps.repairs.rewrites import LinearConv2d, LinearConv3d
from rewritten_modules import Causal, Served

EMPTY = {name: [] for name in all_rewrites()}
PATCH = (2, 4, 4)


class Tower(nn.Module):
    """Patches that are cut already, and layers after them."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Conv3d(3, 16, PATCH, PATCH)
        self.wide = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.proj(x.view(-1, 3, *PATCH)).view(-1, 16))


def pipeline(steps=None, **options):
    return Pipeline.from_config({"rewrite_conv": options, **(steps or {})})


def patches(number=6):
    return torch.randn(number, 3 * 2 * 4 * 4)


@pytest.fixture
def clock(monkeypatch):
    """Let the class of a convolution decide how long it takes: torch's own 2 s, a product 1 s, others 3 s."""
    seconds = {"": 2.0, **dict.fromkeys(all_rewrites(), 3.0), "linear": 1.0}

    def timed(timer, module, call, rewrites):
        return seconds[""], {each.name: seconds[each.name] / seconds[""] for each in rewrites}

    monkeypatch.setattr(choose_rewrites._Timer, "timed", timed)
    return seconds


def test_without_an_example_only_one_position_is_taken():
    model = Tower()
    x = patches()
    right = model(x)
    step = pipeline()
    plan = step.plan(model)
    assert [(action.step, action.modules) for action in plan.actions] == [
        ("rewrite_conv", ("proj",))
    ]
    step.apply(model)
    assert type(model.proj).__name__ == "OnePositionConv3d"
    assert type(model.wide) is nn.Conv2d
    assert torch.allclose(model(x), right, atol=1e-6)
    assert not step.plan(model)


def test_a_named_rewrite_is_taken_and_undone():
    model, x = Tower(), patches()
    parameters, right = dict(model.named_parameters()), model(x)
    step = pipeline(linear=["proj"])
    step.apply(model)
    assert type(model.proj) is LinearConv3d
    assert all(each is parameters[name] for name, each in model.named_parameters())
    assert model.state_dict().keys() == Tower().state_dict().keys()
    step.undo(model)
    assert type(model.proj) is nn.Conv3d
    assert torch.equal(model(x), right)
    assert vars(model.proj).keys() == vars(Tower().proj).keys()


def test_a_recipe_holds_the_choice(clock, tmp_path):
    model, step = nn.Sequential(Tower()), pipeline()
    step.apply(model, example=patches())
    chosen = step.steps["rewrite_conv"].to_options()
    assert chosen["linear"] == ["0.proj"]
    assert all(chosen[name] == [] for name in EMPTY if name != "linear")
    step.save(tmp_path / "recipe.yaml")
    again = Pipeline.load(tmp_path / "recipe.yaml").apply(nn.Sequential(Tower()))
    assert type(again[0].proj) is LinearConv3d


def test_the_fastest_of_several_rewrites_is_taken(clock, caplog):
    clock.update(linear=1.5, lower_rank=0.5)
    model = nn.Sequential(nn.Conv3d(3, 4, (1, 2, 2), (1, 2, 2)))
    pipeline().apply(model, example=torch.randn(1, 3, 2, 4, 4))
    assert type(model[0]).__name__ == "LowerRankConv3d"
    assert "1 convolution runs as a 2-d convolution: 4.0x faster there (1 timed in" in caplog.text


@pytest.mark.parametrize("is_named", [True, False])
def test_one_call_chooses_with_a_batch(clock, is_named):
    model, batch = Tower(), patches()
    prepared = prepare.prepare(model, example=batch) if is_named else prepare.prepare(model, batch)
    assert prepared is model
    assert type(model.proj) is LinearConv3d
    assert prepare.report(model, patches()).summary()["convolutions_rewritten"] == 1


class Tied(nn.Module):
    """Two convolutions with one weight, of which a rewrite fits the first only."""

    def __init__(self):
        super().__init__()
        self.patches, self.overlapping = nn.Conv2d(3, 4, 2, 2), nn.Conv2d(3, 4, 2)
        self.overlapping.weight = self.patches.weight

    def forward(self, x):
        return self.patches(x).sum() + self.overlapping(x).sum()


@pytest.mark.parametrize("force", [True, False])
def test_a_shared_weight_is_in_one_format(force, clock):
    for steps, kind in (({"conv2d_memory_format": {}}, nn.Conv2d), ({}, LinearConv2d)):
        model = Tied()
        pipeline(steps, force=force).apply(model, example=torch.randn(1, 3, 4, 4))
        assert type(model.patches) is kind
        assert model.patches.weight is model.overlapping.weight


def test_force_takes_all_that_fits():
    model = nn.Sequential(nn.Conv2d(3, 4, 2, 2), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3))
    pipeline(force=True).apply(model, example=torch.randn(1, 3, 8, 8))
    names = [type(each).__name__ for each in model]
    assert names == ["LinearConv2d", "PointwiseConv2d", "Conv2d"]


ERRORS = [
    ({"linear": ["porj"]}, PatternError, "linear", "did you mean 'proj'?"),
    ({"linear": ["wide"]}, ConfigError, "linear", "name a convolution that it fits"),
    ({"linaer": ["proj"]}, ConfigError, "linaer", "did you mean 'linear'?"),
    ({"linear": ["proj"], "one_position": ["proj"]}, ConfigError, "one_position", "name it once"),
]


@pytest.mark.parametrize(("options", "kind", "where", "remedy"), ERRORS)
def test_a_wrong_option_is_one_line(options, kind, where, remedy):
    with pytest.raises(kind) as error:
        pipeline(**options).plan(Tower())
    (problem,) = error.value.problems
    assert problem.where == f"steps.rewrite_conv.{where}"
    assert remedy in problem.remedy


class TestLayouts:
    """The weight is in the layout that the rewrite reads, and the result in that of the pipeline."""

    def test_the_weight_of_an_image_stays_contiguous(self):
        model = pipeline({"conv3d_memory_format": {}}, linear=["proj"]).apply(Tower())
        assert model.proj.weight.is_contiguous()
        model = pipeline({"conv3d_memory_format": {}}).apply(Tower())
        assert model.proj.weight.is_contiguous()

    def test_other_weights_have_the_format_of_the_pipeline(self):
        model = nn.Sequential(nn.Conv2d(8, 4, 2, 2))
        pipeline({"conv2d_memory_format": {}}, linear=["0"]).apply(model)
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)

    @pytest.mark.parametrize("order", [False, True])
    def test_a_contiguous_image_gives_channels_last(self, order):
        steps = {"rewrite_conv": {"linear": ["0"]}, "conv2d_memory_format": {}}
        steps = dict(reversed(steps.items())) if order else steps
        model = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 8, 3))
        Pipeline.from_config(steps).apply(model)
        assert model[0](torch.randn(2, 3, 16, 16)).is_contiguous(memory_format=torch.channels_last)
        rewrite_conv.undo(model)
        assert "in_channels_last" not in vars(model[0])


@pytest.mark.parametrize("first", ["repair_layout", "rewrite_conv"])
def test_repairs_and_rewrites_go_together_in_any_order(first, monkeypatch):
    served = Served(monkeypatch)
    options = {"repair_layout": {"force": True}, "rewrite_conv": {"one_frame": ["0"]}}
    steps = {first: options.pop(first), **options}
    model, x = nn.Sequential(Causal(16, 16, 3)), torch.randn(1, 16, 1, 8, 8)
    right, right_of_two = model(x), model(x.repeat(1, 1, 2, 1, 1))
    step = Pipeline.from_config(steps)
    step.apply(model)
    assert torch.allclose(model(x), right, atol=1e-5)
    assert served.count == 1
    assert torch.allclose(model(x.repeat(1, 1, 2, 1, 1)), right_of_two, atol=1e-5)
    assert not step.plan(model)
    both = copy.deepcopy(model)
    repair_layout.undo(model)
    assert torch.allclose(model(x), right, atol=1e-5)
    assert served.count == 2
    rewrite_conv.undo(both)
    assert "Keeping" in type(both[0]).__name__
    repair_layout.undo(both)
    rewrite_conv.undo(model)
    assert type(model[0]) is type(both[0]) is Causal
    assert torch.equal(model(x), right)


class TestSeen:
    """A rewrite is seen where a preparation is: audit, flow, plan and tune."""

    def test_the_audit_names_the_operation_of_each_convolution(self, tmp_path):
        model = pipeline(linear=["proj"]).apply(Tower())
        operations = {row.path: row.operation for row in audit(model).rows}
        assert operations["proj.weight"] == "linear"
        assert operations["wide.weight"] == "conv2d"
        assert operations["proj.bias"] == operations["head.weight"] == ""
        audit(model).save(tmp_path / "audit.json")
        again = Audit.load(tmp_path / "audit.json")
        assert [row.operation for row in again.rows] == [*operations.values()]

    @pytest.mark.parametrize("attach", [True, False])
    def test_the_layout_flow_has_no_break_after_a_product(self, attach):
        model = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 8, 3), nn.ReLU())
        steps = {
            "conv2d_memory_format": {},
            **({"input_format": {"attach": True}} if attach else {}),
        }
        pipeline(steps, linear=["0"]).apply(model)
        flow = predict(model, torch.randn(2, 3, 16, 16))
        assert (flow.status, flow.summary["breaks"]) == ("ok", 0)

    def test_a_plan_names_the_issue_and_the_step_until_it_is_there(self):
        steps = {"conv3d_memory_format": {}}
        (warning,) = Pipeline.from_config(steps).plan(Tower()).warnings
        assert str(warning) == (
            "Conv3d (proj): a kernel that is its stride (patches, tubelets) is a matrix product, and may be "
            "several times slower as a convolution [conv_kernel_is_stride]; add the step rewrite_conv"
        )
        assert not pipeline(steps, linear=["proj"]).plan(Tower()).warnings


CHANGES = {
    "padding_mode": lambda conv: vars(conv).update(
        padding_mode="circular",
        _reversed_padding_repeated_twice=[n for n in reversed(conv.padding) for _ in range(2)],
    ),
    "stride": lambda conv: setattr(conv, "stride", (2,) * len(conv.stride)),
    "a number as stride": lambda conv: setattr(conv, "stride", 2),
    "a list as padding": lambda conv: setattr(conv, "padding", [2] * len(conv.padding)),
    "same": lambda conv: vars(conv).update(padding="same", stride=(1,) * len(conv.stride)),
    "dilation": lambda conv: setattr(conv, "dilation", (*conv.dilation[:-1], 2)),
    "a larger kernel": lambda conv: setattr(
        conv, "weight", nn.Parameter(conv.weight.detach().repeat_interleave(2, -1))
    ),
    "fewer outputs": lambda conv: vars(conv)["_parameters"].update(
        weight=nn.Parameter(conv.weight[:4].detach()), bias=None
    ),
}
LATE = {
    "linear": (lambda: nn.Conv2d(3, 16, 4, 4), (2, 3, 16, 16)),
    "pointwise": (lambda: nn.Conv3d(8, 16, 1), (2, 8, 4, 6, 6)),
    "lower_rank": (lambda: nn.Conv3d(8, 8, (1, 3, 3), padding=(0, 1, 1)), (2, 8, 4, 8, 8)),
    "one_frame": (lambda: nn.Conv3d(8, 8, 3, padding=1), (2, 8, 1, 8, 8)),
    "conv2d": (lambda: nn.Conv2d(512, 512, 1), (1, 512, 3, 3)),
    "conv3d": (lambda: nn.Conv3d(8, 16, 3, padding=1), (1, 8, 6, 8, 8)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("is_early", [False, True], ids=["set later", "set before"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", LATE)
def test_what_is_set_on_a_convolution_is_read_in_each_call(name, change, is_early):
    torch.manual_seed(0)
    make, shape = LATE[name]
    model, x = nn.Sequential(make()).eval(), torch.randn(shape)
    steps = {"conv2d_memory_format": {}, "repair_layout": {"force": True}}
    steps |= {"conv3d_memory_format": {}, "rewrite_conv": {"force": True}}
    prepared = copy.deepcopy(model)
    CHANGES[change](model[0])
    if is_early:
        CHANGES[change](prepared[0])
    Pipeline.from_config(steps).apply(prepared, strict=False)
    if not is_early:
        assert type(prepared[0]).__mro__[1:] != type(model[0]).__mro__
        CHANGES[change](prepared[0])
    assert prepared(x).shape == model(x).shape
    assert (prepared(x) - model(x)).abs().max() < 1e-4 * model(x).abs().max()


@pytest.mark.parametrize(
    ("conv", "reason"),
    [
        (nn.Conv3d(4, 4, (1, 3, 3), dilation=(1, 2, 2), groups=4), "groups"),
        (nn.Conv3d(4, 4, (3, 1, 1), dilation=(2, 1, 1), groups=2), "groups"),
        (nn.Conv3d(2, 4, (1, 2, 2), stride=(1, 1, 3), groups=2), "stride"),
        (nn.Conv3d(4, 4, (1, 2, 1), padding=(0, 1, 1)), "padding"),
        (nn.Conv3d(4, 4, (3, 1, 1), padding=(3, 0, 0)), "padding"),
    ],
)
def test_what_torchs_2d_convolutions_break_on_stays_in_3d(conv, reason):
    with pytest.raises(ConfigError, match=f"it does not fit .*{reason}"):
        Pipeline.from_config({"rewrite_conv": {"lower_rank": ["re:.*"]}}).apply(conv)
    assert type(Pipeline.from_config({"rewrite_conv": {"force": True}}).apply(conv)) is nn.Conv3d
