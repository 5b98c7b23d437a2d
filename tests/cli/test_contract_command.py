"""The command `contract`: record, check, exit codes and messages."""

import pytest

from prepare.cli.main import run
from prepare.contract import Contract

NET = ("model=unet2d", "model.width=4", "model.depth=2", "device=cpu", "input.shape=[1,1,16,16]")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_contract_is_written_kept_and_broken(folder, capsys):
    assert run(["contract", *NET, "memfmt=channels_last", "file=c.yaml", "update=true"]) == 0
    assert "the contract is written to c.yaml" in capsys.readouterr().out
    assert Contract.load(folder / "c.yaml").layouts["head"] == "channels_last"
    assert run(["contract", *NET, "memfmt=channels_last", "contract.file=c.yaml"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "the contract is kept: c.yaml"
    assert run(["contract", *NET, "memfmt=contiguous", "file=c.yaml"]) == 3
    out = capsys.readouterr().out
    assert "broken: recipe: conv2d_memory_format: its options changed" in out
    assert out.splitlines()[-1] == "if that is intended, record it again: add contract.update=true"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("file=no.yaml",),
            "contract.file: no.yaml does not exist; write it with contract.update=true",
        ),
        (("update=perhaps",), "contract.update: 'perhaps' is not"),
        (("task=contract", "contract=3"), "contract: 3 is not a mapping; write task=contract"),
        (("file=bad.yaml",), "bad.yaml: this is not a contract"),
    ],
)
def test_wrong_words_of_a_contract_are_named(words, message, folder, capsys):
    (folder / "bad.yaml").write_text("[")
    command = [] if words[0].startswith("task") else ["contract"]
    assert run([*command, *NET, "verify=none", "memfmt=channels_last", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_contract_needs_an_example(folder, capsys):
    words = ["model._target_=torch.nn.Conv2d", "+model.in_channels=3", "+model.out_channels=4"]
    words += ["+model.kernel_size=3", "memfmt=channels_last", "update=true", "device=cpu"]
    assert run(["contract", *words]) == 2
    assert "input: task=contract needs an example input" in capsys.readouterr().err
