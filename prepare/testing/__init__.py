"""Tests to use in your own: that a network keeps its layout, and the suite that a step inherits."""

from typing import TYPE_CHECKING

from prepare.core.utils.packages import lazy_names

if TYPE_CHECKING:
    from prepare.testing.contract import StepContract
    from prepare.testing.layout import assert_layout

__all__ = ["StepContract", "assert_layout"]

__getattr__ = lazy_names(__name__, contract=("StepContract",), layout=("assert_layout",))
