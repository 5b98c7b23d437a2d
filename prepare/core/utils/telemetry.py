"""Switch off the usage reports of packages that we start: nothing may be sent anywhere."""

import os
import sys

# Ray reports usage where a cluster starts; huggingface_hub names its callers in each request.
_SWITCHES = {"RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
# OpenVINO has no switch: importing it reports, from a thread, that it was imported. Without this
# package it falls back to a stub of its own.
_BLOCKED = "openvino_telemetry"


def switch_off_telemetry() -> None:
    """Switch off the reports of OpenVINO, Ray and huggingface_hub, here and in child processes.

    Call it before these are imported. A value that the user has set in the environment stays. What
    the user's own code imported before stays as well.
    """
    for name, value in _SWITCHES.items():
        os.environ.setdefault(name, value)
    sys.modules.setdefault(_BLOCKED, None)  # type: ignore[arg-type]  # None: the import fails
