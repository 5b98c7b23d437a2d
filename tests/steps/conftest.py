"""Fixtures of the tests of steps."""

import pytest
import torch


@pytest.fixture
def graphs(monkeypatch):
    """Register a backend `counted`, and return the list of graphs that it compiles."""
    graphs = []

    def counted(graph, example):
        graphs.append(graph)
        return graph.forward

    counted._tags = ()
    registry = torch._dynamo.backends.registry
    monkeypatch.setitem(registry._BACKENDS, "counted", None)
    monkeypatch.setitem(registry._COMPILER_FNS, "counted", counted)
    return graphs
