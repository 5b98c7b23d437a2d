"""task=contract: record, check, exit codes and messages."""

import pytest

from prepare.app.cli.main import run
from prepare.app.job.settings import read_settings
from prepare.errors import ConfigError
from prepare.stages.contract import Contract

NET = ("model=unet2d", "model.width=4", "model.depth=2", "device=cpu", "input.shape=[1,1,16,16]")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_contract_is_written_and_broken(folder, capsys):
    assert (
        run(
            [
                "task=contract",
                *NET,
                "memfmt=channels_last",
                "contract.file=c.yaml",
                "contract.update=true",
            ]
        )
        == 0
    )
    assert "to c.yaml" in capsys.readouterr().out
    assert Contract.load(folder / "c.yaml").layouts["head"] == "channels_last"
    assert run(["task=contract", *NET, "memfmt=contiguous", "contract.file=c.yaml"]) == 3
    out = capsys.readouterr().out
    assert "recipe: conv2d_memory_format: " in out
    page = max(folder.rglob("report.html"), key=lambda path: path.stat().st_mtime)
    assert "recipe: conv2d_memory_format: " in page.read_text()
    assert "Contract broken" in page.read_text()
    assert "Undo what" in page.read_text()
    assert "contract.update=true\n" in out


def test_a_missing_or_broken_file_is_named(folder, capsys):
    (folder / "bad.yaml").write_text("[")
    words = [*NET, "verify=none", "memfmt=channels_last"]
    assert run(["task=contract", *words, "contract.file=no.yaml"]) == 2
    missing = "contract.file: no.yaml does not exist; write it with contract.update=true"
    assert missing in capsys.readouterr().err
    assert run(["task=contract", *words, "contract.file=bad.yaml"]) == 2
    assert "bad.yaml: " in capsys.readouterr().err


def settings(**more):
    return read_settings({"model": {"_target_": "a.b"}, "task": "contract", **more}, choices={})


def test_wrong_options_of_a_contract_are_named():
    with pytest.raises(ConfigError, match="contract.update: 'perhaps' is not"):
        settings(contract={"update": "perhaps"})
    with pytest.raises(ConfigError, match="contract: 3 is not a mapping; write task=contract"):
        settings(contract=3)
    assert settings(contract={"update": True}).stages["contract"].update


def test_a_contract_needs_an_example(folder, capsys):
    words = ["model._target_=torch.nn.Conv2d", "+model.in_channels=3", "+model.out_channels=4"]
    words += ["+model.kernel_size=3", "memfmt=channels_last", "contract.update=true", "device=cpu"]
    assert run(["task=contract", *words]) == 2
    assert "example input" in capsys.readouterr().err
