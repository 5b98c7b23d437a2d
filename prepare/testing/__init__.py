"""What a package with a step of its own inherits, so that its step passes what the built-in ones pass."""

from prepare.testing.contract import StepContract

__all__ = ["StepContract"]
