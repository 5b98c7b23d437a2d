# The public names of prepare and their homes; `__init__.py` imports each one when it is used.

from prepare.app.model_report import report as report
from prepare.audit import audit as audit
from prepare.core.forward.call import calling as calling
from prepare.frameworks.outside import outside as outside
from prepare.pipeline import Pipeline as Pipeline
from prepare.pipeline.pipeline import prepare as prepare
from prepare.registry import register as register
from prepare.stages.bench import compare as compare
from prepare.stages.flow import observe as observe
from prepare.stages.flow import predict as predict
from prepare.stages.tune import tune as tune
from prepare.stages.verify import verify as verify
from prepare.step import InputStep as InputStep
from prepare.step import ModelStep as ModelStep
from prepare.step import ModuleStep as ModuleStep
from prepare.step import TensorStep as TensorStep
from prepare.step import Want as Want

__version__: str
