"""Report where activations change layout in a forward pass, which operation does it, and what it costs."""

from typing import TYPE_CHECKING

from prepare.core.utils.packages import lazy_names

if TYPE_CHECKING:
    from prepare.stages.flow.follow import observe, predict
    from prepare.stages.flow.records import Convolution, Copy, Event, Flow

__all__ = ["Convolution", "Copy", "Event", "Flow", "observe", "predict"]

__getattr__ = lazy_names(
    __name__,
    records=("Convolution", "Copy", "Event", "Flow"),
    follow=("observe", "predict"),
)
