"""Files of weights of every format."""

from pathlib import Path

import pytest

from checkpoint_nets import FORMATS


@pytest.fixture(params=FORMATS)
def path(request, tmp_path) -> Path:
    return tmp_path / request.param
