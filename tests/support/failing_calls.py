"""Make the operating system's file calls fail, one at a time."""

from __future__ import annotations

import os

import pytest

CALLS = ("open", "write", "fsync", "close", "chmod", "replace")


class FailAt:
    """Makes call number `n` of the operating system's file calls fail, and writes in small parts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n: int, error: BaseException) -> None:
        self.left, self.error, self.failed = n, error, ""
        for name in CALLS:
            monkeypatch.setattr(os, name, self.wrapped(name, getattr(os, name)))

    def wrapped(self, name, real):
        def call(*arguments, **options):
            self.left -= 1
            if self.left != 0:
                return (
                    real(arguments[0], arguments[1][:700])
                    if name == "write"
                    else real(*arguments, **options)
                )
            self.failed = name
            if name == "close":
                real(*arguments)  # as the system does: what fails is to flush, the handle is gone
            raise self.error

        return call
