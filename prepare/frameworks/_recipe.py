"""Apply a recipe to the network of a framework, check it later, and write its audit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepare.core.utils.suggest import choose
from prepare.errors import ConfigError, RefusedError
from prepare.pipeline import Pipeline
from prepare.steps.input_format import InputFormat

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


Recipe = Pipeline | Mapping[str, Any] | str | Path


class NetworkRecipe:
    """A recipe for a network whose device and inputs a framework decides.

    A step `device` is left out, since the framework moves the network, and the inputs are formatted by a
    hook of the network (`input_format` with `attach`), since the framework calls it.
    """

    def __init__(self, recipe: Recipe) -> None:
        if isinstance(recipe, str | Path):
            recipe = Pipeline.load(recipe)
        elif isinstance(recipe, Mapping):
            recipe = Pipeline.from_config(recipe)
        elif not isinstance(recipe, Pipeline):
            wrong = f"a {type(recipe).__name__} is not a recipe"
            raise ConfigError("recipe", wrong, "give a path, a mapping of steps, or a Pipeline")
        steps = {name: options for name, options in recipe.to_config().items() if name != "device"}
        steps[InputFormat.name] = {**steps.get(InputFormat.name, {}), "attach": True}
        self.pipeline = Pipeline.from_config(steps)

    def apply(self, network: nn.Module, optimizers: Iterable[Optimizer] = ()) -> None:
        """Prepare the network, and give the state of each optimizer the layout of its parameters."""
        self.pipeline.apply(network)
        self.adopt(network, optimizers)

    def adopt(self, network: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """Hand over optimizers of a prepared network: their state follows, also when it is loaded later."""
        self.pipeline.apply(network, optimizer=optimizers)

    def check(self, network: nn.Module, optimizers: Iterable[Optimizer] = ()) -> None:
        """Raise DriftError if weights or the state of an optimizer lost the layout."""
        self.pipeline.check(network, strict=True, optimizer=optimizers)

    def write(self, network: nn.Module, folder: str | Path) -> None:
        """Write the audit and the recipe into a folder."""
        from prepare.audit import audit

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        audit(network).save(folder / "audit.json")
        self.pipeline.save(folder / "recipe.yaml")


def child_network(module: nn.Module, name: str | None) -> nn.Module:
    """Return the submodule `name`; without a name, the only child that has parameters, else `module` itself.

    Raises:
        RefusedError: `name` is not a submodule, or is not given and several have parameters.
    """
    children = [
        key for key, child in module.named_children() if any(True for _ in child.parameters())
    ]
    if name is not None:
        try:
            return module.get_submodule(name)
        except AttributeError:
            remedy = choose(name, children, noun="modules with parameters")
            raise RefusedError("module", f"{name!r} is not a module", remedy) from None
    if len(children) > 1:
        wrong = f"{type(module).__name__} has {len(children)} modules with parameters: {', '.join(children)}"
        raise RefusedError("module", wrong, f"name one, as in module={children[0]!r}")
    return module.get_submodule(children[0]) if children else module
