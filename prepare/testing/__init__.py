"""The test suite for steps: inherit it in a package with its own step."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prepare.testing.contract import StepContract

__all__ = ["StepContract"]


def __getattr__(name: str) -> Any:
    if name == "StepContract":
        from prepare.testing.contract import StepContract

        return StepContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
