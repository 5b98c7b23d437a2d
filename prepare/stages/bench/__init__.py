"""Time prepared models against the unprepared model, in paired rounds, and judge the differences.

Examples:
    >>> from copy import deepcopy
    >>> from torch import nn, randn
    >>> from prepare.pipeline import Pipeline
    >>> model = nn.Conv2d(8, 8, 3)
    >>> pipeline = Pipeline.from_config({"half": {"dtype": "bfloat16"}, "input_format": {}})
    >>> prepared = pipeline.apply(deepcopy(model))
    >>> comparison = compare(
    ...     {"float32": model, "bfloat16": prepared},
    ...     randn(2, 8, 32, 32),
    ...     format={"bfloat16": pipeline.format},
    ...     budget=1.0,
    ... )
    >>> comparison.row("bfloat16").verdict in ("faster", "slower", "no difference", "unclear")
    True
"""

from typing import TYPE_CHECKING

from prepare.core.utils.packages import lazy_names

if TYPE_CHECKING:
    from prepare.stages.bench.compare_variants import compare
    from prepare.stages.bench.records import Comparison, Control, VariantResult

__all__ = ["Comparison", "Control", "VariantResult", "compare"]

__getattr__ = lazy_names(
    __name__,
    compare_variants=("compare",),
    records=("Comparison", "Control", "VariantResult"),
)
