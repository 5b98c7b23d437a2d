"""An export for several sizes: what differs among them is dynamic, and every size is answered."""

import pytest
import torch

from prepare import Workload
from prepare.core.document import ReportContext
from prepare.stages.export import Export, export
from prepare.stages.export.document import export_document
from test_export import network


def sized(*shapes):
    return Workload([torch.randn(shape) for shape in shapes])


@pytest.fixture
def exported(tmp_path, in_process):
    return lambda to, workload, **how: export(network(), workload, to=to, folder=tmp_path, **how)


def test_the_dimensions_in_which_sizes_differ_are_dynamic(exported, tmp_path):
    found = exported("Stub", sized((2, 3, 6, 8), (1, 3, 6, 10)), budget=0.2)
    assert (found.status, found.options["dynamic"]) == ("pass", [0, 3])
    answers = {check.size: check.answer for check in found.checks if check.size}
    assert answers == {"2x3x6x8": "right", "1x3x6x10": "right"}
    assert [each.size.name for each in found.time.sizes] == list(answers)
    found.save(tmp_path / "export.json")
    assert Export.load(tmp_path / "export.json") == found
    texts = [text for _, text in export_document(ReportContext(found={"export": found})).rows]
    assert [text.partition(", ")[0] for text in texts[1:]] == ["2x3x6x8 right", "1x3x6x10 right"]


def test_an_artefact_that_refuses_a_size_fails(exported):
    found = exported("OneHeight", sized((2, 3, 8, 8), (2, 3, 6, 6)))
    assert found.status == "fail"
    assert found.reason.startswith("compare: contiguous input at 6x6: refused: ")
