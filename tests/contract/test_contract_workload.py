"""A contract of several sizes: what depends on the size is compared at each."""

import dataclasses

import torch

from layout_regressions import BATCH, FLAT, net
from prepare import Workload
from prepare.stages.contract import Contract, check, record
from prepare.stages.contract.compare import compare
from prepare.stages.contract.records import TimeRatio

WORKLOAD = Workload([BATCH, torch.cat([BATCH] * 2)])


def test_a_change_at_one_size_breaks_the_contract_and_names_it(tmp_path):
    contract = record(net(), WORKLOAD, FLAT)
    names = [size.name for size in WORKLOAD.sizes]
    assert list(contract.sizes) == names
    assert (contract.layouts, contract.verified) == ({}, "")
    assert all(each.layouts and each.verified == "pass" for each in contract.sizes.values())
    contract.save(tmp_path / "contract.yaml")
    assert Contract.load(tmp_path / "contract.yaml") == contract
    assert check(net(), WORKLOAD, contract).status == "kept"
    at_last = contract.sizes[names[1]]
    wrong = dataclasses.replace(at_last, layouts=dict.fromkeys(at_last.layouts, "contiguous"))
    today = dataclasses.replace(contract, sizes=contract.sizes | {names[1]: wrong})
    changes = compare(contract, today).of("broken")
    assert changes
    assert all(change.where.endswith(f" at {names[1]}") for change in changes)


def test_another_size_breaks_the_contract():
    contract = record(net(), WORKLOAD, FLAT)
    assert not contract.is_timed
    first, last = contract.sizes
    changes = compare(contract, dataclasses.replace(contract, sizes={first: contract.sizes[first]}))
    assert [(each.what, each.where, each.text) for each in changes.changes] == [
        ("sizes", last, "is gone")
    ]
    timed = dataclasses.replace(
        contract.sizes[last], time=TimeRatio(ratio=0.5, low=0.4, high=0.6, machine="here")
    )
    assert dataclasses.replace(contract, sizes={last: timed}).is_timed
