"""A recipe of version 1, and short cuts that read recipes or their refusal."""

import sys

import pytest

from prepare import recipe
from prepare.errors import RecipeError

HEAD = "format: prepare.recipe\nversion: 1\nsteps:\n"
WATCHED = (
    "import",
    "open",
    "exec",
    "compile",
    "os.",
    "subprocess.",
    "socket.",
    "shutil.",
    "ctypes.",
)


class Watch:
    """Notes what Python's audit events show to have been opened, imported or run while it is on."""

    def __init__(self):
        self.on, self.seen = False, []
        sys.addaudithook(self.note)  # cannot be taken away again, hence the switch

    def note(self, event, args):
        if self.on and event.startswith(WATCHED):
            self.seen.append((event, repr(args)[:200]))

    def __enter__(self):
        self.on, self.seen = True, []
        return self

    def __exit__(self, *_):
        self.on = False


VERSION_1 = """\
format: prepare.recipe
version: 1
steps:
  device:
    device: cuda:0
  half:
    dtype: bfloat16
    keep:
      - norms
      - type:Conv3d
      - "*.conv?"
  conv3d_memory_format:
    memory_format: channels_last_3d
    include: []
    exclude: null
  compile: null
"""


STEPS_1 = {
    "device": {"device": "cuda:0"},
    "half": {"dtype": "bfloat16", "keep": ["norms", "type:Conv3d", "*.conv?"]},
    "conv3d_memory_format": {"memory_format": "channels_last_3d", "include": [], "exclude": None},
    "compile": None,
}


def option(text: str) -> str:
    """A recipe in which one option, in line 5, has the value `text`."""
    return f"{HEAD}  half:\n    keep: {text}\n"


def refusal(data: str | bytes) -> RecipeError:
    with pytest.raises(RecipeError) as raised:
        recipe.loads(data)
    return raised.value
