"""Calls in every form that torch accepts, and some that it refuses: a replaced call does what torch's does."""

import importlib.util
import inspect
import itertools
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from prepare.steps.keeping.calls import find_calls, replace_calls, replaced_calls

# Functions of torch and methods of tensors, whose parameters torch's schemas name.
FUNCTIONS = ("cat", "concat", "clone", "repeat_interleave", "flatten")
METHODS = ("clone", "contiguous", "flatten", "repeat", "repeat_interleave", "reshape", "view")
# What an argument is given, by its name in torch: text of Python. Some of it is wrong.
VALUES = {
    "tensors": ("[x, y]", "(x,)", "[x, 1]", "[x[:, :, :0], x]", "[x, x.double()]"),
    "dim": ("1", "-1", "7", "True", "(0, 2)"),
    "dtype": ("torch.float64",),
    "memory_format": ("torch.contiguous_format",),
    "start_dim": ("1", "3"),
    "end_dim": ("2", "-9"),
    "repeats": ("2", "(1, 2, 1, 1)", "[1, 2, 1, 1, 1]", "torch.tensor([2])", "-1"),
    "shape": ("(2, -1)", "(2, 4, 2, -1)", "(-1, 0)", "(2, 8, -1, -1)"),
    "size": ("(2, -1)", "(2, 4, 2, -1)", "(-1, 3, 7)"),
    "keepdim": ("True",),
    "condition": ("x > 0",),
    "self": ("x",),
    "other": ("y", "0.5"),
    "input": ("x",),
    "output_size": ("16",),
    "pad": ("(1, 0, 0, 2)", "(1, 1, 0, 0, 2, 0)", "(0, 0)", "(-1, 0)", "1"),
    "mode": ('"constant"', '"replicate"', '"nearest"', '"no"'),
    "value": ("1.5",),
    "scale_factor": ("2", "(2.0, 1.0)"),
    "kernel_size": ("2",),
    "stride": ("1",),
    "padding": ("1",),
    "_stacklevel": ("3",),
}
OTHER_NAMES = {"dim": "axis", "input": "x", "keepdim": "keepdims"}  # as in NumPy
MORE = (
    *("x.repeat(1, 2, 1, 1)", "x.repeat(*[2] * 4)", "x.repeat(2)", "x.repeat(1, -1, 1, 1)"),
    *("x.view(2, 4, 2, -1)", "x.view(torch.int32)", "x.view(dtype=torch.uint8)"),
    *("x.reshape(2, 4, -1, 6)", "x.reshape(*(2, 8, -1, 6))", "torch.reshape(x, 2, -1)"),
    *("x + y", "y + x", "1 + x", "torch.repeat_interleave(torch.tensor([1, 2]))"),
    *("torch.cat((x, y), out=torch.empty(0))", "(lambda x: x.clone())(x)"),
    *(
        "torch.cat(**{'tensors': [x, y], 'dim': 1})",
        "torch.cat(*[[x, y], 1])",
        "F.pad(*(x, (1, 1)))",
    ),
    "torch.clone(x.clone())",
)
HEAD = """
import torch
from torch import nn
from torch.nn import functional as F


class Calls(nn.Module):
"""


def parameters():
    """Yield the text of each callee, the names of its parameters, and those that are given by name."""
    for owner, names in (("torch", FUNCTIONS), ("x", METHODS)):
        for name in names:
            overloads = getattr(torch.ops.aten, {"concat": "cat"}.get(name, name))
            for overload in overloads.overloads():
                arguments = getattr(overloads, overload)._schema.arguments
                found = [(each.name, each.kwarg_only) for each in arguments]
                if "Dimname" in str(arguments) or any("out" in each for each, _ in found):
                    continue
                if owner == "x" and name in ("reshape", "repeat", "view"):
                    found = [each for each in found if each[0] != "self"]
                elif owner == "x":
                    found = [each for each in found if each[0] not in ("self", "input")]
                yield f"{owner}.{name}", [("input", k) if n == "self" else (n, k) for n, k in found]
    yield "F.pad", [(each, False) for each in inspect.signature(F.pad).parameters]


def forms(rng):
    """Return the texts of calls: each number of arguments by position, the others by name, or left out."""
    found = dict.fromkeys(MORE)
    for callee, arguments in parameters():
        known = [each for each in arguments if each[0] in VALUES][:5]
        for count in range(len(known) + 1):
            by_position = [name for name, by_name in known[:count] if not by_name]
            rest = [name for name, _ in known if name not in by_position]
            for number in range(len(rest) + 1):
                for named in itertools.combinations(rest, number):
                    values = {n: rng.choice(VALUES[n]) for n in (*by_position, *named)}
                    for alias in (False, True):
                        words = [values[name] for name in by_position]
                        names = [OTHER_NAMES.get(name, name) if alias else name for name in named]
                        words += [f"{n}={values[o]}" for n, o in zip(names, named, strict=True)]
                        found[f"{callee}({', '.join(words)})"] = None
    return list(found)


def all_operands():
    """Return pairs of operands by name."""
    torch.manual_seed(0)
    flat, deep = torch.randn(2, 8, 4, 6), torch.randn(2, 8, 2, 4, 6)
    last = flat.contiguous(memory_format=torch.channels_last)
    volume = deep.contiguous(memory_format=torch.channels_last_3d)
    frame = torch.randn(2, 8, 3, 4).contiguous(memory_format=torch.channels_last)
    return {
        "contiguous": (flat, flat + 1),
        "channels-last": (last, flat),
        "channels-last twice": (last, last + 1),
        "contiguous, then channels-last": (flat, last),
        "volume": (volume, deep),
        "contiguous volume": (deep, volume),
        "slice": (last[:, :, 1:], flat[:, :, 1:]),
        "odd strides": (volume[:, :, -1].unsqueeze(2), deep[:, :, :1]),
        "permuted": (deep.movedim(1, -1), deep.movedim(1, -1)),
        "bfloat16": (last.bfloat16(), flat.bfloat16()),
        "integers": (last.long(), flat.long()),
        "complex": (last.to(torch.complex64), flat.to(torch.complex64)),
        "empty": (last[:0], flat[:0]),
        "another shape": (last, frame),
        "Parameter": (nn.Parameter(last), flat),
        "sparse": (flat.to_sparse(), flat.to_sparse()),
        "vector": (torch.randn(8), torch.randn(8)),
        "meta": (last.to("meta"), flat.to("meta")),
        "number": (3, 4),
        "none": (None, None),
    }


def outcome(call, x, y):
    try:
        return call(x, y)
    except Exception as error:
        return type(error), str(error)


def difference(text, ours, theirs, operands):
    """Return what differs, in words; nothing if the outcomes are alike."""
    if ".view(" in text and "view size is not compatible" in str(theirs):
        return ""  # a `view` that is replaced for a tensor that is no longer contiguous
    if ".contiguous(" in text and isinstance(ours, nn.Parameter):
        return ""  # the tensor itself, which is in the format that it has
    if type(ours) is not type(theirs):
        return f"{ours!r:.300} for {theirs!r:.300}"
    if not isinstance(ours, torch.Tensor):
        return "" if repr(ours) == repr(theirs) else f"{ours!r:.300} for {theirs!r:.300}"
    for name in ("dtype", "layout", "device", "requires_grad"):
        if getattr(ours, name) != getattr(theirs, name):
            return name
    if ours._is_view() and not theirs._is_view():
        return "view"
    if ours.layout is not torch.strided:
        return ""
    if ours.shape != theirs.shape:
        return "shape"
    if ours.device.type != "meta" and not torch.allclose(
        ours.detach(),
        theirs.detach(),
        equal_nan=True,
        rtol=1e-2 if ours.dtype.itemsize == 2 else 1e-5,
    ):
        return "values"
    alike = ours.stride() == theirs.stride() or not ours.numel() or ours.stride()[1:2] == (1,)
    alike = alike or any(isinstance(x, torch.Tensor) and not x.is_contiguous() for x in operands)
    return "" if alike else f"strides {ours.stride()} for {theirs.stride()}"


pytestmark = pytest.mark.filterwarnings("ignore")


def module_of(texts, folder, name):
    """Return the class of a network with a method for each text."""
    methods = [f"    def call{n}(self, x, y):\n        return {t}\n" for n, t in enumerate(texts)]
    (file := folder / f"{name}.py").write_text(HEAD + "\n".join(methods))
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Calls


@pytest.mark.parametrize(
    ("seed", "count"),
    [(0, 800), *(pytest.param(n, 10_000, marks=pytest.mark.slow) for n in (1, 2))],
)
def test_replaced_calls_do_what_torchs_do_in_every_form(tmp_path, seed, count):
    rng = random.Random(seed)
    texts = forms(rng)
    cls = module_of(texts, tmp_path, f"forms_{seed}")
    plain, kept = cls(), cls()
    replace_calls(kept, [call.name for call in find_calls(cls)])
    replaced = {name.partition(":")[0].rpartition("call")[2] for name in replaced_calls(kept)}
    pairs = all_operands()
    cases = list(itertools.product(range(len(texts)), pairs))
    wanted = [case for case in cases if str(case[0]) in replaced]
    wrong = []
    chosen = rng.sample(wanted, min(count, len(wanted)))
    for number, name in chosen:
        calls = getattr(kept, f"call{number}"), getattr(plain, f"call{number}")
        ours, theirs = (outcome(call, *pairs[name]) for call in calls)
        if why := difference(texts[number], ours, theirs, pairs[name]):
            wrong.append(f"{texts[number]} of {name}: {why}")
    assert not wrong, "\n".join(wrong)
    assert len(chosen) >= min(count, 2_500)
    assert len(replaced) > 60
