"""The stage `verify`: are the outputs and the gradients of the prepared model still right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from prepare.stages.stage import Level, Seconds, Stage, StageContext, Verdict, key, stage

if TYPE_CHECKING:
    from prepare.core.document import Document, ReportContext


@stage("verify")
class VerifyStage(Stage):
    """The verification of outputs and gradients against the unprepared model."""

    noun: ClassVar[str] = "verification"
    order: ClassVar[int] = 40
    default: ClassVar[bool] = True
    imports: ClassVar[tuple[str, ...]] = ("prepare.stages.verify.check_model",)
    groups: ClassVar[bool] = True

    level: Level = key("short", "check outputs and gradients")
    seconds: Seconds = key(None, "seconds that it may use; null: 120", "60")

    @classmethod
    def records(cls) -> Mapping[str, Any]:
        from prepare.stages.verify.records import Verification

        return {"verify.json": Verification}

    def longest(self, work: StageContext) -> float:
        if self.level == "none" or work.reference is None or isinstance(work.reference, str):
            return 0.0
        from prepare.stages.verify.check_model import SECONDS

        return self.seconds or SECONDS

    def run(self, work: StageContext) -> Mapping[str, Any]:
        if self.level == "none" or work.reference is None or not work.example:
            return {}
        from prepare.stages.verify import verify

        with work.progress("verifying outputs and gradients"):
            verification = verify(
                work.reference,
                work.model,
                work.example,
                pipeline=work.pipeline,
                mode=work.settings.mode,
                seconds=self.seconds,
                amp=work.amp,
            )
        return {"verify": verification}

    @classmethod
    def verdict(cls, found: Mapping[str, Any]) -> Verdict | None:
        verification = found.get("verify")
        if verification is None or verification.status != "fail":
            return None
        reason = verification.reason
        kind = reason.partition(":")[0]
        return Verdict(status="verification_failed", reason=kind, error=reason)

    @classmethod
    def figures(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        verification = found.get("verify")
        if verification is None:
            return {}
        # The first of these compares the tensors; another one may be of another call.
        outputs = next((c for c in verification.checks if c.what == "outputs"), None)
        return {
            "verified": verification.status,
            "verified_reason": "" if verification.status == "pass" else verification.reason,
            "verified_wrong": sum(check.status == "wrong" for check in verification.checks),
            "verified_error": outputs.error if outputs else None,
            "verified_allowed": outputs.allowed if outputs else None,
        }

    @classmethod
    def document(cls, shown: ReportContext) -> Document | None:
        from prepare.stages.verify.document import verify_document

        return verify_document(shown)
