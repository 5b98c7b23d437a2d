"""`prepare.app.sweep.read`: the rows of a sweep as records."""

import pytest

from prepare.app.sweep import read
from prepare.errors import FileError


def test_each_row_is_a_record_with_every_override_and_figure(swept):
    rows = read(str(swept))
    assert [row["number"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert len({tuple(row) for row in rows}) == 1
    best = rows[4]
    assert (best["model"], best["memfmt"], best["precision"]) == (
        *("unet3d", "channels_last_3d", "bfloat16"),
    )
    assert (best["status"], best["best"], best["shared"], best["seconds"]) == (
        *("ok", True, False, 2.0),
    )
    assert (best["time_ratio"], best["bytes_after"]) == (0.41, 1 << 19)
    assert best["folder"] == str(swept / "4-row")
    assert (rows[2]["status"], rows[2]["time_ratio"]) == ("failed", None)
    assert "slow_conv3d" in rows[2]["reason"]
    assert (rows[5]["folder"], rows[5]["precision"]) == (None, "half")


def test_a_folder_that_is_no_sweep_is_refused(tmp_path):
    with pytest.raises(FileError, match="is not the folder of a sweep"):
        read(tmp_path)
