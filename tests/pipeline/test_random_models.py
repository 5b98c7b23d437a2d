"""Random models and pipelines hold every property that is promised."""

import copy
import re

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import convert_conv2d_weight_memory_format, convert_conv3d_weight_memory_format

from prepare.audit import audit
from prepare.errors import RefusedError
from prepare.patterns import matches
from prepare.pipeline import Pipeline
from random_models import ODD, SPECS, Keeper, behind, is_computed, own_places
from small_nets import bits, facts, same, tensors

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")

CONVERTERS = {
    "conv2d_memory_format": (
        (nn.Conv2d, nn.ConvTranspose2d),
        convert_conv2d_weight_memory_format,
        4,
    ),
    "conv3d_memory_format": (
        (nn.Conv3d, nn.ConvTranspose3d),
        convert_conv3d_weight_memory_format,
        5,
    ),
}
FORMATS = {"conv2d_memory_format": "channels_last", "conv3d_memory_format": "channels_last_3d"}
DTYPE = st.sampled_from(["float16", "bfloat16"])


def patterns(model):
    """Draw patterns that match modules of `model`, and some that do not."""
    places = [(name, module) for name, module in own_places(model) if name]
    names = {name for name, _ in places}
    words = [*names, *(f"{name}.*" for name in names), *(f"re:{re.escape(name)}" for name in names)]
    words += {f"type:{cls.__name__}" for _, module in places for cls in type(module).__mro__[:-2]}
    return st.lists(st.sampled_from([*sorted(words), "*", "norms", "nowhere"]), max_size=2)


def some(options):
    """Some of the names, in any order."""
    return st.lists(st.sampled_from(list(options)), unique=True, min_size=1)


@st.composite
def cases(draw, *, bare=False):
    """A model and the configuration of a pipeline for it.

    A bare one is treated by torch's own calls alike whatever the order, by steps without any pattern.
    """
    spec = draw(SPECS.filter(lambda spec: not spec.has(ODD)) if bare else SPECS)
    chosen = patterns(spec.build())
    keep = st.just([]) if bare else st.just([]) | st.just("norms") | chosen
    options = {"half": st.fixed_dictionaries({"dtype": DTYPE, "keep": keep})}
    if not bare:
        options["device"] = st.just({"device": "cpu"})
        options["input_format"] = st.fixed_dictionaries({"attach": st.booleans()})
    for name, memory_format in FORMATS.items():
        either = st.sampled_from([memory_format, memory_format, "contiguous"])
        optional = {} if bare else {"include": chosen, "exclude": chosen}
        options[name] = st.fixed_dictionaries({"memory_format": either}, optional=optional)
    return spec, {name: draw(options[name]) for name in draw(some(options))}


def upstream(model, steps):
    """Prepare `model` with torch's own calls."""
    if "half" in steps:
        model = model.half() if steps["half"]["dtype"] == "float16" else model.bfloat16()
    for name, (classes, convert, rank) in CONVERTERS.items():
        if name not in steps:
            continue
        wanted = torch_format(steps[name]["memory_format"])
        for module in model.modules():
            # A converter writes into a computed weight, which forward computes again.
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


def for_all(*strategies):
    """Runs a test on thirty cases in the quick tier, and on two thousand in the slow one."""

    def decorate(body):
        @pytest.mark.parametrize("count", [30, pytest.param(2000, marks=pytest.mark.slow)])
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


def prepared(spec, steps):
    """The prepared model, the plan taken before, and what was there before; leaves refused cases out."""
    model, pipeline = spec.build(), Pipeline.from_config(steps)
    before, plan = facts(model), pipeline.plan(model)
    try:
        assert pipeline.apply(model, strict=False, known_issues="ignore") is model
    except RefusedError:
        assert spec.has({"views"}), "nothing else is refused"
        assert facts(model) == before
        reject()
    return model, plan, before


def path(row):
    return f"{row.module}.{row.tensor}" if row.module else row.tensor


@for_all(cases())
def test_plan_and_audit_change_nothing(case):
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
def test_apply_changes_exactly_what_the_plan_says(case):
    model, plan, before = prepared(*case)
    after = facts(model)
    named = {path(row): row.new for row in plan.tensors if row.changes}
    first = {module: name for name, module in model.named_modules()}  # of those of a shared one
    hooked = {
        f"{first[model.get_submodule(name)]}:_forward_pre_hooks"
        for action in plan.actions
        for name in action.modules
    }
    kept = (action.modules for action in plan.actions if action.step in {"half", "input_format"})
    those = (model.get_submodule(name) for names in kept for name in names)
    hooked |= {f"{first[module]}:_forward_hooks" for module in those}
    assert {key for key in after if after[key] != before[key]} == named.keys() | hooked
    assert after.keys() == before.keys()
    start, held = tensors(case[0].build()), tensors(model)
    for name, tensor in held.items():
        assert bits(tensor) == bits(start[name].to(tensor.dtype)), name
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
            assert (identity, requires_grad, hooks) == (
                before[key][0],
                before[key][4],
                before[key][6],
            )
        elif key.endswith("hooks"):
            # An attached input format comes before all others.
            assert fact[len(fact) - len(before[key]) :] == before[key]
    assert storages(model) == storages(case[0].build())


def storages(model):
    """Return the names of the tensors of each storage."""
    names_by_storage = {}
    for name, tensor in tensors(model).items():
        if tensor.numel():
            names_by_storage.setdefault(tensor.untyped_storage().data_ptr(), set()).add(name)
    return sorted(map(sorted, names_by_storage.values()))


@for_all(cases())
def test_a_skipped_tensor_stays_unchanged_in_all_its_places(case):
    spec, steps = case
    model, _, _ = prepared(*case)
    start, modules = tensors(spec.build()), dict(model.named_modules(remove_duplicate=False))
    for name, tensor in tensors(model).items():
        owner = re.sub(r"(^|\.)parametrizations\..*", "", name.rpartition(".")[0])
        if any(matches(word, owner, modules[owner]) for word in patterns_of(steps, "half", "keep")):
            # Beside 16 bits a kept module is in float32, whatever it was.
            is_cast = tensor.is_floating_point() and "float16" in steps["half"].get(
                "dtype", "float16"
            )
            assert tensor.dtype is (torch.float32 if is_cast else start[name].dtype)
        if isinstance(modules[owner], Keeper) and name.endswith("bias"):
            assert tensor.dtype is start[name].dtype
        for step, (*_, rank) in CONVERTERS.items():
            words = patterns_of(steps, step, "exclude")
            if tensor.dim() == rank and any(matches(word, owner, modules[owner]) for word in words):
                # A cast keeps the strides, but for what was sliced.
                wanted = (
                    torch.empty_like(start[name])
                    if start[name].dtype != tensor.dtype
                    else start[name]
                )
                assert tensor.stride() == wanted.stride()


def patterns_of(steps, step, option):
    words = steps.get(step, {}).get(option, [])
    return [words] if isinstance(words, str) else words


@for_all(cases())
def test_afterwards_the_plan_is_empty_and_twice_is_once(case):
    model, _, _ = prepared(*case)
    pipeline = Pipeline.from_config(case[1])
    assert not pipeline.plan(model)
    once = facts(model)
    pipeline.apply(model, strict=False, known_issues="ignore")
    assert facts(model) == once


@for_all(cases())
def test_the_audit_agrees_with_the_plan_and_with_the_tensors(case):
    model, plan, _ = prepared(*case)
    held, rows = (
        tensors(model),
        {(r.module, r.tensor, r.kind): r for r in audit(model, plan=plan).rows},
    )
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


@for_all(cases(bare=True))
def test_strides_and_bits_are_those_of_torchs_own_calls(case):
    spec, steps = case
    model = Pipeline.from_config(steps).apply(spec.build(), strict=False, known_issues="ignore")
    same(model, upstream(spec.build(), steps))
