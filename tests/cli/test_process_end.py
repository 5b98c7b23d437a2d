"""The end of the process: prompt, quiet under Ctrl-C, and with the line that crashed it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prepare.app.cli import main as cli

END = """
import atexit, gc, os, signal
from prepare.app.cli import main as cli
cli.run = lambda argv: {code}
atexit.register(lambda: print(gc.get_freeze_count() > 1000, signal.getsignal(signal.SIGINT).name))
atexit.register(os.write, 2, b"leaked 64 types")
cli.main()
"""


def ended(code):
    command = [sys.executable, "-c", END.format(code=code)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_process_leaves_garbage_and_ignores_a_late_ctrl_c():
    done = ended("3")
    assert (done.returncode, done.stdout, done.stderr) == (3, "True SIG_IGN\n", "")


def test_a_crash_in_native_code_names_the_line_that_was_running():
    done = ended("os.kill(os.getpid(), signal.SIGSEGV)")
    assert done.returncode == -11
    assert "Segmentation fault" in done.stderr
    assert "line 4 in <lambda>" in done.stderr


@pytest.mark.parametrize("command", [["summary"], ["diff", "."]])
def test_the_folder_of_a_killed_run_says_so(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("killed/.hydra").mkdir(parents=True)
    Path("killed/prepare.log").touch()
    assert cli.run([*command[:1], "killed", *command[1:]]) == 2
    assert capsys.readouterr().err == (
        "killed: holds no result: its run was killed or is still running; "
        "wait for it, or run it again; on Linux, dmesg says if memory ran out\n"
    )


@pytest.mark.parametrize("flags", [[], ["--json"]])
@pytest.mark.parametrize("words", [["steps"], ["--help"], ["summary", "nothing"], ["--cfg", "job", "memfmt=contiguous", "model=unet2d"]], ids=" ".join)  # fmt: skip
def test_a_reader_that_leaves_changes_nothing(words, flags, capfd, monkeypatch):
    code = cli.run([*words, *flags])
    said = capfd.readouterr().err
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert cli.run([*words, *flags]) == code
    assert capfd.readouterr().err == said
