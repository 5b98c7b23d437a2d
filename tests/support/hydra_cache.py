"""Compose the groups of a configuration once in all test processes: a command takes most of its time for that."""

import copy
import hashlib
import os
import pickle
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import hydra
import yaml
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import DefaultsList
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import base, grammar_parser, omegaconf

from paths import CONF

# The folder that the processes of one test run share.
COMPOSED = "PREPARE_TESTS_COMPOSED"
# What does not change while the tests run; what is stored for Hydra is part of each key.
SOURCES = {"hydra.conf", str(CONF), ""}
_read, _parsed, _kept = {}, {}, {}
_parse = OverridesParser.parse_rule
_list = config_loader_impl.create_defaults_list
_load = ConfigRepository.load_config
_compose = ConfigLoaderImpl._compose_config_from_defaults_list


def use_hydra_cache():
    """Read each YAML text and each override once in this process, and compose each list of groups once in all."""
    if not hydra.__version__.startswith("1.3."):
        return  # these are private functions of that version
    os.environ.setdefault(COMPOSED, tempfile.mkdtemp(prefix="prepare-tests-"))
    omegaconf.yaml = _CachedYaml()
    base.parse = cache(grammar_parser.parse)  # the trees are only read
    OverridesParser.parse_rule = _parse_once
    config_loader_impl.create_defaults_list = _list_once
    ConfigRepository.load_config = _load_once
    ConfigLoaderImpl._compose_config_from_defaults_list = _compose_once


class _CachedYaml:
    """The module `yaml` for omegaconf."""

    def __getattr__(self, name):
        return getattr(yaml, name)

    def load(self, stream, Loader):
        text = stream if isinstance(stream, str) else stream.read()
        if text not in _read:
            _read[text] = yaml.load(text, Loader=Loader)
        return copy.deepcopy(_read[text])


def _parse_once(self, text, rule):
    if (text, rule) not in _parsed:
        _parsed[text, rule] = _parse(self, text, rule)
    return copy.deepcopy(_parsed[text, rule])


def _list_once(repo, config_name, overrides_list, **how):
    single = [each for each in overrides_list if not each.is_sweep_override()]
    groups = [each for each in single if repo.group_exists(each.key_or_group)]

    def compute():
        found = _list(repo, config_name, overrides_list, **how)
        return found.defaults, found.defaults_tree, found.overrides.known_choices

    words = (config_name, [each.input_line for each in groups], sorted(how.items()))
    defaults, tree, choices = _once(repo, words, compute)
    others = [each for each in single if each not in groups or isinstance(each.value(), dict)]
    return DefaultsList(defaults, tree, others, SimpleNamespace(known_choices=choices))


def _load_once(self, config_path):
    return _once(self, config_path, lambda: _load(self, config_path))


def _compose_once(self, defaults, repo):
    return _once(repo, defaults, lambda: _compose(self, defaults, repo))


def _once(repo, words, compute):
    """Return what `compute` does for these words, once; what is refused is computed each time."""
    sources = [source.path for source in repo.get_sources()]
    # Another folder may change, and so may what an interpolation stands for in a group.
    if set(sources) - SOURCES or "${oc" in repr(words):
        return compute()
    stored = pickle.dumps(ConfigStore.instance().repo)
    said = repr((words, sources)).encode("utf-8", "surrogatepass")
    key = hashlib.sha256(stored + said).hexdigest()
    file = Path(os.environ[COMPOSED], key)
    if key not in _kept and file.exists():
        _kept[key] = file.read_bytes()
    if key not in _kept:
        _kept[key] = pickle.dumps(compute())
        beside = file.with_suffix(f".{os.getpid()}")
        beside.write_bytes(_kept[key])
        beside.replace(file)
    return pickle.loads(_kept[key])
