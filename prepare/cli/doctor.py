"""Answer `doctor` and `doctor share`: examine this machine, write its files, and make one to share."""

from __future__ import annotations

import argparse
from pathlib import Path

from prepare.core.utils.files import printable_path, write_text
from prepare.core.utils.text import line
from prepare.errors import ConfigError

_USAGE = "doctor [--device DEVICE] [--seconds N] [--folder FOLDER] [--dry-run]"
_SHARE = "doctor share [FOLDER/doctor.json]"
_FOLDER = "doctor"


def doctor(argv: list[str]) -> int:
    """Run the command; return 1 if something is wrong on this machine, else 0."""
    if argv and argv[0] == "share":
        return _share(argv[1:])
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--device")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--folder", default=_FOLDER)
    parser.add_argument("--dry-run", action="store_true")
    try:
        flags, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError("doctor", str(error), _USAGE) from error
    if rest:
        raise ConfigError("doctor", f"{rest[0]!r} is not an option", _USAGE)
    from prepare.cli.commands import require_packages

    require_packages("rich")
    from prepare.doctor import examine
    from prepare.report.pages.page import doctor_page
    from prepare.report.terminal.console import stage
    from prepare.report.terminal.document import show_document

    with stage(f"examining this machine, about {flags.seconds:.0f} s at most", after=0.5) as show:
        diagnosis = examine(
            flags.device,
            seconds=flags.seconds,
            dry_run=flags.dry_run,
            progress=lambda where, done, count: show(f"probed {done} of {count}: {where}"),
        )
    show_document(diagnosis.document())
    folder = Path(flags.folder)
    _make(folder)
    diagnosis.save(folder / "doctor.json")
    write_text(folder / "doctor.html", doctor_page(diagnosis))
    written = printable_path(folder / "doctor.json")
    line(f"written: {written}, doctor.html; to share them in an issue: doctor share {written}")
    return diagnosis.exit_code


def _share(argv: list[str]) -> int:
    from prepare.doctor.records import Diagnosis
    from prepare.errors import PrepareError

    if len(argv) > 1:
        raise ConfigError("doctor share", f"takes one file, got {len(argv)}", _SHARE)
    path = Path(argv[0] if argv else f"{_FOLDER}/doctor.json")
    try:
        diagnosis = Diagnosis.load(path)
    except PrepareError as error:
        raise ConfigError.of(error.problems) from error
    shared = path.with_name("doctor-share.json")
    diagnosis.shared().save(shared)
    line(f"attach {printable_path(shared)}: it has no paths, names of hosts or commits")
    return 0


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(
            "--folder", f"{printable_path(folder)}: {reason}", "give another"
        ) from error
