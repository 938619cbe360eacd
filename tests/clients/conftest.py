"""Runs programs of other people, unchanged, with apex's names served by us. pyproject.toml lists them (clients).

Left out of a plain run of pytest (``norecursedirs``): ``make test-clients`` installs the programs and runs these.
"""

import os
from importlib.util import find_spec

import pytest
import torch
from ampctx_apex import install_apex

from ampctx import amp

CLIENTS = {
    "test_frameworks.py": "lightning",
    "test_ignite.py": "ignite",
    "test_lightning.py": "pytorch_lightning",
    "test_megatron.py": "megatron",
    "test_mmengine.py": "mmengine",
    "test_onnx.py": "onnxruntime",
    "test_opennmt.py": "onmt",
    "test_timm.py": "timm",
    "test_transformers.py": "transformers",
}

# What Python, numpy or torch have deprecated since these programs were written is theirs. Other warnings stay errors:
# torch tells with them of steps and schedulers in the wrong order.
WARNINGS = [
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:pkg_resources is deprecated:UserWarning",
    "ignore:The .torchvision:UserWarning",
    "ignore:full scope is deprecated:UserWarning",
    "error::DeprecationWarning:ampctx",
    "error::FutureWarning:ampctx",
]

missing = sorted(name for name in CLIENTS.values() if find_spec(name) is None)
if missing and os.environ.get("AMPCTX_REQUIRE_CLIENTS"):
    raise RuntimeError(f"AMPCTX_REQUIRE_CLIENTS is set, and not installed: {', '.join(missing)}")
collect_ignore = [file for file, name in CLIENTS.items() if name in missing]


def pytest_report_header():
    return f"not installed, so left out (make clients): {', '.join(missing)}" if missing else None


def pytest_configure(config):
    for line in WARNINGS:
        config.addinivalue_line("filterwarnings", line)
    config.addinivalue_line("markers", "tpu: of pytorch-ignite's own tests")


def declare_torchvision_ops():
    """Makes the torchvision of the package registry importable beside a torch without CUDA.

    Its library is built for CUDA and does not load then, and its Python fails on two operators of that library, for
    which it has fake kernels. Declaring them is enough: none of the tests runs an operator of torchvision.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        # A library takes its operators along when it is collected.
        torch.ops.torchvision.declared_by_tests = library


# Before the programs are imported: some look for apex at that time. Where ampctx-apex is installed, apex is
# there without this.
if find_spec("apex") is None:
    install_apex()
os.environ["HF_HUB_OFFLINE"] = "1"
if find_spec("torchvision") is not None:
    declare_torchvision_ops()


@pytest.fixture(autouse=True)
def _clean_session():
    yield
    amp.reset()
