"""The test suite for steps: inherit it in a package with its own step."""

from prepare.testing.contract import StepContract

__all__ = ["StepContract"]
