"""Bytes copied in the decoders of two video autoencoders, before and now: prints a table, writes raw results.

    python benchmarks/decode_copies.py --before TREE [--out FILE]

`TREE` is a checkout of an earlier commit. There the decoder is a module around the autoencoder, here it is
the method: `model=diffusers_decode_wan`. Both take the same steps, and `prepare.stages.flow.predict` counts
the bytes, so that a busy machine does not matter.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

_TREE = Path(__file__).resolve().parents[1]
_STEPS = ("memfmt=by_rank", "+steps.repair_layout={}", "+steps.keep_layout={}")
_OFF = ("verify=none", "bench=none")
# The latents of each decoder without the batch, and the options that change its width.
_NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "wan": ("4,3,32,32", {}),
    "wan, base_dim 32": ("4,3,16,16", {"base_dim": 32}),
    "hunyuan": ("4,2,8,8", {}),
    "hunyuan, 32 channels": ("4,2,8,8", {"block_out_channels": [32] * 4}),
}


def decoder(name: str, changes: dict[str, Any]) -> Any:
    """Return the autoencoder of a configuration as a module whose forward decodes."""
    import diffusers
    from omegaconf import OmegaConf
    from torch import nn

    node = OmegaConf.load(_TREE / "conf" / "model" / f"diffusers_autoencoder_{name}.yaml").model
    options: Any = {**OmegaConf.to_container(node), **changes}
    autoencoder = getattr(diffusers, options.pop("_target_").rpartition(".")[2])(**options)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vae = autoencoder

        def forward(self, latents: Any) -> Any:
            return self.vae.decode(latents, return_dict=False)[0]

    return Decoder()


def measure(name: str, batch: int, *, is_method: bool) -> dict[str, Any]:
    """Return the summary of the layout flow of a decoder that the `prepare` of this process prepares."""
    from prepare.app.cli.main import run

    latents, changes = _NETWORKS[name]
    network = name.partition(",")[0]
    if is_method:
        model = [f"model=diffusers_decode_{network}"]
        model += [f"model.{key}={value}".replace(" ", "") for key, value in changes.items()]
    else:
        written = json.dumps(changes).replace('"', "").replace(" ", "")
        model = ["model._target_=decode_copies.decoder", f"+model.name={network}"]
        model += [f"+model.changes={written}"]
    with tempfile.TemporaryDirectory() as folder:
        words = [*model, f"input.shape=[{batch},{latents}]", *_STEPS, *_OFF]
        with contextlib.suppress(SystemExit):
            run([*words, f"hydra.run.dir={folder}/run"])
        flow = json.loads(Path(folder, "run", "flow.json").read_text())
    return {
        "network": name,
        "batch": batch,
        "now": is_method,
        "latents": [batch, *map(int, latents.split(","))],
        **flow["summary"],
        "copies": [f"{each['module']}: {each['why']}, {each['bytes']}" for each in flow["copies"]],
        "threads": torch.get_num_threads(),
        **{package: version(package) for package in ("torch", "diffusers")},
    }


def measure_all(tree: Path, *, is_method: bool) -> list[dict[str, Any]]:
    """Return the rows of all decoders, measured with the code of this tree in a process of its own."""
    paths = os.pathsep.join([str(tree), str(Path(__file__).parent)])
    # With one thread torch runs more convolutions in its reference kernel.
    own = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "2"}
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.json")
        code = f"import decode_copies; decode_copies.write({str(rows)!r}, {is_method})"
        subprocess.run([sys.executable, "-c", code], check=True, cwd=folder, env=own)
        found: list[dict[str, Any]] = json.loads(rows.read_text())
    return found


def write(path: str, is_method: bool) -> None:  # noqa: FBT001
    """Write the rows that the `prepare` of this process gives."""
    rows = [measure(name, n, is_method=is_method) for name in _NETWORKS for n in (1, 2)]
    Path(path).write_text(json.dumps(rows))


def main() -> None:
    """Measure every decoder in both trees."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=_TREE / "benchmarks/results/decode_copies.json")
    options = parser.parse_args()
    before = measure_all(options.before.resolve(), is_method=False)
    now = measure_all(_TREE, is_method=True)
    options.out.write_text(json.dumps([*before, *now], indent=1) + "\n")
    for old, new in zip(before, now, strict=True):
        part = new["copied_bytes"] / max(1, old["copied_bytes"])
        copied = f"{old['copied_bytes']} -> {new['copied_bytes']} bytes, {part:.0%}"
        print(f"{new['network']}, batch {new['batch']}: {copied}, {new['breaks']} breaks left")


if __name__ == "__main__":
    main()
