"""`prepare run`: the program runs as without us, in this process and in those that it starts."""

import json
import os
import subprocess
import sys

import pytest

from prepare.app.cli import main as cli
from prepare.pipeline import Pipeline

# What the programs share: a network, and a training that prints whether outputs are channels-last, and losses.
SHARED = """
import os, sys, torch, warnings
from torch import nn

torch.set_num_threads(1)

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3))

def train(net, optimizer):
    losses = []
    for _ in range(3):
        output = net(torch.randn(2, 3, 12, 12))
        losses.append(output.square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    tell(output, losses)

def tell(output, losses):
    os.write(1, f"{[int(output.stride(1) == 1), *map(float, losses)]}\\n".encode())
"""
PROGRAM = """
from shared import network, sys, torch, train

if __name__ == "__main__":
    net = network()
    train(net, torch.optim.AdamW(net.parameters()))
    print(sys.argv[1:], __name__, sys.path[0])
    if "fail" in sys.argv:
        raise ValueError("of the program")
    sys.exit({"stop": "a reason", "seven": 7}.get(sys.argv[-1]))
"""
RANKS = """
from torch import distributed, multiprocessing
from torch.nn.parallel import DistributedDataParallel
from shared import network, nn, os, sys, torch, train, warnings

def work(rank, kind):
    store = f"file://{os.getcwd()}/{os.getppid()}"
    distributed.init_process_group("gloo", store, rank=rank, world_size=2)
    if kind == "ddp":
        warnings.filterwarnings("error", ".*is not prepared")
        wrapped = nn.Sequential(DistributedDataParallel(network()))  # as Lightning's Fabric does
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel
        wrapped = FullyShardedDataParallel(network(), use_orig_params=True, device_id=torch.device("cpu"))
    train(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1))
    distributed.barrier()
    os._exit(0)  # at its end torch aborts one of ten such processes, also without us

if __name__ == "__main__":
    multiprocessing.spawn(work, (sys.argv[1],), 2)
"""
LIGHTNING = """
import lightning
from lightning.pytorch.demos.boring_classes import BoringModel
from shared import nn, tell

class Module(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer, self.losses = nn.Sequential(nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 8, 3)), []

    def training_step(self, batch, index):
        self.losses.append(self(batch).square().mean())
        return self.losses[-1]

    def on_train_end(self):
        tell(self.layer[1].weight, self.losses)

if __name__ == "__main__":
    lightning.seed_everything(0)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy="ddp_spawn", limit_train_batches=3,
        limit_val_batches=0, **dict.fromkeys(quiet, False)).fit(Module())
"""
SWITCH = ["-m", "prepare", "run", "recipe.yaml"]
FILES = {"shared": SHARED, "train": PROGRAM, "ranks": RANKS, "lightning_ranks": LIGHTNING}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Pipeline.from_config({"conv2d_memory_format": {}}).save("recipe.yaml")
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def python(*words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)


def figures(done):
    """Return what each rank printed: whether it is prepared, and its losses."""
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("[0,", "[1,"))]
    return sorted(map(json.loads, lines))


@pytest.mark.process
@pytest.mark.parametrize(
    "words",
    [
        ["ranks.py", "ddp"],
        pytest.param(
            ["ranks.py", "fsdp"], marks=pytest.mark.slow
        ),  # torch aborts some of its processes
        ["lightning_ranks.py"],
    ],
)
def test_each_rank_has_the_losses_without_us_and_is_prepared(folder, words):
    pytest.importorskip("lightning")
    runs = [figures(python(*before, *words)) for before in ([], [], SWITCH)]
    assert [[each[0] for each in run] for run in runs] == [[0, 0], [0, 0], [1, 1]]
    plain, again, ours = ([loss for each in run for loss in each[1:]] for run in runs)
    noise = max(abs(a - b) for a, b in zip(plain, again, strict=True))
    assert ours == pytest.approx(plain, rel=1e-4, abs=noise)


@pytest.mark.parametrize(
    ("options", "program", "code", "said"),
    [
        ([], ["train.py", "--lr", "1"], 0, ""),
        ([], ["-m", "train", "x"], 0, ""),
        (["--report", "pages"], ["train.py", "seven"], 7, ""),
        (["--module", "Unet*"], ["train.py", "stop"], 1, "a reason"),
        ([], ["train.py", "fail"], 1, "ValueError: of the program"),
    ],
)
def test_a_program_keeps_its_words_and_its_exit_code(folder, options, program, code, said):
    # As the script that is installed, whose own words may hold a `-m` too, or as a module.
    script = ["-c", "from prepare.app.cli.main import main; main()"]
    begin = [*script, *SWITCH[2:]] if "-m" in program else SWITCH
    done, plain = python(*begin, *options, *program), python(*program)
    assert (done.returncode, plain.returncode) == (code, code), done.stderr
    assert said in done.stderr
    assert done.stdout.splitlines()[1] == plain.stdout.splitlines()[1]  # its words and names
    told = "nothing was" if "--module" in options else "Sequential: 2 of 2 convolutions"
    assert f"{told} prepared" in done.stderr
    assert done.stdout.startswith("[1,") == ("--module" not in options)
    if "fail" in program:  # the traceback begins in the program
        assert done.stderr.partition("Traceback")[2].splitlines()[1].startswith(f'  File "{folder}')
    assert (folder / "pages" / "0-Sequential" / "report.html").is_file() == ("--report" in options)


@pytest.mark.parametrize(
    ("words", "named"),
    [([], "recipe and a program"), (["recipe.yaml"], "recipe and a program"), (["nil.yaml", "train.py"], "nil.yaml"),
     (["recipe.yaml", "--repot", "x", "train.py"], "recipe and a program")],
)  # fmt: skip
def test_wrong_words_are_one_line_before_the_program_starts(folder, capsys, words, named):
    assert cli.run(["run", *words]) == 2
    out, error = capsys.readouterr()
    assert (out, named in error, len(error.splitlines())) == ("", True, 1)
