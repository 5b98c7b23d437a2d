"""Keep torchao's remarks at its import out of the terminal: other packages import it, too."""

import logging

# It logs each kernel that it has for other devices, and torch logs a deprecation in it.
_LOGGERS = ("torchao", "torch.utils._pytree")


def quiet_torchao() -> None:
    """Let these loggers report errors only, unless the user has set their level."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.ERROR)
