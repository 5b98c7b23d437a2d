"""Replay the folder of a run: rebuild its model, apply its recipe, and verify and time it on this machine.

The folder may be somebody else's: it is data. What it names as code is imported only if it is the model of
one of our configurations, or a `_target_` that is given again.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepare.app.cli.answer import is_quiet, no_stage, tell
from prepare.app.cli.compose_config import Composer, composing
from prepare.app.cli.given_recipe import steps_of
from prepare.app.cli.hydra_app import claimed, instantiated
from prepare.app.cli.resolve_config import resolved
from prepare.app.job.execute import JobSpec, run_job
from prepare.app.job.headline import Headline, headline
from prepare.app.job.outcome import DONE, FAILED, NOT_VERIFIED, Outcome
from prepare.app.job.record import NOTHING_CHANGED, Job, Record, files_in
from prepare.app.report.compare_runs import Change, read_differences
from prepare.app.report.pages.write_pages import write_pages
from prepare.app.report.sentences import timing_text
from prepare.app.report.terminal.console import stage
from prepare.core.utils import files, plain_yaml
from prepare.core.utils.plain_yaml import short_repr
from prepare.core.utils.suggest import choose
from prepare.core.utils.text import line, printable
from prepare.errors import ConfigError, PrepareError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_CONFIG = ".hydra/config.yaml"
_REMEDY = "give the folder that a run has written"
_TARGET = "_target_"
# The folder may not say these: they are given with the command.
_GIVEN = ("model._target_", "weights", "hydra.run.dir")
_LEVELS = ("verify", "bench")
# The keys of the recorded configuration that a replay takes, beside the model and its input.
_TAKEN = ("mode", "amp", "strict", "seed", "strip")
# Our own networks take any plain values.
_NETWORKS = "prepare.models."


def replay(argv: list[str]) -> int:
    """Replay the run in a folder; return 0 if it is right here, 3 if it is wrong, 1 if that is unknown.

    Raises:
        ConfigError: the folder is not the record of a run, or names code that is not given again.
    """
    given = dict(word.split("=", 1) for word in argv if "=" in word)
    folders = [word for word in argv if "=" not in word]
    if len(folders) != 1 or not given.keys() <= {*_GIVEN, *_LEVELS}:
        remedy = f"write replay FOLDER, and after it any of {'=, '.join((*_GIVEN, *_LEVELS))}="
        raise ConfigError("replay", "takes one folder and the words of its usage", remedy)
    folder = Path(folders[0])
    with composing() as composer:
        try:
            config, choices = _configuration(folder, given, composer)
            read_differences(folder, folder)  # refuses what could not be compared at the end
            if (recorded := Record(folder).result()) is None:
                raise ConfigError(
                    f"{files.printable_path(folder)}/result.json", "is not there", _REMEDY
                )
        except PrepareError as error:
            raise ConfigError.of(error.problems) from error
        out = Path(given.get("hydra.run.dir") or composer.compose([]).hydra.run.dir)
    job = Job(None, None, ["replay", str(folder)], choices)
    spec = JobSpec(config=config, job=job, folder=out, build=instantiated, pages=write_pages)
    with claimed(out, overwrite=False):
        outcome = run_job(spec, stage=no_stage if is_quiet() else stage)
    text, code = judged(headline(recorded.figures), outcome)
    line(printable(text))
    told = _side_by_side(folder, out) if outcome.results is not None else {}
    texts = {name: _sides(*told[name]) for name in told}
    texts["record"] = str(out)
    for name, shown in texts.items():
        line(printable(f"  {name:{max(map(len, texts))}}  {shown}"))
    tell(replay=text, there_and_here=told, folder=str(out))
    return code


def judged(there: Headline, outcome: Outcome) -> tuple[str, int]:
    """Return what a replay says of a run with the figures `there`, in a line, and its exit code."""
    result = outcome.result
    if outcome.code == NOT_VERIFIED:
        return f"differs: {result.error}", outcome.code
    if outcome.code != DONE:
        return f"cannot be replayed here: {result.error}", outcome.code
    here = headline(result.figures)
    if result.reason == NOTHING_CHANGED:
        return "holds here: the recipe changes nothing in this model", DONE
    if here.verified is None or here.verified.status != "pass":
        reason = here.verified.reason if here.verified else "nothing was compared"
        return f"cannot tell whether it is right here: {reason}", FAILED
    speeds = "".join(f"; {timed.what}: {timing_text(timed)}" for timed in here.timed)
    verdicts = {timed.what: timed.verdict for timed in here.timed}
    was_faster = {timed.what for timed in there.timed if timed.verdict == "faster"}
    if "slower" in verdicts.values():
        was_slower = any(timed.verdict == "slower" for timed in there.timed)
        return f"right, and slower here{' and there' * was_slower}{speeds}", DONE
    if any(verdicts.get(what) == "no difference" for what in was_faster):
        return f"right, and not faster here{speeds}", DONE
    if {*verdicts.values()} - {"faster", "no difference"}:
        return f"right, and unclear whether faster here{speeds}", DONE
    return f"holds here{speeds or ', and was not timed'}", DONE


def _sides(there: str, here: str) -> str:
    """Return `there: 2.13.0; here: absent`, and what is equal once."""
    return there if there == here else f"there: {there or 'absent'}; here: {here or 'absent'}"


def _side_by_side(folder: Path, out: Path) -> dict[str, list[str]]:
    """Return in what the two machines and the results of the two runs differ: by name, there and here."""
    parts = {part.title: part.changes for part in read_differences(folder, out).parts}
    same = (Change("machine", "the same", "the same"),)
    changes = (*parts.get("environment", same), *parts.get("results", ()))
    return {change.name: [change.first, change.second] for change in changes}


def _configuration(
    folder: Path, given: Mapping[str, str], composer: Composer
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the configuration of a replay, and the chosen model. Raises PrepareError."""
    where = files.printable_path(folder)
    for name in (".hydra", _CONFIG, *files_in(folder)):
        if (folder / name).is_symlink():
            raise ConfigError(f"{where}/{name}", "is a link", "give a folder that holds the file")
    data = files.read_bytes(folder / _CONFIG, limit=plain_yaml.MAX_BYTES)
    place = f"{where}/{_CONFIG}"
    recorded = plain_yaml.read(data, place, remedy=_REMEDY, keys=(_TARGET,)).value
    if not isinstance(recorded, dict) or not isinstance(recorded.get("model"), dict):
        raise ConfigError(place, "is not the configuration of a run", _REMEDY)
    others = [*_pairs({key: value for key, value in recorded.items() if key != "model"})]
    code = [key for key, value in others if key == _TARGET or (key == "factory" and value)]
    if code or recorded.get("plugins"):
        wrong = f"names code to import: {code[0] if code else 'plugins'}"
        raise ConfigError(place, wrong, "such a run is not replayed")
    if recorded.get("weights") is not None and "weights" not in given:
        wrong = f"names a file of weights: {short_repr(recorded['weights'])}"
        raise ConfigError(place, wrong, "give the file again as weights=FILE")
    levels = {group: given[group] for group in _LEVELS if group in given}
    for group, level in levels.items():
        if level not in (known := composer.groups[group]):
            raise ConfigError(group, f"{level!r} is not allowed", choose(level, known))
    job = Record(folder).job()
    choice = job.choices.get("model", "custom") if job else "custom"
    shipped = choice in composer.groups["model"] and choice != "custom"
    chosen = {"model": choice} if shipped else {}
    words = [f"{group}={word}" for group, word in {**chosen, **levels}.items()]
    config, _ = resolved(composer.compose(words))
    model = {"method": None} | recorded["model"]
    _check_model(model, config["model"], given.get("model._target_"), place)
    config |= {key: recorded[key] for key in _TAKEN if key in recorded}
    config |= {"model": model, "input": recorded.get("input"), "weights": given.get("weights")}
    config |= {"steps": steps_of(str(folder / "recipe.yaml"))}
    return config, chosen


def _check_model(
    model: Mapping[str, Any], ours: Mapping[str, Any], given: str | None, place: str
) -> None:
    """Refuse a model that is neither ours nor has the given target, or that names other code inside."""
    target = model.get(_TARGET)
    if not isinstance(target, str) or not all(map(str.isidentifier, target.split("."))):
        raise ConfigError(f"{place}: model", "names no class or function", _REMEDY)
    if given is not None and given != target:
        wrong = f"the folder names {short_repr(target)}, not {short_repr(given)}"
        raise ConfigError("model._target_", wrong, "give what the folder names, if you trust it")
    if _is_like(model, ours):
        return
    if any(key == _TARGET for value in model.values() for key, _ in _pairs(value)):
        wrong = "names code to import inside of the model: _target_"
        raise ConfigError(place, wrong, "such a run is not replayed")
    is_network = target.startswith(_NETWORKS) and target == ours.get(_TARGET)
    if given is None and not (is_network and model["method"] == ours["method"]):
        wrong = f"the folder names {short_repr(target)}, which would be imported and called"
        remedy = f"if you trust it with the options there, add model._target_={target}"
        raise ConfigError("model._target_", wrong, remedy)


def _is_like(value: Any, ours: Any) -> bool:
    """Return whether a value differs from ours in numbers only: a word may name code, or a file to fetch."""
    if isinstance(value, dict) and isinstance(ours, dict):
        same = value.keys() == ours.keys()
        return same and all(_is_like(item, ours[key]) for key, item in value.items())
    return value == ours or (_is_number(value) and _is_number(ours))


def _is_number(value: Any) -> bool:
    """Return whether this is a number, or a list of numbers."""
    if isinstance(value, list):
        return all(map(_is_number, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key of the mappings in a value, at any depth, and its value."""
    if isinstance(value, dict):
        yield from value.items()
        value = [*value.values()]
    for item in value if isinstance(value, list) else ():
        yield from _pairs(item)
