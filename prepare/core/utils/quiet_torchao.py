"""Keep torchao's remarks at its import out of the terminal: other packages import it, too."""

import logging

# It logs each kernel that it has for other devices, torch logs a deprecation in it, and diffusers that a
# class of an older torchao is missing.
_LOGGERS = (
    "torchao",
    "torch.utils._pytree",
    "diffusers.quantizers.torchao.torchao_quantizer",
)


def quiet_torchao() -> None:
    """Let these loggers report errors only, unless the user has set their level."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.ERROR)
