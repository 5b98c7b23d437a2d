"""Store the weights of Linear modules in 8 bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Self

from prepare.core.utils.packages import install_remedy
from prepare.core.utils.suggest import choose
from prepare.core.utils.wording import dropped, in_training, inference_mode
from prepare.errors import ConfigError, Problem, RefusedError, raise_problems
from prepare.patterns import Patterns
from prepare.registry import register
from prepare.step import ForRecipes, ModelStep, Offer, Storage
from prepare.steps.device import ForDevice

if TYPE_CHECKING:
    import torch
    from torch import nn

    from prepare.steps._quantizing import WeightChoice

_SCHEMES = ("int8_weight_only", "int8_dynamic")


def readable_scheme(scheme: str) -> None:
    """Raise ValueError for a scheme that does not exist."""
    if scheme in _SCHEMES:
        return
    remedy = choose(scheme, _SCHEMES)
    if "static" in scheme or "pt2e" in scheme:
        remedy = (
            "PT2E quantizes an exported program of one input size, which is another object and has no "
            f"train() or eval(): this step changes the model itself; allowed: {', '.join(_SCHEMES)}"
        )
    raise ValueError(f"{scheme!r} is not a scheme", remedy)


def readable_group(size: int | None) -> None:
    """Raise ValueError for a size that no group has."""
    if size is not None and size < 1:
        wrong = f"{size} is not a number of values"
        raise ValueError(wrong, "give one from 1 on, as in 32, or null")


def undo(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Replace the quantized weights of `model` by those in `weights`, a `state_dict` of float tensors.

    A quantized weight does not hold its float values any more, so they come from outside: a file of
    weights, or a `state_dict` from before `apply`. They are new Parameters, which can be trained.

    Raises:
        RefusedError: `weights` lacks one of them, or holds one of another shape; nothing is changed then.
    """
    from torch import nn

    from prepare.core.model.quantized import is_quantized
    from prepare.steps._quantizing import quantized_places, release

    places = list(quantized_places(model))
    problems = []
    for place in places:
        value = weights.get(place.path)
        remedy = "give the float weights of this model"
        if value is None:
            problems.append(Problem(place.path, "is not in the weights"))
        elif value.shape != place.tensor.shape:
            sizes = list(value.shape), list(place.tensor.shape)
            wrong = f"has the shape {sizes[0]} in the weights, and {sizes[1]} in the model"
            problems.append(Problem(place.path, wrong, remedy))
        elif is_quantized(value):
            problems.append(Problem(place.path, "is quantized in the weights, too", remedy))
    raise_problems(RefusedError, problems)
    new: dict[int, nn.Parameter] = {}
    for place in places:
        old = place.tensor
        if id(old) not in new:
            values = weights[place.path].detach().to(old.device, old.dtype, copy=True)
            new[id(old)] = nn.Parameter(values)
        place.module._parameters[place.name] = new[id(old)]
        release(place.module)


@register("quantize")
class Quantize(ForDevice, ModelStep):
    """Stores the weights of Linear modules in 8 bits, with torchao; for inference only.

    Runs after all tensors have their device, dtype and memory format, and before any of them is compiled.
    `int8_weight_only` stores weights in int8 and computes in the dtype of the inputs. `int8_dynamic` also
    rounds the inputs of these modules to int8, one scale for each row, and multiplies integers. Each row of a
    weight has one scale, or each `group_size` values of it. The modules stay the same and get new
    Parameters. Convolutions, embeddings and all other weights stay as they are, and the plan and the audit
    say of each one why. Patterns select Linear modules. To undo, give the float weights: `from
    prepare.steps import quantize; quantize.undo(model, weights)`.
    Helps: a quarter of the memory of float32 weights. Together with `compile` it may be faster where the
    weights do not fit into the caches.
    Hurts: every weight is rounded, so verify with your own metric. Without a compiler it is slower: weights
    are converted at every call. The model cannot be trained, and takes no float checkpoint afterwards.
    Source: torchao, `quantize_`; measured, `docs/quantize.md`; torchao issue 1467 for what it skips.
    """

    recipe_part = "weights"
    complexity = 6
    scheme: Annotated[str, "int8_weight_only or int8_dynamic", readable_scheme, ForRecipes()] = (
        "int8_weight_only"
    )
    """`int8_weight_only`, or `int8_dynamic`, which rounds the inputs as well."""
    group_size: Annotated[int | None, "a number of values, as in 32", readable_group] = None
    """The number of values in a row of a weight that share a scale; null for all. For weights only."""
    include: Patterns = ()
    exclude: Patterns = ()

    @classmethod
    def offers(cls, model: torch.nn.Module, *, allow: Iterable[str], mode: str) -> Iterable[Offer]:
        if "quantize" not in allow or mode == "train":
            return []
        return [Offer("quantize", {}), Offer("quantize dynamic", {"scheme": "int8_dynamic"})]

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        step = super().from_options(options)
        if step.group_size and step.scheme == "int8_dynamic":
            wrong = "is for int8_weight_only: integers are multiplied along whole rows"
            raise ConfigError(f"steps.{cls.name}.group_size", wrong, "drop one of the two")
        return step

    def in_training(self) -> Iterator[Problem]:
        wrong = f"is for inference: weights in 8 bits cannot be trained{in_training()}"
        remedy = f"{inference_mode()}, or drop it with {dropped(self.name)}"
        yield Problem(f"steps.{self.name}", wrong, remedy)

    def obstacles(self, model: torch.nn.Module) -> Iterator[Problem]:
        if find_spec("torchao") is None:
            wrong = "needs the package torchao, which is not installed"
            yield Problem(f"steps.{self.name}", wrong, install_remedy("torchao"))
            return
        if model.training:
            yield from self.in_training()
        for place in self._choice().pending(model):
            if place.tensor.is_meta:
                remedy = "load the weights first, with prepare.checkpoint.load(path, model)"
                yield Problem(place.path, "meta holds no data to quantize", remedy)
                return

    def stores(self, model: torch.nn.Module) -> Mapping[str, Storage]:
        return self._choice().storages(model)

    def nothing_stored(self, model: torch.nn.Module) -> str:
        reasons = Counter(storage.reason for storage in self.stores(model).values())
        why = reasons.most_common(1)[0][0] if reasons else "it has none"
        return f"quantizes no weight of {type(model).__name__}: {why}"

    def targets(self, model: torch.nn.Module) -> Iterable[str]:
        return [place.owner for place in self._choice().pending(model)]

    def act(self, model: torch.nn.Module) -> None:

        from prepare.steps._quantizing import quantized, refuse_floats

        choice = self._choice()
        new: dict[int, nn.Parameter] = {}
        for place in choice.pending(model):
            old = place.tensor
            if id(old) not in new:
                new[id(old)] = quantized(old, choice.grid, place.path)
            place.module._parameters[place.name] = new[id(old)]
            refuse_floats(place.module)

    def _choice(self) -> WeightChoice:
        from prepare.steps._quantizing import Grid, WeightChoice

        grid = Grid(self.group_size, inputs=self.scheme == "int8_dynamic")
        return WeightChoice(self.name, grid, self.include, self.exclude, self._device)
