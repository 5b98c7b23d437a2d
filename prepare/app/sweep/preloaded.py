"""Import what every run of a sweep needs, in the process that is forked for each of them."""

import gc
import importlib

from prepare.app.report import html
from prepare.stages.stage import ordered_stages

_MODULES = (
    "hydra.utils",
    "prepare.app.job.run_stages",
    "prepare.app.report.pages",
    "prepare.audit.read_model",
    "prepare.core.forward.input_formatter",
    "torch.utils._device",
)

for name in (*_MODULES, *(each for cls in ordered_stages() if cls.default for each in cls.imports)):
    importlib.import_module(name)
html.load_templates()
gc.freeze()  # no run walks over what the server has loaded, or copies its pages for that
