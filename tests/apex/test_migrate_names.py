"""``ampctx migrate --to ampctx``: what becomes of each way to import and use a name of apex."""

from types import MappingProxyType

import pytest
from ampctx_apex import names
from ampctx_apex.migrate import targets
from ampctx_apex.names import Name
from migrating import migrated

pytest.importorskip("libcst")

# Stand-ins for rows of each kind; a row that the table has itself comes first.
ROWS = {
    "apex.amp._amp_state": Name("supported"),
    "apex.parallel.convert_syncbn_model": Name("supported", "torch.nn.SyncBatchNorm.convert_sync_batchnorm"),
    "apex.parallel.DistributedDataParallel": Name("adapted", None, "runs over torch's."),
    "apex.parallel.LARC.LARC": Name("supported", "ampctx.optimizers.LARC"),
    "apex.multi_tensor_apply.multi_tensor_applier": Name("supported", "ampctx.multi_tensor_applier"),
    "apex.normalization.FusedLayerNorm": Name("adapted", "torch.nn.LayerNorm", "has no memory_efficient."),
    "apex.fp16_utils.FP16_Optimizer": Name("supported"),
    "amp_C.kept_kernel": Name("supported"),
    "apex.contrib": Name("refused", None, "Use torch."),
    "apex.moved.fine": Name("adapted", "ampctx.foreach.scale", "takes lists."),
}


@pytest.fixture(autouse=True)
def _rows(monkeypatch):
    assert targets.locate("ampctx.foreach.scale") is not None
    monkeypatch.setattr(names, "NAMES", MappingProxyType(ROWS | dict(names.NAMES) | FIXED))


# Rows that a test is about, whatever the table has.
FIXED = {
    k: ROWS[k]
    for k in (
        "apex.contrib",
        "apex.moved.fine",
        "apex.parallel.convert_syncbn_model",
        "apex.multi_tensor_apply.multi_tensor_applier",
        "amp_C.kept_kernel",
    )
}
SHIM = "import ampctx_apex.apex  # makes the apex imports below work: keep it above them\n"

MOVED = {
    "from import": ("from apex import amp\namp.initialize(m)\n", "from ampctx import amp\namp.initialize(m)\n"),
    "from import as": (
        "from apex import amp as A\nA.initialize(m)\n",
        "from ampctx import amp as A\nA.initialize(m)\n",
    ),
    "several": (
        "from apex import amp as A, optimizers  # both\nA.scale_loss(x, o)\noptimizers.FusedAdam(p)\n",
        "from ampctx import amp as A, optimizers  # both\nA.scale_loss(x, o)\noptimizers.FusedAdam(p)\n",
    ),
    "import": ("import apex\napex.amp.initialize(m)\n", "import ampctx\nampctx.amp.initialize(m)\n"),
    "import as": ("import apex as ax\nax.amp.initialize(m)\n", "import ampctx as ax\nax.amp.initialize(m)\n"),
    "import module": (
        "import apex.optimizers\nf = apex.optimizers.FusedSGD\n",
        "import ampctx.optimizers\nf = ampctx.optimizers.FusedSGD\n",
    ),
    "import module as": (
        "import apex.amp as amp, os\namp.initialize(m)\n",
        "import ampctx.amp as amp, os\namp.initialize(m)\n",
    ),
    "two plain imports": (
        "import apex\nimport apex.amp\napex.amp.initialize(apex.optimizers.FusedAdam(p))\n",
        "import ampctx\nimport ampctx.amp\nampctx.amp.initialize(ampctx.optimizers.FusedAdam(p))\n",
    ),
    "name": (
        "from apex.optimizers import FusedAdam\nFusedAdam(p)\n",
        "from ampctx.optimizers import FusedAdam\nFusedAdam(p)\n",
    ),
    "name as": (
        "from apex.optimizers import FusedAdam as FA\nFA(p)\n",
        "from ampctx.optimizers import FusedAdam as FA\nFA(p)\n",
    ),
    "name of another name": (
        "from apex.moved import fine\nfine(x)\n",
        "from ampctx.foreach import scale as fine\nfine(x)\n",
    ),
    "name not used": ("from apex.optimizers import FusedAdam\n", "from ampctx.optimizers import FusedAdam\n"),
    "subclass and annotation": (
        "from apex import optimizers\nclass A(optimizers.FusedAdam): x: optimizers.FusedSGD\n",
        "from ampctx import optimizers\nclass A(optimizers.FusedAdam): x: optimizers.FusedSGD\n",
    ),
    "decorator": (
        "import apex\n@apex.amp.half_function\ndef f(x): pass\n",
        "import ampctx\n@ampctx.amp.half_function\ndef f(x): pass\n",
    ),
    "in parentheses with comments": (
        "from apex.optimizers import (  # all\n    FusedAdam,  # one\n    # another\n    FusedSGD as S,\n)\n",
        "from ampctx.optimizers import (  # all\n    FusedAdam,  # one\n    # another\n    FusedSGD as S,\n)\n",
    ),
    "backslash": (
        "from apex.optimizers import FusedAdam, \\\n    FusedSGD\n",
        "from ampctx.optimizers import FusedAdam, \\\n    FusedSGD\n",
    ),
    "split": (
        "from apex.parallel.LARC import LARC\nfrom apex.multi_tensor_apply import multi_tensor_applier\n",
        "from ampctx.optimizers import LARC\nfrom ampctx import multi_tensor_applier\n",
    ),
    "module without one of ours": (
        "from apex import multi_tensor_apply\nmulti_tensor_apply.multi_tensor_applier(op, b, l)\n",
        "import ampctx\nampctx.multi_tensor_applier(op, b, l)\n",
    ),
    "in a function": (
        "def f():\n\tfrom apex import amp\n\treturn amp.state_dict()\n",
        "def f():\n\tfrom ampctx import amp\n\treturn amp.state_dict()\n",
    ),
    "guarded": (
        'try:\n    from apex import amp\nexcept ImportError:\n    raise ImportError("no apex")\namp.initialize(m)\n',
        'try:\n    from ampctx import amp\nexcept ImportError:\n    raise ImportError("no apex")\namp.initialize(m)\n',
    ),
    "guarded with None": (
        "try:\n    from apex import amp\nexcept ImportError:\n    amp = 0\nif amp is None:\n    amp.initialize(m)\n",
        "try:\n    from ampctx import amp\nexcept ImportError:\n    amp = 0\nif amp is None:\n    amp.initialize(m)\n",
    ),
    "on a condition": (
        "if fp16:\n    from apex import amp; A = 1\namp.initialize(m)\n",
        "if fp16:\n    from ampctx import amp; A = 1\namp.initialize(m)\n",
    ),
    "global": (
        "amp = None\ndef f():\n    global amp\n    from apex import amp\ndef g():\n    amp.initialize(m)\n",
        "amp = None\ndef f():\n    global amp\n    from ampctx import amp\ndef g():\n    amp.initialize(m)\n",
    ),
    "shadowed": (
        "import apex\ndef f(apex):\n    return apex.thing\napex.amp.initialize(m)\n",
        "import ampctx\ndef f(apex):\n    return apex.thing\nampctx.amp.initialize(m)\n",
    ),
    "torch": (
        "import torch\nfrom apex.parallel import convert_syncbn_model\nm = convert_syncbn_model(m, process_group=g)\n",
        "import torch\nm = torch.nn.SyncBatchNorm.convert_sync_batchnorm(m, process_group=g)\n",
    ),
    "torch not imported": (
        "from apex.parallel import convert_syncbn_model as c\nm = c(m)\n",
        "import torch\nm = torch.nn.SyncBatchNorm.convert_sync_batchnorm(m)\n",
    ),
    "torch and ampctx": (
        "import apex\nm = apex.parallel.convert_syncbn_model(m)\napex.amp.initialize(m)\n",
        "import ampctx\nimport torch\nm = torch.nn.SyncBatchNorm.convert_sync_batchnorm(m)\nampctx.amp.initialize(m)\n",
    ),
    "attribute of a class": (
        "import apex\nprint(apex.optimizers.FusedAdam.step.__doc__)\n",
        "import ampctx\nprint(ampctx.optimizers.FusedAdam.step.__doc__)\n",
    ),
}


@pytest.mark.parametrize(("before", "after"), MOVED.values(), ids=MOVED)
def test_moved(tmp_path, before, after):
    result = migrated(tmp_path, before)
    assert result.after == after
    assert {f.status for f in result.findings} <= {"served", "adapted"}


KEPT = {
    "private name": "from apex import amp\namp.initialize(m)\namp._amp_state.loss_scalers[0]\n",
    "class without a target": "from apex.parallel import DistributedDataParallel as DDP\nDDP(m)\n",
    "kernels": "import amp_C, os\namp_C.kept_kernel(1)\n",
    "star": "from apex.amp import *\ninitialize(m)\n",
    "handed on": "from apex import amp\nf(amp)\n",
    "not used": "from apex import amp\n",
    "module looked at": "import apex\nprint(apex.__file__)\n",
    "assigned to": "from apex import amp\namp.scale_loss = mine\n",
    "bound twice and written out": "try:\n    import apex\nexcept ImportError:\n    apex = 0\napex.amp.initialize(m)\n",
    "torch with other arguments": "from apex.parallel import convert_syncbn_model as c\nc(m, channel_last=True)\n",
    "torch with unknown arguments": "from apex.parallel import convert_syncbn_model as c\nc(*a)\n",
    "torch not called": "from apex.parallel import convert_syncbn_model as c\nf(c)\n",
    "torch of another signature": "from apex.normalization import FusedLayerNorm\nFusedLayerNorm(4)\n",
    "torch is something else": "torch = 1\nfrom apex.parallel import convert_syncbn_model as c\nc(m)\n",
    "import_module": 'import importlib\nm = importlib.import_module("apex.amp")\n',
    "__import__": 'm = __import__("apex")\n',
    "an extension": "import xentropy_cuda  # of apex\nxentropy_cuda.forward(x, y, 0.0, False)\n",
    "find_spec": 'import importlib.util\nif importlib.util.find_spec("apex"):\n    pass\n',
}


@pytest.mark.parametrize("before", KEPT.values(), ids=KEPT)
def test_kept_below_the_import_that_serves_apex(tmp_path, before):
    result = migrated(tmp_path, before)
    lines = before.splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if "apex" in line or "amp_C" in line)
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    assert result.after == "".join([*lines[:first], indent + SHIM, *lines[first:]])
    assert {f.status for f in result.findings} <= {"served", "adapted"}


def test_a_function_called_as_a_module_of_ours_is_the_function(tmp_path):
    result = migrated(tmp_path, "from apex import amp\nlist(amp.master_params(o))\n")
    assert result.after == "from ampctx import amp\nlist(amp.master_params(o))\n"


def test_a_table_of_what_stays_and_goes_is_split(tmp_path):
    before = """
        from apex import (
            amp,  # the casts
            optimizers,  # fused
        )
        optimizers.FusedAdam(amp._amp_state)
    """
    after = migrated(tmp_path, before).after.splitlines(keepends=True)
    assert after == [
        SHIM,
        "from apex import (\n",
        "    amp,  # the casts\n",
        ")\n",
        "from ampctx import optimizers  # fused\n",
        "optimizers.FusedAdam(amp._amp_state)\n",
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from apex import (amp, optimizers)\n", "from apex import (amp)\nfrom ampctx import optimizers\n"),
        ("from apex import optimizers, amp\n", "from apex import amp\nfrom ampctx import optimizers\n"),
        ("from apex import amp, \\\n    optimizers\n", "from apex import amp\nfrom ampctx import optimizers\n"),
        (
            "from apex import (amp,  # a\n    optimizers)  # b\n",
            "from apex import (amp)  # b\nfrom ampctx import optimizers  # a\n",
        ),
        (
            "import os; from apex import amp, optimizers\n",
            "import os; from apex import amp; from ampctx import optimizers\n",
        ),
    ],
    ids=["parentheses", "first of two", "backslash", "comment in the middle", "one line"],
)
def test_lists_are_split_in_every_layout(tmp_path, before, after):
    use = "optimizers.FusedAdam(amp._amp_state)\n"
    assert migrated(tmp_path, before + use).after == SHIM + after + use


def test_the_import_that_serves_apex_stands_in_the_block_that_needs_it(tmp_path):
    result = migrated(
        tmp_path,
        '''
        """Doc."""
        from __future__ import annotations
        import os

        def early():
            import amp_C
            return amp_C.kept_kernel

        try:
            from apex.parallel import DistributedDataParallel
        except ImportError:
            DistributedDataParallel = None

        if os: import amp_C
        import amp_C

        def late():
            import amp_C
            return amp_C.kept_kernel
        ''',
    )
    assert result.after.count("import ampctx_apex.apex") == 4
    assert "def early():\n    import ampctx_apex.apex" in result.after
    assert "try:\n    import ampctx_apex.apex" in result.after
    assert "if os: import ampctx_apex.apex; import amp_C\nimport ampctx_apex.apex" in result.after
    assert "def late():\n    import amp_C" in result.after


@pytest.mark.parametrize(
    "install",
    ["import ampctx_apex.apex", "from ampctx_apex import apex", "ampctx_apex.install_apex()", "install_apex()"],
)
def test_names_that_are_installed_already_need_nothing(tmp_path, install):
    before = f"{install}\nimport amp_C\nx._amp_stash\n"
    assert migrated(tmp_path, before).after == before


@pytest.mark.parametrize(
    "use",
    [
        "optimizer._amp_stash.all_fp16_params",
        "optimizer._master_params_to_model_params()",
        'hasattr(optimizer, "_amp_stash")',
    ],
)
def test_private_attributes_need_apex_names(tmp_path, use):
    result = migrated(tmp_path, f'"""Doc."""\nfrom __future__ import annotations\nimport os\n{use}\n')
    line = "import ampctx_apex.apex  # adds apex's private attributes to optimizers"
    assert result.after.splitlines()[1:4] == ["from __future__ import annotations", line, "import os"]
    assert [f.status for f in result.findings] == ["adapted"]


def test_private_attributes_that_a_file_defines_itself_are_its_own(tmp_path):
    before = "class A:\n    def _amp_lazy_init(self): pass\n    def f(self): self._amp_lazy_init()\n"
    result = migrated(tmp_path, before)
    assert (result.after, result.findings) == (before, [])


OLD_OPTIMIZERS = """\
from apex.contrib.optimizers{} import {name}
o = {name}(p, 1e-3, True, (0.9, 0.999), 1e-8, False, 0.01)
o.step(grads=g, output_params=w, scale=128.0)
"""


@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "FusedLAMB"])
@pytest.mark.parametrize("module", [False, True], ids=["package", "module"])
def test_the_old_optimizers_stay_what_they_are(tmp_path, monkeypatch, name, module):
    """They have the arguments and formulas of another time."""
    monkeypatch.undo()
    before = OLD_OPTIMIZERS.format(f".fused_{name[5:].lower()}" if module else "", name=name)
    result = migrated(tmp_path, before)
    assert result.after == SHIM + before
    assert {f.status for f in result.findings} == {"adapted"}
    assert f"ampctx.optimizers.{name}" in result.findings[0].message


@pytest.mark.parametrize(
    "before",
    [
        "from apex.fp16_utils import DynamicLossScaler\ns = DynamicLossScaler(init_scale=4)\n",
        "from apex.amp.frontend import opt_levels\nopt_levels['O1'](p)\n",
        "from apex.fused_dense import FusedDense\nFusedDense(2, 2)\n",
        "from apex.parallel import convert_syncbn_model\nm = convert_syncbn_model(m)\n",
        "import amp_C\namp_C.multi_tensor_l2norm_mp(1, f, [g])\n",
    ],
    ids=["loss scaler", "levels", "dense", "syncbn", "kernel"],
)
def test_names_whose_successors_differ_stay(tmp_path, monkeypatch, before):
    monkeypatch.undo()
    assert migrated(tmp_path, before).after == SHIM + before


PERSON = {
    "refused module": ("from apex.contrib.foo import Bar\nBar(1)\n", "apex.contrib.foo.Bar", r"Use torch\."),
    "unknown name": ("from apex import amp\namp.nothing()\n", "apex.amp.nothing", "no apex name that ampctx knows"),
    "refused beside others": (
        "import apex.contrib.x\nimport ampctx_apex.apex\n",
        "apex.contrib.x",
        r"Use torch\.",
    ),
    "unknown import": ("import apex.nothing\n", "apex.nothing", "no apex name that ampctx knows"),
    "refused import by string": ('__import__("apex.contrib.x")\n', "apex.contrib.x", r"Use torch\."),
    "computed import": ('import_module("apex." + x)\n', "apex", "computed"),
    "string in other hands": ('patch("apex.amp.scale_loss")\n', "apex.amp.scale_loss", "a string that names"),
    "sys.modules": ('if "apex" in sys.modules: pass\n', "apex", "a string that names"),
    "sys.modules key": ('sys.modules["amp_C"] = x\n', "amp_C", "a string that names"),
}


@pytest.mark.parametrize(("before", "name", "message"), PERSON.values(), ids=PERSON)
def test_for_a_person(tmp_path, before, name, message):
    result = migrated(tmp_path, before)
    assert result.after == before
    (finding,) = result.findings
    assert (finding.name, finding.status) == (name, "person")
    assert pytest.raises(AssertionError, match=message).matches(AssertionError(finding.message))


def test_a_refused_use_leaves_its_import_with_the_names_that_ampctx_serves(tmp_path):
    result = migrated(tmp_path, "import apex\napex.amp.initialize(m)\napex.contrib.foo.Bar(1)\n")
    assert result.after.startswith(SHIM + "import apex\napex.amp")
    assert [f.status for f in result.findings] == ["adapted", "person"]


def test_advice_on_installing_apex_names_ampctx(tmp_path):
    before = """
        try:
            from apex import amp  # needs to install NVIDIA apex
        except ImportError:
            # To install apex, see https://github.com/NVIDIA/apex
            raise ImportError("Please install apex from https://www.github.com/nvidia/apex to use fp16 training.")
        print(f"{__name__}: installing apex")
        name = "install apex"
        amp.initialize(m)
        """
    after = migrated(tmp_path, before).after.splitlines()
    assert after == [
        "try:",
        "    from ampctx import amp  # needs to install ampctx",
        "except ImportError:",
        "    # To install ampctx, see https://github.com/NVIDIA/apex",
        '    raise ImportError("Please install ampctx to use fp16 training.")',
        'print(f"{__name__}: installing ampctx")',
        'name = "install apex"',
        "amp.initialize(m)",
    ]


def test_what_is_looked_up_in_sys_modules_stays_imported(tmp_path):
    before = "import sys\nfrom apex import amp\namp.initialize(m)\nprint('apex' in sys.modules)\n"
    result = migrated(tmp_path, before)
    lines = result.after.splitlines()
    assert lines[1].startswith("import ampctx_apex.apex")
    assert lines[2:] == before.splitlines()[1:]
    assert [f.status for f in result.findings] == ["adapted", "adapted"]


@pytest.mark.parametrize(
    "text",
    [
        "# apex is fast\n",
        'print("install apex")\n',
        "apex = 3\nprint(apex.real)\n",
        "from .apex import amp\n",
        "x.apex\n",
    ],
)
def test_other_things_called_apex(tmp_path, text):
    result = migrated(tmp_path, text)
    assert (result.after, result.findings) == (text, [])


def test_findings_tell_place_name_and_arguments(tmp_path):
    result = migrated(
        tmp_path,
        """
        from apex import amp
        x = 1; model = amp.initialize(model,
                                      opt_level="O2",  # level
                                      **options)
        f = amp.half_function
        """,
    )
    call, reference = result.findings
    assert (call.line, call.column, call.name) == (2, 16, "apex.amp.initialize")
    assert call.arguments == ("model", 'opt_level="O2"', "**options")
    assert (reference.line, reference.arguments) == (5, None)


TARGETS = {
    name: entry.target for name, entry in sorted(names.NAMES.items()) if entry.target and entry.status != "refused"
}


@pytest.mark.parametrize(("name", "target"), TARGETS.items(), ids=TARGETS)
def test_every_target_in_the_table_is_there(tmp_path, name, target):
    place = targets.locate(target)
    assert place is not None, target
    # An attribute of a class is not imported, and torch's signature may be another one.
    if target.startswith("ampctx.") and "." not in place.path and not targets.is_module(target):
        module, _, last = name.rpartition(".")
        result = migrated(tmp_path, f"from {module} import {last} as moved\nmoved()\n")
        namespace = {}
        exec(result.after.splitlines()[0], namespace)
        # Bound methods of the session are made anew for each look.
        assert namespace["moved"] == place.value
