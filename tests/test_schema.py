"""The JSON Schemas of the configuration: current, named in every file, and of one mind with the checks of a run."""

import json
import sys

import pytest
import yaml

from paths import CONF, ROOT
from prepare.app.job.settings import read_settings
from prepare.errors import ConfigError

jsonschema = pytest.importorskip("jsonschema")
sys.path.insert(0, str(ROOT / "docs"))

import make_schema  # noqa: E402

FILES = {name: json.loads((CONF / "schema" / name).read_text()) for name in make_schema.schemas()}
CONFIG = jsonschema.Draft7Validator(FILES["config.json"])
MODEL = {"model": {"_target_": "my_nets.Net"}, "input": {}, "steps": {}}


def test_the_schemas_are_those_of_the_dataclasses():
    assert make_schema.schemas() == FILES, "run python docs/make_schema.py"
    assert {path.name for path in (CONF / "schema").iterdir()} == set(FILES)
    for schema in FILES.values():
        jsonschema.Draft7Validator.check_schema(schema)


def test_every_shipped_file_names_its_schema_and_fits_it():
    counted = 0
    for path in sorted(CONF.rglob("*.yaml")):
        if line := make_schema.modeline(path):
            text = path.read_text()
            assert line in text.splitlines()[:2], path
            schema = path.parent / line.partition("$schema=")[2]
            validator = jsonschema.Draft7Validator(FILES[schema.name])
            assert schema.resolve().parent == CONF / "schema"
            assert list(validator.iter_errors(yaml.safe_load(text))) == [], path
            counted += 1
    assert counted > 50


@pytest.mark.parametrize(
    ("config", "is_right"),
    [
        ({"mode": "train", "amp": "bf16", "seed": 3, "verify": "full", "plugins": ["a"]}, True),
        ({"steps": {"half": {"dtype": "fp16", "keep": ["norms"]}, "device": None}}, True),
        ({"input": {"shape": [2, 3, 8, 8], "dtype": "float16"}, "bench": {"seconds": 3}}, True),
        ({"weights": None, "fail_on": ["breaks"], "compile": {"save": None}}, True),
        ({"mode": "trian"}, False),
        ({"seed": "three"}, False),
        ({"strict": "yes"}, False),
        ({"modle": {}}, False),
        ({"steps": {"half": {"dtpye": "float16"}}}, False),
        ({"steps": {"conv2d_memory_format": {"memory_format": "channels_last_3d"}}}, False),
        ({"verify": {"secnds": 3}}, False),
        ({"bench": "ful"}, False),
        ({"input": {"shap": [1]}}, False),
        ({"input": {"shape": ["a"]}}, False),
        ({"task": "prepaer"}, False),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_an_editor_marks_what_a_run_refuses(config, is_right):
    assert CONFIG.is_valid(config) == is_right
    try:
        read_settings(MODEL | config, choices={})
    except ConfigError as error:
        assert not is_right, error
    else:
        assert is_right


def test_what_is_resolved_later_is_left_to_the_run():
    for later in ("${oc.env:SEED}", "???"):
        assert CONFIG.is_valid({"seed": later, "steps": {"half": {"dtype": later}}, "mode": later})
    assert CONFIG.is_valid({"steps": {"brain": {"a": 1}}})  # of a plugin
    assert CONFIG.is_valid({"defaults": ["a", {"override /memfmt": "nhwc"}], "hydra": {"run": {}}})
