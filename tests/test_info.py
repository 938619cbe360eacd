import json
import subprocess
import sys

import ampctx
from ampctx.__main__ import info, main


def test_info_json(capsys):
    assert main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == info()
    assert report["ampctx"] == ampctx.__version__
    assert report["extension"]["loaded"] == ampctx.ops.extension.loaded
    if report["extension"]["loaded"]:
        assert "cpu" in report["extension"]["backends"]
        assert report["extension"]["simd_used"] in report["extension"]["simd"]


def test_python_m_ampctx_tells_backends_in_words():
    result = subprocess.run([sys.executable, "-m", "ampctx"], capture_output=True, text=True, check=True)
    assert result.stderr == ""
    assert f"ampctx     {ampctx.__version__}" in result.stdout
    if ampctx.ops.extension.loaded:
        assert "loaded, kernels in use for cpu" in result.stdout


def test_a_missing_extension_is_explained(capsys, monkeypatch):
    missing = ampctx.kernels.extension.Extension(False, reason="the file is not there: build it")
    monkeypatch.setattr(ampctx.ops, "extension", missing)
    main(["info"])
    out = capsys.readouterr().out
    assert "not loaded: the ops run on plain torch" in out
    assert "the file is not there: build it" in out


def test_public_names_exist():
    for module in (ampctx, ampctx.amp):
        for name in module.__all__:
            assert hasattr(module, name), name
