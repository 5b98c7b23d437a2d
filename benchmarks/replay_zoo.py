"""Make bundles of models of conf/model, and replay each in other environments.

    python benchmarks/replay_zoo.py --python /venv-of-torch-2.5.1/bin/python /newest-venv/bin/python

Each bundle is the folder of a run here, in channels-last with `repair_layout`, verified and timed (`short`).
A line of `results/replay.jsonl` is a bundle in an environment: versions of torch, the first line of the
answer, its exit code, and what differs. A second start leaves out what the file holds.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
FILE = ROOT / "benchmarks" / "results" / "replay.jsonl"
COMMON = ("memfmt=by_rank", "+steps.repair_layout={}", "verify=short", "bench=short")
MODELS = """
    unet3d unet2d resnet2d monai_unet2d monai_unet3d monai_attentionunet3d monai_densenet3d
    monai_dynunet3d monai_segresnet3d transformers_convnext transformers_efficientnet
    transformers_mobilenet_v2 transformers_resnet transformers_segformer transformers_vit
    diffusers_autoencoder_kl diffusers_autoencoder_temporal diffusers_unet2d
    diffusers_unet2d_condition diffusers_unet3d_condition
"""
TRAIN = "unet2d monai_unet2d monai_densenet3d transformers_mobilenet_v2 transformers_segformer"
MORE = dict.fromkeys(TRAIN.split(), ("mode=train",)) | {"monai_dynunet3d": ("precision=bfloat16",)}


def answer(folder: Path, python: str, *words: str) -> dict[str, Any]:
    """Run a command of the tool in a folder, and return what `--json` prints, or the end of an error."""
    command = [python, str(ROOT / "run.py"), *words, "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    ended = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder, check=False
    )
    try:
        return json.loads(ended.stdout)
    except json.JSONDecodeError:
        return {"code": ended.returncode, "error": (ended.stderr or ended.stdout)[-2000:]}


def measure(python: str, folder: Path, name: str) -> dict[str, Any]:
    """Replay a bundle in an environment, and return its answer; make the bundle if it is not there."""
    if not (folder / name / "result.json").is_file():
        made = (f"model={name}", *COMMON, *MORE.get(name, ()), f"hydra.run.dir={name}")
        answer(folder, sys.executable, *made, "overwrite=true")
    load = round(os.getloadavg()[0], 1)
    told = answer(folder, python, "replay", name)
    said = told.get("replay") or told["error"]
    return {"code": told["code"], "said": said, "load": load, "differ": told.get("there_and_here")}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the bundles with each first line, by environment, and the lines that say more than it."""
    cells: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        key = (row["said"].partition(":")[0].partition(";")[0], row["here"])
        cells.setdefault(key, []).append(f"`{row['bundle']}`")
    versions = sorted({row["here"] for row in rows})
    lines = [f"| the first line | {' | '.join(versions)} |", f"|---{'|---' * len(versions)}|"]
    for said in sorted({said for said, _ in cells}):
        found = [cells.get((said, here), []) for here in versions]
        lines.append(f"| `{said}` | {' | '.join(f'{len(f)}: ' + ', '.join(f) for f in found)} |")
    return lines


def main() -> None:
    """Replay what the file does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", nargs="+", required=True, help="that of each environment")
    parser.add_argument("--bundles", type=Path, default=Path("bundles"), help="a folder for them")
    options = parser.parse_args()
    options.bundles.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.exists() else []
    known = {(row["bundle"], row["here"]) for row in rows}
    version = "import torch; print(torch.__version__)"
    found = [subprocess.check_output([p, "-c", version], text=True) for p in options.python]
    environments = dict(zip(map(str.strip, found), options.python, strict=True))
    for name, here in itertools.product(MODELS.split(), environments):
        if (name, here) not in known:
            row = {"bundle": name, "words": MORE.get(name, ())}
            row |= {"there": torch.__version__, "here": here}
            row |= measure(environments[here], options.bundles.resolve(), name)
            print(json.dumps(row), flush=True)
            with FILE.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
