"""``ampctx-apex migrate``: what becomes of each way to import and use a name of apex."""

import re
import textwrap

import pytest
from ampctx_apex.migrate import cli
from ampctx_apex.names import NAMES

pytest.importorskip("libcst")


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


# Where each "apex" becomes "ampctx", and nothing else changes.
RENAMED = {
    "from import": "from apex import amp\namp.initialize(m)\n",
    "from import as": "from apex import amp as A\nA.initialize(m)\n",
    "several": "from apex import amp as A, optimizers  # both\nA.scale_loss(x, o)\noptimizers.FusedAdam(p)\n",
    "import": "import apex\napex.amp.initialize(m)\n",
    "import module as": "import apex.amp as amp, os\namp.initialize(m)\n",
    "name": "from apex.optimizers import FusedAdam\nFusedAdam(p)\n",
    "decorator": "import apex\n@apex.amp.half_function\ndef f(x): pass\n",
    "comments": "from apex.optimizers import (  # all\n    FusedAdam,  # one\n    # another\n    FusedSGD as S,\n)\n",
    "in a function": "def f():\n\tfrom apex import amp\n\treturn amp.state_dict()\n",
    "guarded": "try:\n    from apex import amp\nexcept ImportError:\n    raise ImportError('no')\namp.initialize(m)\n",
    "guarded with None": "try:\n    from apex import amp\nexcept: amp = 0\nif not amp or amp is None: amp.scale_loss\n",
    "global": "amp = None\ndef f():\n    global amp\n    from apex import amp\ndef g():\n    amp.initialize(m)\n",
    "attribute of a class": "import apex\nprint(apex.optimizers.FusedAdam.step.__doc__)\n",
    "a function that is a module, too": "from apex import amp\nlist(amp.master_params(o))\n",
}
MOVED = {
    **{name: (before, before.replace("apex", "ampctx")) for name, before in RENAMED.items()},
    "another module": ("from apex.parallel.LARC import LARC\nLARC\n", "from ampctx.optimizers import LARC\nLARC\n"),
    "another name": (
        "from apex.fp16_utils import clip_grad_norm\nclip_grad_norm(p, 1)\n",
        "from ampctx import clip_grad_norm_ as clip_grad_norm\nclip_grad_norm(p, 1)\n",
    ),
    "guarded, beside names that stay": (
        "try:\n    from apex import amp\n    from apex.parallel import Reducer\nexcept: pass\namp.initialize(m)\n",
        "try:\n    from ampctx import amp\n    from apex.parallel import Reducer\nexcept: pass\namp.initialize(m)\n",
    ),
}


@pytest.mark.parametrize(("before", "after"), MOVED.values(), ids=MOVED)
def test_moved(tmp_path, before, after):
    text, findings = migrated(tmp_path, before)
    assert text == after
    assert {f.status for f in findings} <= {"moved", "adapted"}


KEPT = {
    "private name": "from apex import amp\namp.initialize(m)\namp._amp_state.loss_scalers[0]\n",
    "no public name": "from apex.parallel import DistributedDataParallel as DDP\nDDP(m)\n",
    "kernels": "import amp_C, os\namp_C.multi_tensor_adam(1)\n",
    "star": "from apex.amp import *\ninitialize(m)\n",
    "handed on": "from apex import amp\nf(amp)\n",
    "assigned to": "from apex import amp\namp.scale_loss = mine\n",
    "bound twice": "try:\n    import apex\nexcept ImportError:\n    apex = 0\napex.amp.initialize(m)\n",
    "the new name is taken": "ampctx = 1\nimport apex\napex.amp.initialize(m)\n",
    "import_module": 'import importlib\nm = importlib.import_module("apex.amp")\n',
    "sys.modules": "import sys\nfrom apex import amp\namp.initialize(m)\nprint('apex' in sys.modules)\n",
    "attribute of optimizers": "from apex import amp\namp.initialize(m)\noptimizer._amp_stash.all_fp16_params\n",
}
MANUAL = {
    "refused module": ("from apex.contrib.fmha import F\nF(1)\n", "apex.contrib.fmha.F", "scaled_dot_product"),
    "refused optimizer": ("from apex.optimizers import FusedLARS\n", "apex.optimizers.FusedLARS", r"ampctx\.\w+\.LARC"),
    "missing extension": ("import syncbn\n", "syncbn", "Use apex.parallel.SyncBatchNorm"),
    "unknown name": ("from apex import amp\namp.nothing()\n", "apex.amp.nothing", "knows no such name"),
    "computed import": ('import_module("apex." + x)\n', "apex", "computes"),
    "string in other hands": ('patch("apex.amp.scale_loss")\n', "apex.amp.scale_loss", "A string names"),
    "private": ("x = optimizer._amp_stash\n", "optimizer._amp_stash", "Write 'import apex.amp'"),
}
OTHERS = {
    "comment": "# apex is fast\n",
    "message": 'print("install apex")\n',
    "variable": "apex = 3\nprint(apex.real)\n",
    "relative import": "from .apex import amp\namp.initialize(m)\n",
    "attribute": "x.apex\n",
    "own method": "class A:\n    def _amp_lazy_init(self): pass\n    def f(self): self._amp_lazy_init()\n",
}


@pytest.mark.parametrize("before", KEPT.values(), ids=KEPT)
def test_kept(tmp_path, before):
    text, findings = migrated(tmp_path, before)
    assert text == before
    assert {f.status for f in findings} == {"adapted"}


@pytest.mark.parametrize(("before", "name", "message"), MANUAL.values(), ids=MANUAL)
def test_manual(tmp_path, before, name, message):
    text, findings = migrated(tmp_path, before)
    assert text == before
    (finding,) = (f for f in findings if f.status == "manual")
    assert finding.name == name
    assert re.search(message, finding.message)


@pytest.mark.parametrize("before", OTHERS.values(), ids=OTHERS)
def test_other_things_called_apex(tmp_path, before):
    assert migrated(tmp_path, before) == (before, [])


SPLIT = {
    "parentheses": ("from apex import (amp, optimizers)\n", "from apex import (amp)\nfrom ampctx import optimizers\n"),
    "one line": (
        "import os; from apex import amp, optimizers\n",
        "import os; from apex import amp; from ampctx import optimizers\n",
    ),
    "comments": (
        "if x:\n    # why\n    from apex import (\n        optimizers as o,  # o\n        amp,  # a\n    )  # end\n",
        "if x:\n    # why\n    from apex import (\n        amp,  # a\n    )  # end\n"
        "    from ampctx import optimizers as o  # o\n",
    ),
}


@pytest.mark.parametrize(("before", "after"), SPLIT.values(), ids=SPLIT)
def test_lists_are_split_in_every_layout(tmp_path, before, after):
    use = "optimizers.FusedAdam(amp._amp_state)\n".replace("optimizers", "o" if " as o" in before else "optimizers")
    assert migrated(tmp_path, before + use)[0] == after + use


def test_advice_on_installing_apex_names_the_package_that_the_file_needs(tmp_path):
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
    after = """\
        try:
            from ampctx import amp  # needs to install ampctx
        except ImportError:
            # To install ampctx, see https://github.com/NVIDIA/apex
            raise ImportError("Please install ampctx to use fp16 training.")
        print(f"{__name__}: installing ampctx")
        name = "install apex"
        amp.initialize(m)
    """
    text, _ = migrated(tmp_path, before)
    assert text.split() == after.split()
    text, _ = migrated(tmp_path, before + "\n        from apex.parallel import DistributedDataParallel\n")
    assert "Please install ampctx-apex to use fp16 training." in text


# Modules and attributes of classes are not imported by name.
TARGETS = {n: e.target for n, e in sorted(NAMES.items()) if e.status != "refused" and e.target}
IMPORTED = {n: t for n, t in TARGETS.items() if re.fullmatch(r"ampctx(\.[a-z_]+)*\.(?!optimizers$)\w+", t)}


@pytest.mark.parametrize(("name", "target"), IMPORTED.items())
def test_every_name_with_a_target_moves_to_it(tmp_path, name, target):
    (module, _, last), (owner, _, new) = name.rpartition("."), target.rpartition(".")
    text, _ = migrated(tmp_path, f"from {module} import {last} as moved\nmoved()\n")
    assert text.splitlines()[0] == f"from {owner} import {new} as moved"
