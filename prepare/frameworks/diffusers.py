"""Prepare one component of a diffusers pipeline, such as its VAE, with the method that the pipeline calls."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from prepare.core.forward.call import class_calling
from prepare.core.utils.suggest import choose
from prepare.errors import RefusedError
from prepare.frameworks.outside import Recipe, network_pipeline


def prepare(pipe: Any, component: str, *, recipe: Recipe, method: str = "forward") -> Any:
    """Apply a recipe to a component of a pipeline, in place, and return the pipeline.

    Its inputs are formatted by a hook, and those of `method` on the way in. The hooks of
    `enable_model_cpu_offload` stay and go on working, installed before or after. A step `device` of the
    recipe is left out, since the pipeline moves its components.

    Args:
        pipe: a `diffusers.DiffusionPipeline`.
        component: its name in the pipeline: `unet`, `transformer`, `vae`.
        recipe: the path of a recipe, a mapping of steps, or a Pipeline.
        method: what the pipeline calls of it, where that is not the component itself: `decode` of a VAE.

    Raises:
        RefusedError: the pipeline has no such network, or its weights are offloaded one by one.
        ConfigError: the network has no such method, or the recipe is wrong.
    """
    networks = {name: each for name, each in pipe.components.items() if isinstance(each, nn.Module)}
    if component not in networks:
        wrong = f"{component!r} is not a network of this {type(pipe).__name__}"
        raise RefusedError("component", wrong, choose(component, networks, noun="networks"))
    model: Any = networks[component]
    class_calling(model.__class__, method)  # raises if there is no such method
    if any(each.is_meta for each in model.parameters()):
        wrong = "its weights are offloaded module by module, which would bring back those of before"
        remedy = "prepare it first, then call enable_sequential_cpu_offload"
        raise RefusedError(component, wrong, remedy)
    pipeline = network_pipeline(recipe)
    pipeline.apply(model)
    if method != "forward":
        own = vars(model).get(method)  # what others have put there is called still
        vars(model)[method] = MethodType(partial(_formatted, own, method, pipeline.format), model)
    return pipe


def _formatted(own: Any, method: str, formatted: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `own`, or the method of this name, with formatted tensors; a copy of the model calls its own."""
    call = own or partial(getattr(type(model), method), model)
    return call(*formatted(args), **formatted(kwargs))
