"""The fingerprint of a model is of its values, not of its layout."""

import doctest

import torch

from prepare.core.model import fingerprint as module
from prepare.core.model.fingerprint import fingerprint
from prepare.pipeline import Pipeline, pipeline
from small_nets import clone, mixed


def test_it_is_the_same_in_every_memory_format():
    model = mixed()
    before = fingerprint(model)
    Pipeline.from_config({"conv2d_memory_format": {}, "conv3d_memory_format": {}}).apply(
        model, known_issues="ignore"
    )
    assert fingerprint(model) == before == fingerprint(clone(model))


def test_one_bit_one_name_and_one_type_make_another():
    model = mixed()
    found = {fingerprint(model)}
    with torch.no_grad():
        model["flat"][0].weight[0, 0, 0, 0] += 1e-6
    found.add(fingerprint(model))
    model["flat"].append(model["flat"][0])
    found.add(fingerprint(model))
    found.add(fingerprint(model.bfloat16()))
    assert len(found) == 4


def test_sparse_and_empty_tensors_have_one_too():
    model = torch.nn.Module()
    model.register_buffer("edges", torch.eye(2).to_sparse())
    model.register_buffer("nothing", torch.ones(0, 3))
    assert len(fingerprint(model)) == 64


def test_the_examples_in_the_docstrings_run():
    for each in (module, pipeline):
        failed, tried = doctest.testmod(each)
        assert tried > 0
        assert failed == 0
