"""Messages of programs without a working apex: docs/errors.md has each, and what raised it works with ampctx."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "errors.md").read_text()
SECTION = PAGE.partition("## No module named 'apex'")[2].partition("\n## ")[0]
MESSAGES = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (`.*) \| .* \|$", SECTION, flags=re.M)))

OPTIMIZER = "import torch; from apex.optimizers import {0}; {0}([torch.ones(2, requires_grad=True)], lr=0.1)"
# What programs do where they tell the message, by a part of it.
CAUSES = {
    "install apex from": "from apex import amp; from apex.parallel import DistributedDataParallel",
    "to run this example": "from apex.fp16_utils import *; from apex.multi_tensor_apply import multi_tensor_applier",
    "to use fp16 training": "from apex import amp; amp.initialize",
    "to use distributed": "from apex.parallel import DistributedDataParallel",
    "Using FP16 with APEX": "import importlib.metadata; importlib.metadata.version('apex'); from apex import amp",
    "AMP impl specified": "from apex import amp; from apex.parallel import convert_syncbn_model",
    "Trainer tried": "from apex.optimizers import FusedAdam",
    "Cuda extensions are being compiled": "import amp_C, apex_C",
    "'apex.amp'": "import apex.amp",
    "'apex.parallel'": "from apex.parallel import SyncBatchNorm",
    "no attribute 'amp'": "import apex; apex.amp.initialize",
    "torch._six": "from apex.amp._amp_state import _amp_state; from apex.amp._initialize import applier",
    "'apex_C'": "import apex_C; apex_C.flatten",
    "'fused_layer_norm_cuda'": "import fused_layer_norm_cuda; from apex.normalization import FusedLayerNorm as F; F(4)",
    "FusedAdam requires": OPTIMIZER.format("FusedAdam"),
    "FusedLAMB": OPTIMIZER.format("FusedLAMB"),
    "FusedSGD": OPTIMIZER.format("FusedSGD"),
    "fused unscale kernel": "from apex.multi_tensor_apply import multi_tensor_applier as m; assert m.available",
    "pyramid": "import apex; apex.amp",
}


@pytest.mark.parametrize("message", MESSAGES)
def test_what_raised_the_message_works(message):
    causes = [cause for part, cause in CAUSES.items() if part in message]
    assert causes, f"no cause of {message!r} is known here"
    for cause in causes:
        exec(cause, {})


def test_the_page_tells_which_lines_to_run():
    assert len(MESSAGES) > 15
    assert [part for part in CAUSES if not any(part in message for message in MESSAGES)] == []
    assert "$ pip uninstall apex " in SECTION
    assert "$ pip install . ./ampctx-apex " in SECTION
