"""Regions of the step compile: equal ones are compiled once."""

import copy

import pytest
import torch
from torch import nn

from compile_checks import pipeline
from prepare.errors import ConfigError, PatternError
from prepare.steps import compile as compiling


class Block(nn.Module):
    """A block that a network has several of."""

    def __init__(self, channels=4):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return self.conv(x).relu() + x


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), Block(), Block(), Block()).eval()


def test_equal_regions_are_compiled_once(graphs):
    net, x = blocks(), torch.randn(2, 3, 8, 8)
    expected = net(x)
    prepared = pipeline(backend="counted", include=["type:Block"])
    assert [action.modules for action in prepared.plan(net).actions] == [("1", "2", "3")]
    prepared.apply(net)
    with torch.no_grad():
        assert torch.equal(net(x), expected)
    assert len(graphs) == 1
    assert net._compiled_call_impl is None
    assert not prepared.plan(net)


def test_regions_of_different_weights_share_code_and_not_values(graphs):
    net, x = blocks(), torch.randn(2, 3, 8, 8)
    pipeline(backend="counted", include=["type:Block"]).apply(net)
    with torch.no_grad():
        net(x)
        net[2].conv.weight.zero_()
        net[2].conv.bias.zero_()
        expected = copy.deepcopy(net)(x)  # a copy is not compiled
        assert torch.equal(net(x), expected)
    assert len(graphs) == 1


def test_the_outermost_of_nested_matches_is_compiled():
    net = nn.Sequential(nn.Sequential(Block(), Block()), Block())
    plan = pipeline(include=["type:Block", "0"]).plan(net)
    assert [action.modules for action in plan.actions] == [("0", "1")]


def test_undo_reverts_regions_and_leaves_compilations_of_the_user():
    prepared = blocks()
    pipeline(include=["type:Block"]).apply(prepared)
    prepared[0].compile(backend="eager")
    compiling.undo(prepared)
    assert [module._compiled_call_impl is None for module in prepared] == [False, True, True, True]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"include": ["type:Blok"]}, PatternError, "steps.compile.include: 'type:Blok' matches no module"),
        ({"include": ["type:Blok"]}, PatternError, "did you mean 'type:Block'?"),
        (
            {"backend": "inductor", "include": ["1"], "freezing": True},
            ConfigError,
            "steps.compile.include: shares code between equal modules, and freezing makes constants",
        ),
    ],
)  # fmt: skip
def test_regions_that_cannot_be_compiled_are_refused(options, error, says):
    with pytest.raises(error) as raised:
        pipeline(**options).apply(blocks())
    assert says in str(raised.value)
