"""amp.count_ops: what it counts at each level, what it leaves behind (nothing), and what its hints say."""

import copy
import pickle
import random

import numpy as np
import pytest
import torch
import torch.distributed.fsdp
import torch.nn.functional as F
from kit import LEVELS, assert_same, batch, loss_of, mlp, snapshot, start, train
from torch import nn

from ampctx import AmpError, AmpTypeError, amp

HALF, BF16, DOUBLE = torch.float16, torch.bfloat16, torch.float64
LOW_NAME = {"O1": "float16", "O2": "float16", "O3": "float16", "O4": "bfloat16", "O5": "bfloat16"}


class Pictures(nn.Module):
    """A convolution, batch norm and head, softmax in between: one op of each list, and one of none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 8)

    def forward(self, x):
        return self.head(self.bn(self.conv(x)).relu().amax((2, 3)).softmax(1))


X = torch.randn(8, 8, 4, 4, generator=torch.Generator().manual_seed(0))


def rows(report):
    return {(row.op, row.dtype): row.calls for row in report.rows}


def expected_rows(level):
    low = LOW_NAME.get(level, "float32")
    norm = {"O0": "float32", "O3": "float16"}.get(level, f"{low}+float32")
    softmax = "float32" if level in ("O1", "O4") else low
    return {
        ("convolution", low): 1,
        ("native_batch_norm", norm): 1,
        ("relu", low): 1,
        ("amax", low): 1,
        ("softmax", softmax): 1,
        ("addmm", low): 1,
    }


def size(*tensors):
    """Bytes of a cast between fp32 and 16 bits, in either direction."""
    return 6 * sum(t.numel() if isinstance(t, torch.Tensor) else t for t in tensors)


@pytest.mark.parametrize("level", LEVELS)
def test_what_runs_at_each_level(session, level):
    model = Pictures()
    session.initialize(model, opt_level=level, verbosity=0)
    report = amp.count_ops(model, X)
    assert rows(report) == expected_rows(level)
    weights = [model.conv.weight, model.head.weight, model.head.bias]
    if level in ("O1", "O4"):
        # Input and weights down; 8 x 16 up for softmax, and down again for the head.
        down, up = (5, size(X, *weights, 8 * 16)), (1, size(8 * 16))
    else:
        down, up = (1, size(X)), (1, size(8 * 8))
    low = LOW_NAME.get(level)
    expected = [] if low is None else [("float32", low, *down), (low, "float32", *up)]
    assert report.casts == expected
    assert report.cast_count == sum(c.calls for c in report.casts)
    assert report.cast_bytes == sum(c.bytes for c in report.casts)
    fp32 = ["matrix products or convolutions left in fp32: convolution in conv, addmm in head"]
    assert report.hints == (fp32 if level == "O0" else [])


def test_it_prints_as_a_table(session):
    model = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8))
    session.initialize(model, opt_level="O1", verbosity=0)
    report = amp.count_ops(model, torch.ones(8, 8))
    assert str(report) == repr(report) == TABLE
    low, up = size(64, 96, 12, 96, 96, 8), size(96)
    assert report.casts == [("float32", "float16", 6, low), ("float16", "float32", 1, up)]
    assert report.calls("addmm") == report.calls("addmm", "float16") == 2
    assert report.calls("addmm", "float32") == report.calls("bmm") == 0


TABLE = """\
op                 float16  float32
addmm                    2        .
native_layer_norm        .        1

cast                calls  bytes
float32 -> float16      6  2,232
float16 -> float32      1    576
all                     7  2,808

hints
- no tensor cores: dims not multiple of 8: addmm in 0 (8x8 @ 8x12), addmm in 2 (8x12 @ 12x8)"""


def test_the_result_is_plain_data():
    assert str(amp.count_ops(nn.Identity(), 3)) == "op\n\nno casts"
    assert amp.count_ops(nn.Identity(), torch.arange(3)).rows == []
    report = amp.count_ops(nn.Linear(8, 8), torch.ones(8, 8))
    assert isinstance(report, amp.OpReport)
    assert [tuple(row) for row in report.rows] == [("addmm", "float32", 1)]
    assert report.casts == []
    assert "no casts" in str(report)
    assert pickle.loads(pickle.dumps(report)) == copy.deepcopy(report) == report


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_a_plain_model_under_torch_autocast(dtype):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    name = str(dtype).removeprefix("torch.")
    x = torch.ones(8, 8)
    with torch.autocast("cpu", dtype=dtype):
        # What the cache holds is neither taken nor added to.
        model(x)
        for _ in range(2):
            report = amp.count_ops(model, x)
            assert rows(report) == {("addmm", name): 1, ("relu", name): 1}
            assert report.casts == [("float32", name, 3, size(64, 64, 8))]
    assert rows(amp.count_ops(model, x)) == {("addmm", "float32"): 1, ("relu", "float32"): 1}


# --- nothing is left behind -------------------------------------------------------------------------------------------


class Untidy(nn.Module):
    """Leaves a trace of every sort that a forward can leave."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.bn = nn.BatchNorm1d(4)
        self.codebook = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("late", None)
        self.alias = self.seen
        self.count, self.losses, self.cache = 0, [], {"old": torch.ones(1)}
        self.fail = False

    def forward(self, x):
        self.count += 1
        self.losses.append(x)
        self.cache["new"] = self.cache.pop("old")
        self.seen = self.seen + 1
        self.alias.add_(1)
        self.late = torch.ones(1)
        self.extra, self.more = torch.ones(1), nn.Linear(1, 1)
        self.training = not self.training
        with torch.no_grad():
            self.codebook.mul_(0.9)
            torch._foreach_add_([self.codebook, self.fc.bias], 1.0)
            x.mul_(2)
        y = F.dropout(self.bn(self.fc(x)), 0.5)
        with torch.enable_grad():
            self.fc(torch.ones(1, 4)).sum().backward()
        random.random(), np.random.rand()
        if self.fail:
            raise OSError("forward failed")
        return y


def traces(model, x):
    """Everything of a model that a forward could change, as values and identities."""
    values = [t.clone() for t in (*model.parameters(), *model.buffers(), model.alias, x)]
    values += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    values += [torch.get_rng_state(), torch.tensor(np.random.get_state()[1].astype(np.int64))]
    objects = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    attributes = [{k: v for k, v in vars(m).items() if k[0] != "_"} for m in model.modules()]
    contents = list(model.losses), dict(model.cache), random.getstate(), model._buffers.copy(), model._modules.copy()
    return values, [id(o) for o in objects], attributes, contents


@pytest.mark.parametrize("fail", [False, True], ids=["ok", "raises"])
@pytest.mark.parametrize("grads", [False, True], ids=["no-grads", "grads"])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_nothing_is_left_behind(train, grads, fail):
    model, x = Untidy().train(train), torch.randn(6, 4)
    if grads:
        model.bn(x).sum().backward()
        model.fc(x).sum().backward()
    model.fail = fail
    before = traces(model, x)
    if fail:
        with pytest.raises(OSError, match="forward failed"):
            amp.count_ops(model, x)
    else:
        assert amp.count_ops(model, x).calls("addmm") == 2
    after = traces(model, x)
    assert_same(before[0], after[0])
    assert before[1:] == after[1:]
    # The test sees what a forward leaves.
    model.fail = False
    model(x)
    changed = traces(model, x)
    assert all(a != b for a, b in zip(before[1:], changed[1:], strict=True))
    assert sum(not torch.equal(a, b) for a, b in zip(before[0], changed[0], strict=False)) >= 8


def run(session, model, optimizer, asks):
    """The losses of three steps. ``asks``: before each forward, backward and step."""

    def ask():
        if asks:
            amp.count_ops(model, batch(7))

    def loss(model, step):
        ask()
        value = loss_of(model, step)
        ask()  # between forward and backward
        return value

    return train(session, model, optimizer, 3, loss=loss, in_block=ask, before_step=ask)


@pytest.mark.parametrize("level", LEVELS)
def test_a_run_goes_on_as_if_nobody_had_asked(session, level):
    found = []
    for asks in (False, True):
        model, optimizer = start(session, level, "FusedAdam", nn.Sequential(*mlp(), nn.Dropout(0.25)))
        run(session, model, optimizer, asks)
        found.append(snapshot(optimizer, model))
        session.reset()
    assert_same(*found)


def test_no_cast_of_a_changed_weight_stays_in_the_cache():
    def doubles(w, x):
        with torch.no_grad():
            w.mul_(2)
        return x @ w

    model, x = Calls(doubles), torch.ones(8, 8)
    with torch.autocast("cpu", dtype=BF16):
        amp.count_ops(model, x)
        assert torch.equal(x @ model.weight, x.to(BF16))


@pytest.mark.cuda
@pytest.mark.parametrize("level", LEVELS)
def test_on_a_gpu(session, level):
    model, x = nn.Sequential(*Pictures().children(), nn.Dropout()).cuda(), X.cuda()
    model.insert(2, nn.AdaptiveAvgPool2d(1)).insert(3, nn.Flatten())
    session.initialize(model, opt_level=level, verbosity=0)
    before = [torch.cuda.get_rng_state(), *(t.clone() for t in model.buffers())]
    report = amp.count_ops(model, x)
    low = LOW_NAME.get(level, "float32")
    assert (report.calls("convolution", low), report.calls("addmm", low)) == (1, 1)
    assert_same(before, [torch.cuda.get_rng_state(), *model.buffers()])


# --- models of every sort ---------------------------------------------------------------------------------------------


def test_compiled_models_run_op_by_op_and_stay_compiled(session):
    calls = []

    def backend(graph, inputs):
        calls.append("compiled")
        return lambda *args: (calls.append("ran"), graph.forward(*args))[1]

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    session.initialize(model, opt_level="O4", verbosity=0)
    compiled = torch.compile(model, backend=backend)
    x = torch.ones(8, 8)
    for _ in range(2):
        assert rows(amp.count_ops(compiled, x)) == {("addmm", "bfloat16"): 1, ("relu", "bfloat16"): 1}
    assert calls == []
    compiled(x)
    assert calls == ["compiled", "ran"]
    assert amp.count_ops(compiled, x).calls("addmm") == 1
    compiled(x)
    assert calls == ["compiled", "ran", "ran"]


def test_data_parallel_models_run_without_their_wrapper(mesh):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    x = torch.ones(8, 8)
    assert amp.count_ops(nn.DataParallel(model), x).calls("addmm") == 1
    ddp = nn.parallel.DistributedDataParallel(model)
    loss = ddp(x).sum()
    assert amp.count_ops(ddp, x).calls("addmm") == 1
    loss.backward()
    ddp(x).sum().backward()


def test_sharded_models_step_the_same(mesh):
    losses = []
    for asks in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8)))
        for part in (model[1], model):
            torch.distributed.fsdp.fully_shard(part, mesh=mesh)
        losses.append(run(None, model, torch.optim.SGD(model.parameters(), lr=0.1), asks))
        assert amp.count_ops(model, batch()).calls("addmm") == 2
    assert losses[0] == losses[1]


# --- hints ------------------------------------------------------------------------------------------------------------


class Calls(nn.Module):
    """Runs a function, with a weight of 8 x 8."""

    def __init__(self, fn, requires_grad=True):
        super().__init__()
        self.fn = fn
        self.weight = nn.Parameter(torch.eye(8), requires_grad)

    def forward(self, *args):
        return self.fn(self.weight, *args)


def hints_of(fn, *args, **kwargs):
    with torch.autocast("cpu", dtype=BF16):
        return amp.count_ops(Calls(fn, **kwargs), *args).hints


ATTENTION = "scaled_dot_product_flash_attention_for_cpu"
MISFITS = {
    "mm": (lambda w, x: x @ w, (7, 8), "mm (7x8 @ 8x8)"),
    "bmm": (lambda w, x: x @ x.mT, (2, 8, 3), "bmm (2x8x3 @ 2x3x8)"),
    "conv2d": (lambda w, x: F.conv2d(x, w[:, :3, None, None]), (1, 3, 4, 4), "convolution (weight 8x3x1x1)"),
    "transposed": (lambda w, x: F.conv_transpose1d(x, w[:, :5, None]), (1, 8, 4), "convolution (weight 8x5x1)"),
    "depthwise": (
        lambda w, x: F.conv1d(x, w[:, :1, None], groups=8),
        (1, 8, 4),
        "convolution (weight 8x1x1, 8 groups)",
    ),
    "sdpa": (lambda w, x: F.scaled_dot_product_attention(x, x, x), (1, 2, 8, 12), f"{ATTENTION} (heads of 12)"),
}


def fits(w, x):
    conv = F.conv2d(x[None, :, None], w[:, :, None, None])
    heads = x[None, None]
    return x @ w, conv, F.scaled_dot_product_attention(heads, heads, heads)


@pytest.mark.parametrize("name", MISFITS)
def test_dims_that_are_no_multiples_of_8(name):
    fn, shape, expected = MISFITS[name]
    assert hints_of(fn, torch.ones(shape)) == [f"no tensor cores: dims not multiple of 8: {expected}"]
    assert hints_of(fits, torch.ones(8, 8)) == []


def test_a_weight_that_is_cast_again():
    def twice(w, x):
        return x @ w @ w

    text = "weights cast again (autocast keeps casts of fp32 weights that require grad, in a forward): weight 2 times"
    x = torch.ones(8, 8)
    assert hints_of(twice, x) == []
    assert hints_of(twice, x, requires_grad=False) == [text]
    with torch.autocast("cpu", dtype=BF16, cache_enabled=False):
        report = amp.count_ops(Calls(twice), x)
    assert report.hints == [text]
    assert report.casts == [("float32", "bfloat16", 3, 3 * size(x))]
    # Parts of a weight are no weight cast again.
    assert hints_of(lambda w, x: x @ w[:, :8] + F.linear(x, w.view(8, 8)[::1][:, :]), x) != []
    assert hints_of(lambda w, x: (x[:, :4] @ w[:4, :].clone(), x[:, 4:] @ w[4:]), torch.ones(8, 8)) != [text]


def test_ops_in_fp64():
    def wide(w, x):
        return (x.double() * 2).sum() + torch.tensor(1.0, dtype=DOUBLE)

    assert hints_of(wide, torch.ones(8, 8)) == ["ops in fp64: mul, sum, add"]
    assert amp.count_ops(Calls(lambda w, x: x * 2.0 + 1), torch.ones(8)).hints == []  # numbers are no fp64 tensors


def test_a_long_list_is_cut():
    model = nn.Sequential(*(nn.Linear(9, 9) for _ in range(5)))
    with torch.autocast("cpu", dtype=HALF):
        (hint,) = amp.count_ops(model, torch.ones(8, 9)).hints
    shape = "(8x9 @ 9x9)"
    assert hint.endswith(f": addmm in 0 {shape}, addmm in 1 {shape}, addmm in 2 {shape} and 2 more")


# --- errors and docs --------------------------------------------------------------------------------------------------


def test_what_is_no_module_and_lazy_ones_are_refused():
    with pytest.raises(AmpTypeError, match="count_ops: model must be a torch.nn.Module, got function. Call a fun"):
        amp.count_ops(loss_of, torch.ones(1))
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(AmpError, match=r"count_ops: 0\.weight of the model is not initialized yet: run one forward"):
        amp.count_ops(model, torch.ones(2, 4))
    assert nn.parameter.is_lazy(model[0].weight)
