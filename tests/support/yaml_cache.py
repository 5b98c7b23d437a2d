"""Parse each YAML text once in a process: Hydra reads every file of conf/ some thousand times in the tests."""

import copy

import yaml
from omegaconf import omegaconf

_parsed = {}


class _CachedYaml:
    """The module `yaml` for omegaconf, whose `load` takes a quarter of the time of a composition."""

    def __getattr__(self, name):
        return getattr(yaml, name)

    def load(self, stream, Loader):
        text = stream if isinstance(stream, str) else stream.read()
        if text not in _parsed:
            _parsed[text] = yaml.load(text, Loader=Loader)
        return copy.deepcopy(_parsed[text])


def use_yaml_cache():
    omegaconf.yaml = _CachedYaml()
