"""Another Hydra application that uses our config groups."""

from __future__ import annotations
