"""Check that a prepared model still computes the outputs and gradients of the unprepared one."""

from typing import TYPE_CHECKING

from prepare.core.utils.packages import lazy_names

if TYPE_CHECKING:
    from prepare.stages.verify.check_model import verify
    from prepare.stages.verify.records import Check, Verification

__all__ = ["Check", "Verification", "verify"]

__getattr__ = lazy_names(__name__, records=("Check", "Verification"), check_model=("verify",))
