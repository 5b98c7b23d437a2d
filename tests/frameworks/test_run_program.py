"""`prepare run`: the program runs as without us, in this process and in those that it starts."""

import os
import socket
import subprocess
import sys

import pytest

from prepare.app.cli import main as cli
from prepare.pipeline import Pipeline

PROGRAM = """
import sys
import torch
from torch import nn

def main():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3))
    optimizer = torch.optim.AdamW(net.parameters())
    loss = net(torch.randn(2, 3, 12, 12)).square().mean()
    loss.backward()
    optimizer.step()
    print(sys.argv[1:], __name__, sys.path[0], net[0].weight.stride())

if __name__ == "__main__":
    main()
    if "fail" in sys.argv:
        raise ValueError("of the program")
    if "stop" in sys.argv:
        sys.exit("a reason")
    if "seven" in sys.argv:
        sys.exit(7)
"""
RANKS = """
import os, sys, torch
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

def work(rank, kind):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1], RANK=str(rank), WORLD_SIZE="2")
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3))
    if kind == "ddp":
        wrapped = DistributedDataParallel(net)
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel
        wrapped = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    output = wrapped(torch.randn(2, 3, 12, 12))
    output.square().mean().backward()
    optimizer.step()
    with open(f"rank{rank}", "w") as file:
        file.write(str(output.stride()))
    distributed.destroy_process_group()

if __name__ == "__main__":
    multiprocessing.spawn(work, (sys.argv[2],), 2)
"""
LAST = "(27, 1, 9, 3)"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Pipeline.from_config({"conv2d_memory_format": {}}).save("recipe.yaml")
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "ranks.py").write_text(RANKS)
    return tmp_path


@pytest.fixture
def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def python(*words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["train.py", "--lr", "1"], 0, ""),
        (["-m", "train", "x"], 0, ""),
        (["--report", "pages", "train.py", "seven"], 7, ""),
        (["--module", "Unet*", "train.py", "stop"], 1, "a reason"),
        (["train.py", "fail"], 1, "ValueError: of the program"),
    ],
)
def test_a_program_keeps_its_words_and_its_exit_code(folder, words, code, said):
    done = python("-m", "prepare", "run", "recipe.yaml", *words)
    program = words[words.index("train") if "-m" in words else words.index("train.py") :]
    plain = python(*(["-m"] if "-m" in words else []), *program)
    assert (done.returncode, plain.returncode) == (code, code), done.stderr
    assert said in done.stderr
    same = done.stdout.replace(LAST, "(27, 9, 3, 1)") if "--module" not in words else done.stdout
    assert same == plain.stdout
    if "--module" in words:
        assert "nothing was prepared" in done.stderr
    else:
        assert LAST in done.stdout
        assert "Sequential: 2 of 2 convolutions prepared" in done.stderr
    if code == 1 and "fail" in words:  # the traceback begins in the program
        assert done.stderr.partition("Traceback")[2].splitlines()[1].startswith(f'  File "{folder}')
    assert (folder / "pages" / "0-Sequential" / "report.html").is_file() == ("--report" in words)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_ranks_that_a_program_starts_are_prepared_alike(folder, kind, free_port):
    done = python("-m", "prepare", "run", "recipe.yaml", "ranks.py", str(free_port), kind)
    assert done.returncode == 0, done.stderr
    said = [(folder / f"rank{rank}").read_text() for rank in (0, 1)]
    assert said == ["(128, 1, 16, 2)"] * 2


@pytest.mark.parametrize(
    ("words", "named"),
    [([], "recipe and a program"), (["recipe.yaml"], "recipe and a program"), (["nil.yaml", "train.py"], "nil.yaml"),
     (["recipe.yaml", "--repot", "x", "train.py"], "recipe and a program")],
)  # fmt: skip
def test_wrong_words_are_one_line_before_the_program_starts(folder, capsys, words, named):
    assert cli.run(["run", *words]) == 2
    out, error = capsys.readouterr()
    assert (out, named in error, len(error.splitlines())) == ("", True, 1)
