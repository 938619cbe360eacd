"""What the tests of ``ampctx-apex migrate`` share."""

import textwrap

from ampctx_apex.migrate import cli


def migrated(tmp_path, source):
    """The new text of a file, and its findings. Another run must change nothing more."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(source).lstrip("\n"))
    (result,) = cli.migrate([path])
    assert result.error is None
    path.write_bytes(result.after)
    (again,) = cli.migrate([path])
    assert not again.changed, again.after
    return result.after.decode(), result.findings
