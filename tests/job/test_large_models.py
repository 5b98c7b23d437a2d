"""Large models in little memory: thousands of modules, and 100 GB on meta."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from run_faults import ROOT, posix

MEASURED = """
    import json, os, resource, sys
    import torch
    from prepare.audit import audit
    from prepare.pipeline import Pipeline
    import nets
    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    nets.small()
    model = getattr(nets, sys.argv[1])()
    before = peak()
    plan = Pipeline.from_config({"conv2d_memory_format": {}, "half": {"dtype": "bfloat16"}}).plan(model)
    planned = peak()
    found = audit(model, plan=plan)
    found.save("audit.json")
    print(json.dumps({
        "modules": sum(1 for _ in model.modules()), "bytes": found.summary["bytes_before"],
        "devices": found.summary["devices"], "planned": len(plan.tensors), "rows": len(found.rows),
        "plan": planned - before, "audit": peak() - planned, "file": os.path.getsize("audit.json"),
    }))
"""


def measured(folder: Path, build: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURED), build], capture_output=True, text=True, cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@posix
@pytest.mark.parametrize(
    ("build", "modules"), [("fewer", 4_000), pytest.param("many", 20_000, marks=pytest.mark.slow)]
)
def test_thousands_of_modules_are_audited_in_little_memory(folder, build, modules):
    found = measured(folder, build)
    assert found["modules"] > modules
    assert found["rows"] == found["planned"] == modules * 7 // 4
    assert found["file"] < modules * 1_000
    assert max(found["plan"], found["audit"]) < modules * 7_500


@posix
@pytest.mark.slow  # the command line does the same below
def test_100_gb_on_meta_are_planned_without_materialising(folder):
    found = measured(folder, "huge")
    assert found["bytes"] > 100e9
    assert found["devices"] == {"meta": 224}
    assert max(found["plan"], found["audit"]) < 100_000_000
