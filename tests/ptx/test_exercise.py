"""What gpu-check runs on a GPU, on the PTX: every kernel, with tables of every size and tables on the device."""

from __future__ import annotations

import exercise


def test_exercise(interpreter):
    exercise.main(["--device", "cpu"])
