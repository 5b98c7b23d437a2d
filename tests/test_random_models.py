"""Models and pipelines made by chance: what is promised of one holds for all of them."""

import copy
import pickle
import re
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from networks import facts, same, tensors
from torch import nn
from torch.nn.utils import (
    convert_conv2d_weight_memory_format,
    convert_conv3d_weight_memory_format,
    parametrizations,
    parametrize,
    prune,
)

from prepare import recipe
from prepare.audit import audit
from prepare.errors import RefusedError
from prepare.patterns import matches
from prepare.pipeline import Pipeline

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")

# ------------------------------------------------------------------------------------------- models

WRAPPERS = {
    "as it is": lambda conv: conv,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "pruned": lambda conv: prune.l1_unstructured(conv, "weight", 0.5),
}
# Where the weight itself is computed, the tensors that it is computed from.
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BEHIND = ("weight_g", "weight_v", "weight_orig", "weight_mask")


@dataclass(frozen=True)
class Conv:
    """A convolution; one channel, depthwise, grouped and 1x1 are among them."""

    rank: int
    transposed: bool
    groups: int
    into: int
    out: int
    kernel: int
    bias: bool
    wrapper: str

    def build(self):
        cls = getattr(nn, f"Conv{'Transpose' * self.transposed}{self.rank}d")
        sizes = (self.groups * self.into, self.groups * self.out, self.kernel)
        return WRAPPERS[self.wrapper](cls(*sizes, groups=self.groups, bias=self.bias))


class Standardized(nn.Conv2d):
    """Computes its weight in a forward of its own."""

    def forward(self, x):
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


class Keeper(nn.Linear):
    """Never lets its bias be cast."""

    def _apply(self, fn, recurse=True):
        bias = self.bias.data
        super()._apply(fn, recurse)
        self.bias.data = bias
        return self


OTHERS = {
    "linear": lambda: nn.Linear(2, 3),
    "embedding": lambda: nn.Embedding(3, 2),
    "batch norm": lambda: nn.BatchNorm2d(2),
    "batch norm without weights": lambda: nn.BatchNorm3d(2, affine=False),
    "batch norm without statistics": lambda: nn.BatchNorm1d(2, track_running_stats=False),
    "instance norm": lambda: nn.InstanceNorm3d(2, affine=True, track_running_stats=True),
    "bare instance norm": lambda: nn.InstanceNorm2d(2),
    "group norm": lambda: nn.GroupNorm(1, 2),
    "layer norm": lambda: nn.LayerNorm(2),
    "attention": lambda: nn.MultiheadAttention(2, 1),
    "own forward": lambda: Standardized(2, 2, 3),
    "own cast": lambda: Keeper(2, 3),
    "nothing": nn.ReLU,
}
NAMES = ("a", "weight", "encoder")
CONTAINERS = {
    "Sequential": lambda children: nn.Sequential(*children),
    "ModuleList": nn.ModuleList,
    "ModuleDict": lambda children: nn.ModuleDict(dict(zip(NAMES, children, strict=False))),
}
BUFFERS = {
    "int64": lambda: torch.arange(3),
    "bool": lambda: torch.tensor([True, False]),
    "complex64": lambda: torch.randn(2, dtype=torch.complex64),
    "float64": lambda: torch.randn(2, 2, dtype=torch.float64),
    "bfloat16": lambda: torch.randn(2).bfloat16(),
    "one number": lambda: torch.tensor(0.5),
    "no numbers": lambda: torch.empty(0, 2),
}
PARAMETERS = {
    "4-d": lambda: torch.randn(2, 2, 3, 3),
    "5-d": lambda: torch.randn(1, 2, 2, 2, 2),
    "4-d in channels_last": lambda: torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(2, 3).T,
    "sliced": lambda: torch.randn(2, 4, 3, 3)[:, ::2],
    "float64": lambda: torch.randn(2, dtype=torch.float64),
    "complex64": lambda: torch.randn(2, 2, dtype=torch.complex64),
}


def hook(module, *_):
    """A hook that does nothing, and can be pickled."""


def own_modules(model):
    """Every module but those that torch makes for parametrizations."""
    inner = {
        id(part)
        for module in model.modules()
        if parametrize.is_parametrized(module)
        for part in module.parametrizations.modules()
    }
    return [module for module in model.modules() if id(module) not in inner]


def places(model):
    """`(table, name, tensor)` of every place of every parameter and buffer."""
    tables = (table for m in model.modules() for table in (m._parameters, m._buffers))
    found = ((table, name, tensor) for table in tables for name, tensor in table.items())
    return [place for place in found if place[2] is not None]


def of_two_tensors(change):
    """A deed done to two parameters, or two buffers, of one shape and type; if there are two."""

    def deed(model, first, second):
        held = places(model)
        table, name, one = held[first % len(held)] if held else ({}, "", torch.empty(0))
        alike = [
            other
            for *_, other in held
            if other is not one
            and (type(other), other.shape, other.dtype) == (type(one), one.shape, one.dtype)
        ]
        if alike:
            change(table, name, alike[second % len(alike)])

    return deed


def tie(table, name, other):
    table[name] = other


def alias(table, name, other):
    held = other.data
    table[name] = nn.Parameter(held, other.requires_grad) if is_parameter(other) else held


def is_parameter(tensor):
    return isinstance(tensor, nn.Parameter)


def as_views(table, name, other):
    flat = torch.cat([table[name].detach().reshape(-1), other.detach().reshape(-1)])
    table[name].data, other.data = (half.view(other.shape) for half in flat.chunk(2))


def of_module(change):
    """A deed done to one module."""

    def deed(model, first, second):
        modules = own_modules(model)
        change(modules[first % len(modules)])

    return deed


def share(model, first, second):
    """Lets a module stand in one more place, but never inside itself."""
    modules = own_modules(model)
    holders = [m for m in modules if type(m).__name__ in CONTAINERS]
    module = modules[second % len(modules)]
    if holders and (holder := holders[first % len(holders)]) not in set(module.modules()):
        holder.add_module(f"again{len(holder)}", module)


def slice_weight(module):
    if isinstance(module, CONVOLUTIONS) and not is_computed(module):
        wider = torch.cat([module.weight, module.weight], dim=1)
        module.weight = nn.Parameter(wider[:, ::2])


def lay_out(module):
    for tensor in tensors(module).values():
        if tensor.dim() in (4, 5):
            memory_format = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
            tensor.data = tensor.data.contiguous(memory_format=memory_format)


def is_computed(module):
    """Whether torch computes the weight of this module from other tensors."""
    return "weight" not in module._parameters


def add_buffer(make):
    return of_module(lambda module: module.register_buffer(free_name(module), make(), persistent=False))


def add_parameter(make):
    return of_module(lambda module: module.register_parameter(free_name(module), nn.Parameter(make())))


def free_name(module):
    return f"extra{len(module._buffers) + len(module._parameters)}"


DEEDS = {
    "tie": of_two_tensors(tie),
    "alias": of_two_tensors(alias),
    "views": of_two_tensors(as_views),
    "share": share,
    "sliced": of_module(slice_weight),
    "channels_last": of_module(lay_out),
    "freeze": of_module(lambda module: module.requires_grad_(requires_grad=False)),
    "eval": of_module(lambda module: module.eval()),
    "hook": of_module(lambda module: module.register_forward_hook(hook)),
    "pre-hook": of_module(lambda module: module.register_forward_pre_hook(hook)),
    **{f"buffer: {name}": add_buffer(make) for name, make in BUFFERS.items()},
    **{f"parameter: {name}": add_parameter(make) for name, make in PARAMETERS.items()},
}
# What torch's own calls do something else with, which depends on the order of modules.
ODD = {"alias", "views", "own cast"}


@dataclass(frozen=True)
class Spec:
    """A model as plain data: a tree of modules, and what is done to it afterwards."""

    tree: tuple
    deeds: tuple

    def build(self):
        """The same model, bit for bit, every time."""
        torch.manual_seed(0)
        with torch.no_grad():  # so that computed weights can be copied
            model = built(self.tree)
            for name, first, second in self.deeds:
                DEEDS[name](model, first, second)
        return model

    def has(self, names):
        found = {name for name, *_ in self.deeds} | set(leaves(self.tree))
        return bool(found & names)


def built(tree):
    kind, content = tree
    if kind in CONTAINERS:
        return CONTAINERS[kind]([built(child) for child in content])
    return content.build() if kind == "conv" else OTHERS[content]()


def leaves(tree):
    kind, content = tree
    return [leaf for child in content for leaf in leaves(child)] if kind in CONTAINERS else [content]


SIZES = st.integers(1, 2)
WRAPPER = st.sampled_from(["as it is"] * 4 + list(WRAPPERS))
CONV = st.builds(
    Conv, st.integers(1, 3), st.booleans(), SIZES, SIZES, SIZES, st.integers(1, 3), st.booleans(), WRAPPER
)
LEAF = st.tuples(st.just("conv"), CONV) | st.tuples(st.just("other"), st.sampled_from(list(OTHERS)))
TREE = st.recursive(
    LEAF,
    lambda inner: st.tuples(st.sampled_from(list(CONTAINERS)), st.lists(inner, min_size=1, max_size=3)),
    max_leaves=6,
)
ROOT = TREE | st.tuples(st.sampled_from(list(CONTAINERS)), st.lists(TREE, min_size=2, max_size=3))
SHARING = ["tie", "alias", "views", "share"]
DEED = st.tuples(
    st.sampled_from(SHARING) | st.sampled_from(list(DEEDS)), st.integers(0, 9), st.integers(0, 9)
)
SPECS = st.builds(Spec, ROOT, st.lists(DEED, max_size=6).map(tuple))

# ---------------------------------------------------------------------------------------- pipelines

CONVERTERS = {
    "conv2d_memory_format": ((nn.Conv2d, nn.ConvTranspose2d), convert_conv2d_weight_memory_format, 4),
    "conv3d_memory_format": ((nn.Conv3d, nn.ConvTranspose3d), convert_conv3d_weight_memory_format, 5),
}
FORMATS = {"conv2d_memory_format": "channels_last", "conv3d_memory_format": "channels_last_3d"}
DTYPE = st.sampled_from(["float16", "bfloat16"])


def patterns(model):
    """Patterns that mean something in `model`, and some that do not."""
    places = [(name, module) for name, module in own_places(model) if name]
    names = {name for name, _ in places}
    words = [*names, *(f"{name}.*" for name in names), *(f"re:{re.escape(name)}" for name in names)]
    words += {f"type:{cls.__name__}" for _, module in places for cls in type(module).__mro__[:-2]}
    return st.lists(st.sampled_from([*sorted(words), "*", "norms", "nowhere"]), max_size=2)


def own_places(model):
    own = set(own_modules(model))
    return [place for place in model.named_modules(remove_duplicate=False) if place[1] in own]


def some(options):
    """Some of the names, in any order."""
    return st.lists(st.sampled_from(list(options)), unique=True, min_size=1)


@st.composite
def cases(draw):
    """A model and the configuration of a pipeline for it."""
    spec = draw(SPECS)
    chosen = patterns(spec.build())
    options = {
        "device": st.just({"device": "cpu"}),
        "half": st.fixed_dictionaries(
            {"dtype": DTYPE, "keep": st.just([]) | st.just("norms") | chosen}
        ),
        "input_format": st.fixed_dictionaries({"attach": st.booleans()}),
    }
    for name, memory_format in FORMATS.items():
        either = st.sampled_from([memory_format, memory_format, "contiguous"])
        options[name] = st.fixed_dictionaries(
            {"memory_format": either}, optional={"include": chosen, "exclude": chosen}
        )
    return spec, {name: draw(options[name]) for name in draw(some(options))}


@st.composite
def bare_cases(draw):
    """A model that torch's own calls treat alike whatever the order, and steps without any pattern."""
    spec = draw(SPECS.filter(lambda spec: not spec.has(ODD)))
    options = {"half": st.fixed_dictionaries({"dtype": DTYPE, "keep": st.just([])})}
    for name, memory_format in FORMATS.items():
        either = st.sampled_from([memory_format, "contiguous"])
        options[name] = st.fixed_dictionaries({"memory_format": either})
    return spec, {name: draw(options[name]) for name in draw(some(options))}


def upstream(model, steps):
    """What torch's own calls make of `model`."""
    if "half" in steps:
        model = model.half() if steps["half"]["dtype"] == "float16" else model.bfloat16()
    for name, (classes, convert, rank) in CONVERTERS.items():
        if name not in steps:
            continue
        wanted = torch_format(steps[name]["memory_format"])
        for module in model.modules():
            # A converter writes into a computed weight, which is computed anew.
            if isinstance(module, classes) and not is_computed(module):
                convert(module, wanted)
            elif isinstance(module, classes):
                for tensor in behind(module):
                    if tensor.dim() == rank:
                        copied = tensor.detach().clone(memory_format=wanted)
                        tensor.data = copied.resize_(copied.size(), memory_format=wanted)
    return model


def torch_format(name):
    return torch.contiguous_format if name == "contiguous" else getattr(torch, name)


def behind(module):
    """The tensors that a computed weight is made of."""
    if parametrize.is_parametrized(module, "weight"):
        return list(tensors(module.parametrizations["weight"]).values())
    return [tensor for name, tensor in tensors(module).items() if name in BEHIND]


def for_all(*strategies):
    """Runs a test on fifty cases in the quick tier, and on two thousand in the slow one."""

    def decorate(body):
        @pytest.mark.parametrize("count", [50, pytest.param(2000, marks=pytest.mark.slow)])
        def test(count):
            within = settings(
                max_examples=count,
                derandomize=True,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            within(given(*strategies)(body))()

        test.__doc__ = body.__doc__
        return test

    return decorate


# ------------------------------------------------------------------------------------------- tests


def prepared(spec, steps):
    """The prepared model, the plan taken before, and what was there before; leaves refused cases out."""
    model, pipeline = spec.build(), Pipeline.from_config(steps)
    before, plan = facts(model), pipeline.plan(model)
    try:
        assert pipeline.apply(model, strict=False) is model
    except RefusedError:
        assert spec.has({"views"}), "nothing else is refused"
        assert facts(model) == before
        reject()
    return model, plan, before


def path(row):
    return f"{row.module}.{row.tensor}" if row.module else row.tensor


@for_all(cases())
def test_a_plan_and_an_audit_touch_nothing(case):
    spec, steps = case
    model, pipeline = spec.build(), Pipeline.from_config(steps)
    before, random = facts(model), torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    plan = pipeline.plan(model)
    audit(model, plan=plan)
    assert pipeline.plan(model).to_dict() == plan.to_dict()
    assert facts(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes


@for_all(cases())
def test_apply_changes_exactly_what_the_plan_named_and_as_it_said(case):
    model, plan, before = prepared(*case)
    after = facts(model)
    named = {path(row): row.new for row in plan.tensors if row.changes}
    hooked = {f"{name}:_forward_pre_hooks" for action in plan.actions for name in action.modules}
    assert {key for key in after if after[key] != before[key]} == named.keys() | hooked
    assert after.keys() == before.keys()
    held = tensors(model)
    for name, new in named.items():
        tensor = held[name]
        assert (tensor.stride(), f"torch.{new.dtype}", str(tensor.device)) == (
            new.stride, str(tensor.dtype), new.device,
        )  # fmt: skip


@for_all(cases())
def test_parameters_keep_their_identity_ties_flags_and_hooks(case):
    model, _, before = prepared(*case)
    for key, fact in facts(model).items():
        if key in tensors(model):
            identity, *_, requires_grad, _, hooks = fact
            assert (identity, requires_grad, hooks) == (before[key][0], before[key][4], before[key][6])
        elif key.endswith("hooks"):
            # An attached input format comes before all others.
            assert fact[len(fact) - len(before[key]) :] == before[key]


@for_all(cases())
def test_what_a_pattern_keeps_off_stays_as_it_was_wherever_else_it_stands(case):
    spec, steps = case
    model, _, _ = prepared(*case)
    start, modules = tensors(spec.build()), dict(model.named_modules(remove_duplicate=False))
    for name, tensor in tensors(model).items():
        owner = re.sub(r"(^|\.)parametrizations\..*", "", name.rpartition(".")[0])
        if any(matches(word, owner, modules[owner]) for word in patterns_of(steps, "half", "keep")):
            assert tensor.dtype is start[name].dtype
        for step in FORMATS:
            words = patterns_of(steps, step, "exclude")
            # A cast makes what was sliced dense; else it keeps all strides.
            if any(matches(word, owner, modules[owner]) for word in words) and not spec.has({"sliced"}):
                assert tensor.stride() == start[name].stride()


def patterns_of(steps, step, option):
    words = steps.get(step, {}).get(option, [])
    return [words] if isinstance(words, str) else words


@for_all(cases())
def test_afterwards_the_plan_is_empty_and_twice_is_once(case):
    model, _, _ = prepared(*case)
    pipeline = Pipeline.from_config(case[1])
    assert not pipeline.plan(model)
    once = facts(model)
    pipeline.apply(model, strict=False)
    assert facts(model) == once


@for_all(cases())
def test_the_audit_agrees_with_the_plan_and_never_says_converted_of_what_is_not(case):
    model, plan, _ = prepared(*case)
    held, rows = tensors(model), {(r.module, r.tensor, r.kind): r for r in audit(model, plan=plan).rows}
    assert rows.keys() == {(p.module, p.tensor, p.kind) for p in plan.tensors}
    for planned in plan.tensors:
        row = rows[planned.module, planned.tensor, planned.kind]
        if planned.kind == "computed":
            if row.status == "converted":
                has_what_is_wanted(planned.wants, computed_weight(model, row))
            continue
        assert row.before == planned.old._asdict()
        assert (row.stride, row.dtype, row.device) == planned.new
        assert row.status == judged(planned)
        has_what_is_wanted(planned.wants, held[path(planned)])


def judged(planned):
    if planned.off:
        return "skipped"
    if not planned.wants:
        return "untouched"
    return "converted" if planned.changes else "already"


def has_what_is_wanted(wants, tensor):
    if "memory_format" in wants:
        wanted = torch_format(wants["memory_format"])
        assert tensor.stride() == torch.empty(tensor.shape, memory_format=wanted).stride()
    if "dtype" in wants:
        assert str(tensor.dtype) == f"torch.{wants['dtype']}"
    assert tensor.device.type == wants.get("device", "cpu")


def computed_weight(model, row):
    """The weight that a forward uses, in a copy of the module."""
    module = copy.deepcopy(model.get_submodule(row.module)).eval()
    with torch.no_grad():
        for weight_hook in module._forward_pre_hooks.values():
            if type(weight_hook).__module__.startswith("torch.nn.utils"):
                weight_hook(module, ())
        return getattr(module, row.tensor)


@for_all(bare_cases())
def test_strides_and_bits_are_those_of_torchs_own_calls(case):
    spec, steps = case
    model = Pipeline.from_config(steps).apply(spec.build(), strict=False)
    same(model, upstream(spec.build(), steps))


@for_all(SPECS.filter(lambda spec: not spec.has(ODD)))
def test_there_and_back_restores_every_stride(spec):
    model, start = spec.build(), spec.build()
    Pipeline.from_config({name: {} for name in FORMATS}).apply(model, strict=False)
    back = {name: {"memory_format": "contiguous"} for name in FORMATS}
    Pipeline.from_config(back).apply(model, strict=False)
    if not spec.has({"sliced", "channels_last"}):
        same(model, start)
    same(model, upstream(start, back))


@for_all(cases())
def test_a_recipe_gives_an_equal_pipeline(case):
    pipeline = Pipeline.from_config(case[1])
    again = Pipeline.from_config(recipe.loads(recipe.dumps(pipeline.to_config())))
    assert list(again.steps.items()) == list(pipeline.steps.items())
    assert again.to_config() == pipeline.to_config()


@for_all(cases())
def test_copies_of_a_prepared_model_are_prepared(case):
    model, _, _ = prepared(*case)
    pipeline = Pipeline.from_config(case[1])
    if not case[0].has({"alias", "views"}):  # deepcopy tears those apart
        assert not pipeline.plan(copy.deepcopy(model))
    # torch gives the state of parametrized modules to pickle, and not themselves.
    if not any(parametrize.is_parametrized(module) for module in model.modules()):
        again = pickle.loads(pickle.dumps(model))
        assert not pipeline.plan(again)
        same(again, model)
