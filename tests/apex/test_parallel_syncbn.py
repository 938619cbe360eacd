"""apex.parallel.SyncBatchNorm on two processes against torch's BatchNorm on the whole batch; convert_syncbn_model."""

import parallel_ranks
import pytest
import torch
from apex.parallel import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group
from apex.parallel.optimized_sync_batchnorm import SyncBatchNorm as Optimized
from apex.parallel.sync_batchnorm import SyncBatchNorm as Fallback
from syncbn_scenarios import DTYPES, OPTIONS, SHAPES, SPLITS, norm_of, whole
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return parallel_ranks.run("syncbn_scenarios", tmp_path_factory.mktemp("two"))


class BatchNorm(_BatchNorm):
    """torch's batch norm for any number of dimensions."""

    def _check_input_dim(self, input):
        pass


def on_the_whole_batch(shape, dtype, options, add=False):
    """As ``syncbn_scenarios.steps``, by one process, in fp64."""
    relu = torch.relu if options.get("fuse_relu") else lambda x: x
    own = {name: value for name, value in options.items() if name not in ("channel_last", "fuse_relu")}
    norm = norm_of(BatchNorm, dtype, **own).double()
    found = {"out": [], "grad": [], "z_grad": []}
    for step in range(2):
        x, z, grad = (t.double() for t in whole(shape, dtype, step))
        x.requires_grad_(), z.requires_grad_()
        out = relu(norm(x) + (z if add else 0))
        out.backward(grad)
        for name, tensor in {"out": out.detach(), "grad": x.grad, "z_grad": z.grad if add else z.detach() * 0}.items():
            found[name].append(tensor)
    norm.eval()
    if norm.track_running_stats:
        found["eval"] = relu(norm(whole(shape, dtype, 2)[0].double()))
    found["params"] = {name: p.grad for name, p in norm.named_parameters()}
    found["buffers"] = dict(norm.named_buffers())
    return found


# 16-bit results are computed in fp32 and rounded once.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def check(ranks, shape, dtype, options, add=False):
    first, second = ranks
    expected = on_the_whole_batch(shape, dtype, options, add)
    bound = {"rtol": BOUNDS[dtype], "atol": BOUNDS[dtype], "check_dtype": False}
    for name in ("out", "grad", "z_grad"):
        for ours, wanted in zip(zip(first[name], second[name], strict=True), expected[name], strict=True):
            torch.testing.assert_close(torch.cat(ours), wanted, **bound)
    if "eval" in expected:
        torch.testing.assert_close(torch.cat([first["eval"], second["eval"]]), expected["eval"], **bound)
    # Each rank has its part of the gradients of weight and bias, and all of the statistics.
    assert first["params"].keys() == expected["params"].keys()
    for name, wanted in expected["params"].items():
        torch.testing.assert_close(first["params"][name] + second["params"][name], wanted, **bound)
    assert first["buffers"].keys() == expected["buffers"].keys()
    for name, wanted in expected["buffers"].items():
        assert torch.equal(first["buffers"][name], second["buffers"][name])
        torch.testing.assert_close(first["buffers"][name], wanted, **bound)


@pytest.mark.full(but=20)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_shares_are_one_batch(ranks, shape, split, options):
    check(ranks(f"{shape}-{split}-{options}"), SHAPES[shape], torch.float32, OPTIONS[options])


@pytest.mark.parametrize("dtype", DTYPES)
def test_types(ranks, dtype):
    check(ranks(dtype), SHAPES["4d"], DTYPES[dtype], {})


def test_z_is_added_before_the_relu(ranks):
    check(ranks("z"), SHAPES["4d"], torch.float32, {"channel_last": True, "fuse_relu": True}, add=True)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_training(ranks, level):
    (weights, buffers), (others, other_buffers) = ranks(f"training-{level}")
    for a, b in zip([*weights, *buffers.values()], [*others, *other_buffers.values()], strict=True):
        assert torch.equal(a, b)
        assert torch.isfinite(a).all()
    assert buffers["running_mean"].dtype == torch.float32
    assert buffers["num_batches_tracked"].item() == 3


@pytest.mark.parametrize(("size", "means"), [(0, [3.0, 3.0]), (1, [2.0, 4.0]), (2, [3.0, 3.0])])
def test_groups(ranks, size, means):
    assert ranks(f"groups-{size}") == means


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("bad-group", "AmpAssertionError: group_size 3 does not divide the 2 ranks"),
        ("one-value", "AmpValueError: Expected more than 1 value per channel when training, got 1 over all ranks"),
        ("channels", "AmpValueError: expected 5 channels, got 6 in an input of (4, 6)"),
        ("dimensions", "ValueError: expected at least 2D input (got 1D input)"),
    ],
)
def test_errors(ranks, scenario, message):
    assert ranks(scenario) == [message] * 2


def test_no_group_without_a_process_group():
    assert create_syncbn_process_group(0) is None


def test_one_class():
    assert SyncBatchNorm is Optimized is Fallback
    assert issubclass(SyncBatchNorm, nn.SyncBatchNorm)


# --- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_without_ranks_it_is_torchs_batch_norm(training, dtype):
    x = whole((8, 5, 4, 2), dtype, 0)[0]
    ours, torchs = norm_of(SyncBatchNorm, dtype).train(training), norm_of(nn.BatchNorm2d, dtype).train(training)
    assert torch.equal(ours(x), torchs(x))
    assert torch.equal(ours.running_var, torchs.running_var)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_channel_last_z_and_relu(training):
    x, z, _ = whole((8, 5, 4, 2), torch.float32, 0)
    norm = SyncBatchNorm(5, channel_last=True, fuse_relu=True).train(training)
    expected = torch.relu(nn.BatchNorm2d(5).train(training)(x) + z).movedim(1, -1)
    assert torch.equal(norm(x.movedim(1, -1), z.movedim(1, -1)), expected)


def test_specified_later():
    norm = SyncBatchNorm(5)
    norm._specify_channel_last(True)
    norm._specify_process_group("group")
    assert (norm.channel_last, norm.process_group) == (True, "group")
    assert norm(torch.ones(2, 3, 3, 5)).shape == (2, 3, 3, 5)


def test_a_pickle_of_an_older_apex_has_no_options():
    norm = SyncBatchNorm(5)
    del norm.channel_last, norm.fuse_relu
    assert norm(torch.ones(2, 5, 3)).shape == (2, 5, 3)


# --- convert_syncbn_model ---------------------------------------------------------------------------------------------


def test_convert():
    inner = nn.Sequential(nn.BatchNorm2d(3, eps=1e-3, momentum=None), nn.InstanceNorm2d(3, affine=True))
    model = nn.ModuleDict({"inner": inner, "one": nn.BatchNorm1d(4, affine=False), "last": nn.Linear(2, 2)})
    model["one"].eval()
    inner[0].running_mean.fill_(3.0)
    before = {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    keys = list(model.state_dict())
    converted = convert_syncbn_model(model, process_group="group", channel_last=True)
    assert converted is model
    assert {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]} == before
    assert list(model.state_dict()) == keys
    assert isinstance(model["inner"][0], SyncBatchNorm)
    assert isinstance(model["one"], SyncBatchNorm)
    assert type(model["inner"][1]) is nn.InstanceNorm2d
    first, second = model["inner"][0], model["one"]
    assert (first.eps, first.momentum, first.affine, first.training) == (1e-3, None, True, True)
    assert (second.affine, second.weight, second.training) == (False, None, False)
    assert (first.process_group, first.channel_last, first.fuse_relu) == ("group", True, False)


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str)
def test_convert_a_batch_norm_itself(options):
    norm = nn.BatchNorm3d(4, **options).half()
    converted = convert_syncbn_model(norm)
    assert type(converted) is SyncBatchNorm
    assert converted.weight is norm.weight
    assert converted.running_var is norm.running_var
    assert {t.dtype for t in converted.state_dict().values()} <= {torch.float16, torch.int64}


def test_convert_keeps_a_module_that_is_used_twice():
    shared = nn.BatchNorm1d(4)
    model = nn.Sequential(shared, nn.Sequential(shared), shared)
    convert_syncbn_model(model)
    assert isinstance(model[0], SyncBatchNorm)
    assert model[0] is model[1][0] is model[2]


def test_convert_replaces_torchs_synchronised_norm():
    model = nn.Sequential(nn.SyncBatchNorm(4))
    assert type(convert_syncbn_model(model)[0]) is SyncBatchNorm


def test_an_optimizer_made_before_goes_on():
    model = nn.Sequential(nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    convert_syncbn_model(model)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    assert model[0].bias.tolist() == [-3.0] * 4


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_on_a_gpu_as_on_the_cpu(dtype):
    x, z, _ = whole((8, 5, 4, 2), dtype, 0)
    x, z = x.movedim(1, -1), z.movedim(1, -1)
    norm, on_gpu = (SyncBatchNorm(5, channel_last=True, fuse_relu=True) for _ in range(2))
    torch.testing.assert_close(on_gpu.cuda()(x.cuda(), z.cuda()).cpu(), norm(x, z))
    torch.testing.assert_close(on_gpu.running_var.cpu(), norm.running_var)
