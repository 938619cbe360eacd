"""What all functions of amp_C have in common: arguments, errors, empty lists, no host reads; and names it lacks."""

import itertools
import os
import subprocess
import sys
import sysconfig
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import amp_C
import pytest
import torch
from ampctx_apex import installed as installed_apex
from ampctx_apex.names import NAMES
from host_reads import HostReads
from kernel_cases import assert_same, copies, flag, randn

from ampctx._errors import AmpTypeError, AmpValueError

CUDA = pytest.mark.cuda


def one(value, device="cpu"):
    return torch.tensor([value], device=device)


def functions(n=3, device="cpu", tensors=False):
    """Name -> the number of lists, without and with the optional one, and what comes after the lists of ``n`` tensors:
    ``tensors`` or numbers where the function takes them."""

    def number(value):
        return one(value, device) if tensors else value

    each, lr, half, step = torch.ones(n, device=device), number(0.1), number(0.5), number(3)
    adam = (lr, 0.9, 0.99, 1e-8, step, 1, 1, 0.1)
    lamb = (lr, 0.9, 0.99, 1e-6, step, 1, 0.1, 1, 1, number(2.0), number(1.0), False)
    return {
        "multi_tensor_scale": ((2,), (half,)),
        "multi_tensor_axpby": ((3,), (number(2.0), number(-1.0), -1)),
        "multi_tensor_l2norm": ((1,), (True,)),
        "multi_tensor_l2norm_mp": ((1,), (True,)),
        "multi_tensor_unscale_l2norm": ((1,), (half, True)),
        "multi_tensor_sgd": ((3, 4), (0.1, 0.9, 0.0, lr, False, True, False, half)),
        "multi_tensor_adam": ((4,), adam),
        "multi_tensor_adam_capturable": ((4,), (*adam, half)),
        "multi_tensor_adam_capturable_master": ((5,), (*adam, half)),
        "multi_tensor_adagrad": ((3,), (lr, 1e-8, 0, 0.1)),
        "multi_tensor_novograd": ((3,), (each, lr, 0.9, 0.99, 1e-8, step, 1, 0.1, 1, 1, 2)),
        "multi_tensor_lamb": ((4,), lamb),
        "multi_tensor_lamb_mp": ((4, 5), (*lamb, one(0.0, device), half)),
        "multi_tensor_lamb_stage1_cuda": ((5,), (each, step, 0.9, 0.99, 1e-6, number(2.0), 1.0)),
        "multi_tensor_lamb_stage2_cuda": ((2,), (each, each + 1, lr, 0.1, False)),
    }


def arguments(name, n, **options):
    return functions(n, **options)[name][1]


DEPTHS = {name: depths for name, (depths, _) in functions().items()}
NORMS = [name for name in DEPTHS if "norm" in name]
every = pytest.mark.parametrize("name", DEPTHS)
every_depth = pytest.mark.parametrize(
    ("name", "depth"), [(name, depth) for name, depths in DEPTHS.items() for depth in depths]
)


def lists_of(depth, sizes=(5, 0, 33), device="cpu"):
    return [[t.abs() for t in randn(sizes, seed=i, device=device)] for i in range(depth)]


def run(name, lists, buf=None, **options):
    device = lists[0][0].device if lists[0] else "cpu"
    args = arguments(name, len(lists[0]), device=device, **options)
    return getattr(amp_C, name)(65536, flag(device=device) if buf is None else buf, lists, *args)


def test_every_function_is_in_the_table_of_names():
    listed = {n.removeprefix("amp_C.") for n, entry in NAMES.items() if n.startswith("amp_C.") and entry.is_served}
    assert set(amp_C.__all__) == listed == {*DEPTHS, "update_scale_hysteresis"}


def assert_no_host_read(name, lists, tensors):
    args, buf = arguments(name, len(lists[0]), tensors=tensors), flag()
    with HostReads() as reads:
        getattr(amp_C, name)(65536, buf, lists, *args)
    assert reads.count == 0


@every_depth
def test_no_host_read(name, depth):
    for sizes, tensors in itertools.product([(5, 0, 33), ()], [False, True]):
        assert_no_host_read(name, lists_of(depth, sizes), tensors)


@every_depth
def test_no_host_read_where_no_kernel_serves(name, depth):
    """Types and layouts that change from tensor to tensor."""
    kinds = [torch.float16, torch.float32, torch.bfloat16]
    lists = [[t.to(k) for t, k in zip(ts, kinds, strict=True)] for ts in lists_of(depth, [(4, 4)] * 3)]
    lists[0][0] = lists[0][0].t()
    assert_no_host_read(name, lists, tensors=True)


@every_depth
def test_numbers_and_tensors_give_the_same(name, depth):
    lists = lists_of(depth)
    other = copies(lists)
    first, second = run(name, lists), run(name, other, tensors=True)
    assert_same(lists, other)
    if first is not None:
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@every_depth
@pytest.mark.parametrize("sizes", [(), (0, 0)], ids=["no-tensors", "empty-tensors"])
def test_nothing_to_do(name, depth, sizes):
    buf = flag()
    result = run(name, lists_of(depth, sizes), buf)
    assert (result is not None) == (name in NORMS)
    if name in NORMS:
        assert result[0].tolist() == [0.0]
        assert result[1].tolist() == [0.0] * len(sizes)
    assert buf.tolist() == [0]


@CUDA
@every_depth
def test_a_flag_on_another_device(name, depth):
    lists, other = lists_of(depth, device="cuda"), lists_of(depth, device="cuda")
    lists[0][2][1] = other[0][2][1] = float("inf")
    here, there = flag(device="cuda"), flag()
    run(name, lists, here)
    run(name, other, there)
    assert here.tolist() == there.tolist()
    for ts, others in zip(lists, other, strict=True):
        torch.testing.assert_close(ts, others, equal_nan=True)


# --- errors -----------------------------------------------------------------------------------------------------------


def list_names(name):
    """The names of its lists, as its error messages have them."""
    with pytest.raises(AmpValueError) as error:
        run(name, lists_of(9))
    return str(error.value).rpartition(": ")[2].split(", ")


@every
def test_wrong_number_of_lists(name):
    expected = " or ".join(map(str, DEPTHS[name]))
    for count in (DEPTHS[name][0] - 1, DEPTHS[name][-1] + 1):
        with pytest.raises(AmpValueError, match=f"^{name}: tensor_lists has {count} lists, expected {expected}: "):
            getattr(amp_C, name)(65536, flag(), lists_of(count), *arguments(name, 3))


@every
@pytest.mark.parametrize(
    ("item", "kind", "message"),
    [
        (None, AmpTypeError, "must be a tensor, got NoneType"),
        (torch.ones(33, dtype=torch.int32), AmpTypeError, "has dtype torch.int32, expected float32 or float16"),
        (torch.ones(33).to_sparse(), AmpTypeError, "is not a strided tensor"),
        (torch.ones(33, device="meta"), AmpValueError, r"is on meta, and "),
    ],
    ids=["none", "dtype", "sparse", "device"],
)
def test_items_that_cannot_be_served(name, item, kind, message):
    depth = DEPTHS[name][0]
    last = list_names(name)[depth - 1]
    lists = lists_of(depth)
    lists[-1][2] = item
    before = copies(lists[:-1])
    with pytest.raises(kind, match=rf"^{name}: {last}\[2\] {message}"):
        run(name, lists)
    assert_same(lists[:-1], before)


@every
@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        (0, AmpTypeError, "must be a tensor, got int"),
        (torch.zeros(1, dtype=torch.bool), AmpTypeError, "has dtype torch.bool, expected int32 or float32"),
        (torch.zeros(1, dtype=torch.int64), AmpTypeError, "has dtype torch.int64, expected int32 or float32"),
        (torch.zeros(0, dtype=torch.int32), AmpValueError, "has no element, expected one or more"),
    ],
    ids=["number", "bool", "int64", "empty"],
)
def test_wrong_flags(name, wrong, kind, message):
    with pytest.raises(kind, match=f"^{name}: noop_flag {message}"):
        run(name, lists_of(DEPTHS[name][0]), wrong)


LISTS = [[torch.ones(2)], [torch.ones(2)], [torch.ones(2)], [torch.ones(2)]]
NOVOGRAD = (0.1, 0.9, 0.99, 1e-8, 1, 1, 0.0, 1)
EACH = torch.ones(1)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("multi_tensor_scale", ("2",), "scale must be a number or a tensor, got str"),
        ("multi_tensor_scale", (torch.ones(2),), "scale has 2 elements, expected 1"),
        ("multi_tensor_axpby", (1.0, None, 0), "b must be a number or a tensor, got NoneType"),
        ("multi_tensor_axpby", (1.0, 1.0, 2), "arg_to_check is 2, expected -1 or 0 or 1"),
        ("multi_tensor_adam", (0.1, torch.ones(2), 0.9, 0, 1, 1, 1, 0.0), "beta1 has 2 elements, expected 1"),
        ("multi_tensor_adam_capturable", (0.1, 0.9, 0.9, 0, 1, 2, 1, 0.0, EACH), "mode is 2, expected 0 or 1"),
        ("multi_tensor_lamb", (0.1, 0.9, 0.9, 0, 1, 1, 0.0, 1, 3, 1.0, 1.0), "mode is 3, expected 0 or 1"),
        ("multi_tensor_novograd", (EACH, *NOVOGRAD, 2, 2), "moment_mode is 2, expected 0 or 1"),
        ("multi_tensor_novograd", (EACH, *NOVOGRAD, 1, 1), "norm_type is 1, expected 0 or 2"),
        ("multi_tensor_novograd", (EACH.half(), *NOVOGRAD, 1, 2), "grad_norms has dtype torch.float16"),
        ("multi_tensor_novograd", (torch.ones(2), *NOVOGRAD, 1, 2), r"grad_norms has shape \(2,\), expected \(1,\)"),
        (
            "multi_tensor_lamb_stage2_cuda",
            (EACH, EACH.to("meta"), 0.1, 0.0, 0),
            "per_tensor_update_norm is on meta, and",
        ),
    ],
)
def test_numbers_that_cannot_be_served(name, args, message):
    with pytest.raises(RuntimeError, match=f"^{name}: {message}"):
        getattr(amp_C, name)(65536, flag(), LISTS[: DEPTHS[name][0]], *args)


# --- the compiled amp_C of an installed apex --------------------------------------------------------------------------

# Initialised in one phase, as most extensions are: such a one puts itself into sys.modules.
EXTENSION = """
#include <Python.h>
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "amp_C", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_amp_C(void) {
    PyObject *module = PyModule_Create(&definition);
    PyModule_AddIntConstant(module, "multi_tensor_scale", 1);
    PyModule_AddIntConstant(module, "multi_tensor_of_tomorrow", 2);
    return module;
}
"""
INCLUDE = Path(sysconfig.get_paths()["include"])


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A place on sys.path for an extension module called amp_C."""
    monkeypatch.setattr(installed_apex, "_loaded", {})
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / f"amp_C{EXTENSION_SUFFIXES[-1]}"


@pytest.mark.skipif(not (INCLUDE / "Python.h").exists(), reason="needs Python's headers")
def test_names_it_lacks_come_from_the_installed_one(installed, tmp_path, monkeypatch):
    source = tmp_path / "extension.c"
    source.write_text(EXTENSION)
    command = [os.environ.get("CC", "gcc"), "-shared", "-fPIC", f"-I{INCLUDE}", str(source), "-o", str(installed)]
    subprocess.run(command, check=True)
    assert amp_C.multi_tensor_of_tomorrow == 2
    assert sys.modules["amp_C"] is amp_C
    assert callable(amp_C.multi_tensor_scale)
    monkeypatch.setattr(installed_apex, "_loaded", {})
    monkeypatch.delitem(sys.modules, "amp_C")
    assert amp_C.multi_tensor_of_tomorrow == 2
    assert "amp_C" not in sys.modules
    with pytest.raises(AttributeError, match=f"no attribute 'nothing'.*nor does the amp_C of .* {installed}"):
        _ = amp_C.nothing
