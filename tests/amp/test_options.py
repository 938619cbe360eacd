import dataclasses
import inspect
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from kit import LEVELS

from ampctx import AmpError, AmpTypeError, AmpValueError, amp
from ampctx.amp.options import OPT_LEVELS, Options, PrecisionPolicy, resolve

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize("level", LEVELS)
def test_defaults(level):
    """Which they are: those of docs/options.md."""
    p = resolve(level)
    # None overrides nothing.
    options = [f.name for f in dataclasses.fields(PrecisionPolicy) if f.name != "opt_level"]
    assert p == OPT_LEVELS[level] == resolve(level, **dict.fromkeys(options))
    assert p.enabled
    assert p.opt_level == level
    assert p.cast_model_outputs is None


def test_policies_are_values():
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve("O2").loss_scale = 2.0
    with pytest.raises(TypeError, match="does not support item assignment"):
        OPT_LEVELS["O2"] = resolve("O3")
    assert set(OPT_LEVELS) == set(LEVELS)
    assert resolve() == OPT_LEVELS["O1"]


@pytest.mark.parametrize(
    ("level", "name", "given", "stored"),
    [
        ("O2", "loss_scale", "128.0", 128.0),
        ("O2", "loss_scale", 128, 128.0),
        ("O2", "loss_scale", np.float32(4), 4.0),
        ("O2", "loss_scale", torch.tensor([16.0]), 16.0),
        ("O0", "loss_scale", "dynamic", "dynamic"),
        ("O2", "keep_batchnorm_fp32", "False", False),
        ("O3", "keep_batchnorm_fp32", "True", True),
        ("O0", "keep_batchnorm_fp32", False, False),
        ("O3", "master_weights", True, True),
        ("O2", "master_weights", "False", False),
        ("O2", "master_weights", 0, False),
        ("O1", "patch_torch_functions", False, False),
        ("O4", "patch_torch_functions", True, True),
        ("O2", "patch_torch_functions", False, False),
        ("O1", "patch_torch_functions_type", HALF, HALF),
        ("O1", "cast_model_type", FLOAT, FLOAT),
        ("O1", "cast_model_type", False, False),
        ("O2", "cast_model_type", False, False),
        ("O2", "cast_model_type", BF16, BF16),
        ("O5", "cast_model_type", HALF, HALF),
        ("O0", "cast_model_type", torch.float64, torch.float64),
        ("O1", "cast_model_outputs", FLOAT, FLOAT),
        ("O2", "cast_model_outputs", HALF, HALF),
        ("O2", "enabled", False, False),
    ],
    ids=lambda v: str(v).removeprefix("torch."),
)
def test_overrides(level, name, given, stored):
    p = resolve(level, **{name: given})
    assert getattr(p, name) == stored
    assert type(getattr(p, name)) is type(stored)
    assert p == dataclasses.replace(OPT_LEVELS[level], **{name: stored})


@pytest.mark.parametrize(
    ("level", "options", "expected"),
    [
        ("O2", {"cast_model_type": False}, (None, None, None, True)),
        ("O2", {"cast_model_outputs": HALF}, (HALF, HALF, None, True)),
        ("O1", {"cast_model_outputs": FLOAT}, (None, FLOAT, HALF, None)),
        ("O1", {"patch_torch_functions": False}, (None, None, None, None)),
    ],
    ids=str,
)
def test_what_options_make_of_casts(level, options, expected):
    p = resolve(level, **options)
    assert (p.input_dtype, p.output_dtype, p.autocast_dtype, p.master_weights) == expected
    assert p.loss_scale == "dynamic"


@pytest.mark.parametrize("level", ["02", "o1", "O6", "", None, 1, ["O1"]], ids=repr)
def test_unknown_levels(level):
    with pytest.raises(AmpValueError, match=r"^Unexpected optimization level .*the letter O"):
        resolve(level)


@pytest.mark.parametrize(
    ("level", "overrides", "error", "message"),
    [
        ("O1", {"master_weights": True}, AmpValueError, "master_weights=True has no meaning at O1.*use O2"),
        ("O4", {"keep_batchnorm_fp32": "True"}, AmpValueError, "keep_batchnorm_fp32='True' has no.*O4.*use O5"),
        ("O1", {"cast_model_type": HALF}, AmpValueError, r"cast_model_type is torch.float16, and at O1 .*Use O2"),
        ("O2", {"patch_torch_functions": True}, AmpValueError, "patch_torch_functions=True is for opt_level O1 and O4"),
        ("O0", {"patch_torch_functions_type": HALF}, AmpValueError, "patch_torch_functions_type is .*This is O0"),
        ("O1", {"patch_torch_functions_type": BF16}, AmpValueError, "expected float16 at O1, bfloat16 at O4.*O1"),
        ("O4", {"patch_torch_functions_type": HALF}, AmpValueError, "bfloat16 at O4.*O4"),
        ("O2", {"keep_batchnorm_fp32": "yes"}, AmpValueError, "keep_batchnorm_fp32 is 'yes', expected True"),
        ("O2", {"master_weights": 2}, AmpValueError, "master_weights is 2, expected True"),
        ("O4", {"master_weights": "split"}, AmpValueError, r"FusedAdam\(params, .*SplitMasters\(torch.optim.AdamW"),
        ("O5", {"master_weights": "split"}, AmpValueError, r"FusedAdam\(params, .*SplitMasters\(torch.optim.AdamW"),
        ("O2", {"enabled": "no"}, AmpValueError, "enabled is 'no'"),
        ("O2", {"loss_scale": "high"}, AmpValueError, "loss_scale is 'high', expected 'dynamic' or a finite number"),
        ("O2", {"loss_scale": 0}, AmpValueError, "loss_scale is 0"),
        ("O2", {"loss_scale": math.inf}, AmpValueError, "loss_scale is inf"),
        ("O2", {"loss_scale": "nan"}, AmpValueError, "loss_scale is 'nan'"),
        ("O2", {"loss_scale": [1.0]}, AmpTypeError, r"loss_scale is \[1.0\]"),
        ("O2", {"loss_scale": torch.ones(2)}, AmpTypeError, "loss_scale is tensor"),
        ("O2", {"loss_scale": True}, AmpTypeError, "loss_scale is True"),
        ("O2", {"cast_model_type": torch.int8}, AmpTypeError, "cast_model_type is torch.int8, expected a floating"),
        ("O2", {"cast_model_type": "half"}, AmpTypeError, "cast_model_type is 'half'"),
        ("O2", {"cast_model_type": True}, AmpTypeError, "cast_model_type is True"),
        ("O2", {"cast_model_outputs": torch.int32}, AmpTypeError, "cast_model_outputs is torch.int32"),
        ("O2", {"keep_batch_norm": True}, AmpTypeError, "unknown option 'keep_batch_norm'.*keep_batchnorm_fp32"),
    ],
    ids=lambda v: "-".join(f"{k}={x}" for k, x in v.items()) if isinstance(v, dict) else "",
)
def test_bad_overrides_name_the_argument(level, overrides, error, message):
    with pytest.raises(error, match=message) as caught:
        resolve(level, **overrides)
    # apex raised RuntimeError, and ValueError for a bad loss_scale.
    assert isinstance(caught.value, AmpError)
    assert isinstance(caught.value, RuntimeError)


def test_a_misspelt_argument_names_the_nearest():
    for call, misspelt, nearest in (
        (amp.initialize, "keep_bn_fp32", "keep_fp32 or keep_batchnorm_fp32"),
        (amp.GradScaler, "growth_intervall", "growth_interval"),
    ):
        with pytest.raises(AmpTypeError, match=rf"keyword argument '{misspelt}'\. Did you mean {nearest}"):
            call(torch.nn.Linear(2, 2), **{misspelt: True})


# --- docs/options.md --------------------------------------------------------------------------------------------------


def rows_of(heading):
    page = (Path(__file__).parents[2] / "docs" / "options.md").read_text()
    table = re.search(rf"^## {heading}$.*?^(\|.*?)\n\n", page, re.S | re.M).group(1)
    return [[cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in table.splitlines()]


def test_the_docs_have_the_defaults_of_the_levels():
    (_, *levels), _, *rows = rows_of("Defaults of the levels")
    properties = {"inputs cast to": "input_dtype", "outputs cast to": "output_dtype"}
    for option, *cells in rows:
        values = [getattr(OPT_LEVELS[level], properties.get(option, option)) for level in levels]
        assert cells == [str(v).removeprefix("torch.") for v in values], option
    assert levels == list(OPT_LEVELS)
    assert len(rows) == 8


def test_the_docs_have_the_arguments_of_initialize():
    _, _, *rows = rows_of("Arguments")
    of_the_level = {row[0] for row in rows_of("Defaults of the levels")}
    parameters = list(inspect.signature(amp.initialize).parameters.values())[2:]  # without models and optimizers
    assert {row[0] for row in rows} == {p.name for p in parameters} == Options.__annotations__.keys()
    documented = {name: None if default == "level" else eval(default) for name, default, _ in rows}
    assert documented == {p.name: p.default for p in parameters}
    assert of_the_level >= {name for name, default, _ in rows if default == "level"}
