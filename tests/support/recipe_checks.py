"""A recipe of version 1, and short cuts that read recipes or their refusal."""

import pytest

from fuzz_recipe import HEAD
from prepare import recipe
from prepare.errors import RecipeError

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


BAD_STEP = "write its options as 'option: value', or null to drop the step"


def refusal(data: str | bytes) -> RecipeError:
    with pytest.raises(RecipeError) as raised:
        recipe.loads(data)
    return raised.value
