"""The line of the user's code in an error, and the package of a missing module."""

import sys
from importlib import import_module

import pytest

from prepare.app.job.model_target import locate_named
from prepare.core.forward.run_example import explained
from prepare.core.utils.packages import described, place_of
from prepare.errors import ConfigError

NETS = """
from torch import nn
class Net(nn.Module):
    def forward(self, x):
        return helper(x)
def helper(x):
    raise ValueError("my own complaint")
build = Net
"""


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """A module of the current folder, `user_nets`, and others beside it."""
    (tmp_path / "user_nets.py").write_text(NETS)
    (tmp_path / "user_import.py").write_text("import os\nimport package_of_nobody\n")
    (tmp_path / "user_syntax.py").write_text("x = 1\ny = = 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda: import_module("user_nets")
    for name in ("user_nets", "user_import", "user_syntax"):
        sys.modules.pop(name, None)


def raised(call, *args):
    with pytest.raises(Exception) as caught:
        call(*args)
    return caught.value.with_traceback(caught.tb.tb_next)  # without the frame of this test


def test_the_innermost_line_of_the_users_code_is_named(nets):
    net = nets().Net()
    error = raised(net, 1)
    assert described(error) == "user_nets.py:7, in helper: ValueError: my own complaint"
    assert str(explained(net, error)) == f"forward of Net: {described(error)}"


def test_a_line_outside_of_the_folder_has_its_path_of_import(nets, tmp_path, monkeypatch):
    error = raised(nets().helper, 1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert place_of(error) == "user_nets.py:7, in helper"
    monkeypatch.setattr(sys, "path", [])
    assert place_of(error) == f"{tmp_path}/user_nets.py:7, in helper"


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("user_nets.Zzz", "user_nets has no 'Zzz'; it has Net, build, helper"),
        ("user_nets.Nett", "user_nets has no 'Nett'; did you mean 'user_nets.Net'?"),
        (
            "user_netz.Net",
            "module 'user_netz' does not exist; did you mean 'user_nets'? "
            "install it, or start in the folder that holds it",
        ),
        (
            "user_import.Net",
            "module 'package_of_nobody', imported at user_import.py:2, does not exist; "
            "install it, or start in the folder that holds it",
        ),
    ],
)
def test_a_missing_name_has_its_remedy(nets, target, line):
    with pytest.raises(ConfigError) as error:
        locate_named(target, "model._target_")
    assert str(error.value) == f"model._target_: {line}"
