"""Remarks of torchao at its import, which a job does not show."""

import logging

from prepare.core.utils.packages import quiet_torchao


def test_a_job_shows_only_errors_of_torchao(monkeypatch):
    logger, chosen = logging.getLogger("torchao"), logging.getLogger("torch.utils._pytree")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    monkeypatch.setattr(chosen, "level", logging.INFO)
    quiet_torchao()
    assert (logger.level, chosen.level) == (logging.ERROR, logging.INFO)
