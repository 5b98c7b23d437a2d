"""Match modules by a glob on the dotted name, by `type:` and a class, or by `re:` (in Python)."""

import fnmatch
import glob
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any

from prepare.core.utils.options import ForRecipes
from prepare.core.utils.suggest import nearest
from prepare.errors import Problem

NORMS = "norms"


def matches(pattern: str, name: str, module: Any) -> bool:
    """Return whether `pattern` matches this module with its dotted `name` ("" for the model itself).

    `encoder.*` is a glob over the whole dotted name (`*` matches dots too, case-sensitive),
    `type:Conv3d` matches the name of the class or of any base class, `re:...` must match the whole
    name. The word `norms` matches batch and instance norm of every rank.
    """
    return _matcher(pattern)(name, module)


def patterns_in(step: Any, option: str) -> tuple[str, ...]:
    """Return the patterns in an option of a step; an empty tuple if the step has no such option."""
    value = getattr(step, option, None) or ()
    return (value,) if isinstance(value, str) else value


def exactly(name: str) -> str:
    """Return a pattern that matches only the module with this dotted name; `*` for the model itself."""
    if name == NORMS or name.startswith(("type:", "re:")):
        return f"[{name[0]}]{glob.escape(name[1:])}"
    return glob.escape(name) or "*"


def kept_modules(model: Any, patterns: tuple[str, ...]) -> dict[str, str]:
    """Return `{dotted name: pattern}` of the modules that match a pattern, and of all modules in them."""
    found: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False) if patterns else ():
        above = found.get(name.rpartition(".")[0]) if name else None
        pattern = next((each for each in patterns if matches(each, name, module)), above)
        if pattern is not None:
            found[name] = pattern
    return found


def declared_float32(model: Any) -> dict[int, str]:
    """Return the word by which a class of diffusers or transformers keeps a tensor in float32, by its id."""
    found: dict[int, str] = {}
    for module in model.modules():
        keys = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        words = {word: None for key in keys for word in sorted(getattr(module, key, None) or ())}
        tables = (module.named_parameters, module.named_buffers) if words else ()
        for name, tensor in (pair for table in tables for pair in table(remove_duplicate=False)):
            named = (word for word in words if f".{word}." in f".{name}.")
            found |= {id(tensor): f"{word} of {type(module).__name__}" for word in named}
    return found


def readable(patterns: tuple[str, ...]) -> None:
    """Raise ValueError with the reason for a pattern that is not valid."""
    for pattern in patterns:
        _matcher(pattern)


def expressions(where: str, options: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each regular expression: its cost has no bound, so it is for Python only."""
    for key, value in options.items():
        if isinstance(value, list) and any(str(each).startswith("re:") for each in value):
            wrong = "holds a regular expression, for Python only"
            yield Problem(f"{where}.{key}", wrong, "give names or globs, as in encoder.*")


def near_misses(pattern: str, candidates: Mapping[str, Any]) -> str:
    """Return a hint for a pattern that matched nothing in `{dotted name: module}`."""
    if not candidates:
        return "there is no such module at all"
    if pattern.startswith("type:"):
        bases = {base.__name__ for module in candidates.values() for base in type(module).__mro__}
        allowed = [f"type:{name}" for name in sorted(bases - {"object"})]
    else:
        above = {name.rpartition(".")[0] for name in candidates} - {""}
        above |= {name.split(".")[0] for name in above}
        allowed = [*(f"{name}.*" for name in sorted(above)), *sorted(candidates.keys() - {""})]
        # The model itself has no name, so that only its type can be given.
        allowed = allowed or [f"type:{type(module).__name__}" for module in candidates.values()]
    if f"{pattern}.*" in allowed:
        return f"did you mean {pattern + '.*'!r}?"
    if close := nearest(pattern, allowed):
        return f"did you mean {close[0]!r}?"
    return f"modules: {', '.join(allowed[:8])}{', ...' if len(allowed) > 8 else ''}"


def are_no_code(patterns: tuple[str, ...]) -> bool:
    """Return whether no pattern is a regular expression, whose search may take for ever."""
    return not any(pattern.startswith("re:") for pattern in patterns)


Patterns = Annotated[tuple[str, ...], "a list of patterns", readable, ForRecipes(are_no_code)]


@cache
def _matcher(pattern: str) -> Callable[[str, Any], bool]:
    kind, _, rest = pattern.partition(":")
    if pattern == NORMS:
        # The base class of torch's batch and instance norms, by name: torch is not imported here.
        return _by_class("_NormBase".__eq__)
    if kind == "type" and rest:
        return _by_class(re.compile(_translated(rest)).match)
    if kind == "re" and rest:
        try:
            regex = re.compile(rest)
        except (re.error, RecursionError, OverflowError) as error:
            wrong = f"{pattern!r:.60} is not a regular expression: {error}"
            raise ValueError(wrong) from None
        return lambda name, _: regex.fullmatch(name) is not None
    if not pattern or pattern in ("type:", "re:"):
        raise ValueError(f"{pattern!r} is an empty pattern")
    if set(pattern).isdisjoint("*?["):
        return lambda name, _: name == pattern
    compiled = re.compile(_translated(pattern))
    return lambda name, _: compiled.match(name) is not None


def _translated(pattern: str) -> str:
    # fnmatch searches the rest of the text for the end of each bracket; the last ones have none.
    head, end, tail = pattern.rpartition("]")
    return fnmatch.translate(head + end + tail.replace("[", "[[]"))


def _by_class(accepts: Callable[[str], Any]) -> Callable[[str, Any], bool]:
    known: dict[type, bool] = {}

    def matcher(_: str, module: Any) -> bool:
        cls = type(module)
        if cls not in known:
            known[cls] = any(accepts(base.__name__) for base in cls.__mro__)
        return known[cls]

    return matcher
