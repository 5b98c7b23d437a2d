"""Warn that idle threads of torch spin on a machine whose cores are all in use."""

import torch

from prepare.core.utils.machine import spinning_among, usable_cores
from prepare.errors import Problem
from prepare.pipeline.tensor_table import RequestTable, TensorRequest


def spinning_problems(table: RequestTable) -> list[Problem]:
    """Return a warning if the model is on a CPU, and other programs want the cores of torch's threads."""
    cores = len(usable_cores())
    if torch.get_num_threads() == 1 or not (running := spinning_among(cores)):
        return []
    if not any(_device_type(request) == "cpu" for request in table.requests):
        return []
    wrong = (
        f"{running} threads want to run on {cores} cores, and idle threads of torch spin: "
        "an operator may take many times as long [idle_threads_spin_cpu]"
    )
    return [Problem("this machine", wrong, "set GOMP_SPINCOUNT=1000 in the environment of Python")]


def _device_type(request: TensorRequest) -> str:
    """Return the type of the device that the tensor will be on."""
    move = request.move()
    return (move.device if move else request.tensor.device).type
