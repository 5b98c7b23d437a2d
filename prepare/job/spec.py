"""The description of one job, executed in this process or in a child process."""

from __future__ import annotations

import logging.config
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepare.errors import ConfigError, Problem
from prepare.job.settings import Settings, read_settings

if TYPE_CHECKING:
    from prepare.job.outcome import Outcome
    from prepare.job.record import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One job: its configuration, its folder and the two functions that it needs; can be pickled.

    Attributes:
        config: the resolved configuration, as plain data.
        unresolved: the problems of the interpolations in it that have no value.
        job: what its record says of the job.
        folder: where its record is written.
        build: instantiates the configuration of a model.
        pages: writes the pages of a record, before its last file, the result.
        logging: the configuration of the logs of a child process, as for `logging.config`.
        current: the working directory of a child process; None is that of its parent.
        path: `sys.path` of a child process.
        environ: the environment variables of a child process.
    """

    config: dict[str, Any]
    unresolved: tuple[Problem, ...] = ()
    job: Job
    folder: Path
    build: Callable[[Mapping[str, Any]], Any]
    pages: Callable[[Outcome, Path], None]
    logging: dict[str, Any] | None = None
    current: str | None = None
    path: list[str] = field(default_factory=lambda: list(sys.path))
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    def settings(self) -> Settings:
        """Check the configuration.

        Raises:
            ConfigError: with one problem for every error in it.
        """
        if self.unresolved:
            raise ConfigError.of(self.unresolved)
        return read_settings(self.config, choices=self.job.choices)

    def enter(self) -> None:
        """Set the working directory, import path, environment variables and logs of this process."""
        os.environ.clear()
        os.environ.update(self.environ)
        sys.path[:] = self.path
        if self.current is not None:
            os.chdir(self.current)
        if self.logging is not None:
            logging.config.dictConfig(self.logging)
