"""apex.parallel.SyncBatchNorm on two processes against torch's BatchNorm on the whole batch; convert_syncbn_model."""

import apex_on_ranks  # noqa: F401
import pytest
import torch
from apex.parallel import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group
from apex.parallel.optimized_sync_batchnorm import SyncBatchNorm as Optimized
from apex.parallel.sync_batchnorm import SyncBatchNorm as Fallback
from rank_processes import RANK, all_ranks, on_ranks
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ampctx import AmpAssertionError, AmpValueError

SHAPES = {"2d": (8, 5), "3d": (8, 5, 3), "4d": (8, 5, 4, 2)}
# Where rank 0's share of the batch ends.
SPLITS = {"even": 4, "uneven": 3, "empty": 8}
OPTIONS = {
    "default": {},
    "cumulative": {"momentum": None},
    "no-affine": {"affine": False},
    "no-running": {"track_running_stats": False},
    "channel-last": {"channel_last": True},
    "relu": {"fuse_relu": True},
}
# 16-bit results are computed in fp32 and rounded once.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


class BatchNorm(_BatchNorm):
    """torch's batch norm for any number of dimensions."""

    def _check_input_dim(self, input):
        pass


def whole(shape, dtype, step):
    """Input, what is added behind the norm, and the gradient of the output, in the layout [N, C, *]."""
    generator = torch.Generator().manual_seed(step)
    x, z, grad = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(3))
    # Far from 0, so that a variance from the mean of squares would be wrong.
    return (30.0 + 2.0 * x).to(dtype), z.to(dtype), grad.to(dtype)


def norm_of(kind, dtype, **options):
    norm = kind(5, **options).to(torch.promote_types(dtype, torch.float32))
    for p in norm.parameters():
        nn.init.normal_(p, generator=torch.Generator().manual_seed(p.numel()))
    return norm


def steps(norm, forward, batches):
    """Outputs and gradients of two steps of training, and the output of an evaluation where there are statistics."""
    found = []
    for x, z, grad in batches[:2]:
        out = forward(x.requires_grad_(), z.requires_grad_())
        out.backward(grad)
        found += [out.detach(), x.grad, *([] if z.grad is None else [z.grad])]
    norm.eval()
    return [*found, forward(*batches[2][:2]).detach()] if norm.track_running_stats else found


def check(shape, dtype, split, options, add=False):
    """This rank's share of all that one process makes of the whole batch in fp64."""
    rows = slice(split) if RANK == 0 else slice(split, None)
    own = {name: value for name, value in options.items() if name not in ("channel_last", "fuse_relu")}
    norm, plain = norm_of(SyncBatchNorm, dtype, **options), norm_of(BatchNorm, dtype, **own).double()
    relu = torch.relu if norm.fuse_relu else nn.Identity()

    def ours(x, z):
        if not norm.channel_last:
            return norm(x, z) if add else norm(x)
        return norm(*(t.movedim(1, -1) for t in ((x, z) if add else (x,)))).movedim(-1, 1)

    def theirs(x, z):
        return relu(plain(x) + z if add else plain(x))

    batches = [whole(shape, dtype, step) for step in range(3)]
    found = steps(norm, ours, [[t[rows] for t in tensors] for tensors in batches])
    expected = steps(plain, theirs, [[t.double() for t in tensors] for tensors in batches])
    bound = {"rtol": BOUNDS[dtype], "atol": BOUNDS[dtype], "check_dtype": False}
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, wanted[rows], **bound)
    # Each rank has its part of the gradients of weight and bias, and all of the statistics.
    for (name, p), (other, q) in zip(norm.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(sum(all_ranks(p.grad)), q.grad, **bound)
    for (name, t), (other, wanted) in zip(norm.named_buffers(), plain.named_buffers(), strict=True):
        assert name == other
        assert all(torch.equal(t, of_rank) for of_rank in all_ranks(t))
        torch.testing.assert_close(t, wanted, **bound)


@pytest.mark.full(but=20)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("shape", SHAPES)
@on_ranks(2)
def test_shares_are_one_batch(shape, split, options):
    check(SHAPES[shape], torch.float32, SPLITS[split], OPTIONS[options])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@on_ranks(2)
def test_types(dtype):
    check(SHAPES["4d"], dtype, 3, {})


@on_ranks(2)
def test_z_is_added_before_the_relu():
    check(SHAPES["4d"], torch.float32, 3, {"channel_last": True, "fuse_relu": True}, add=True)


@pytest.mark.parametrize(("size", "means"), [(0, [3.0, 3.0]), (1, [2.0, 4.0]), (2, [3.0, 3.0])])
@on_ranks(2)
def test_groups(size, means):
    """The mean that each rank learns from inputs of 2 and 4."""
    norm = SyncBatchNorm(1, momentum=1.0, process_group=create_syncbn_process_group(size))
    norm(torch.full((2, 1), 2.0 + 2.0 * RANK))
    assert norm.running_mean.item() == means[RANK]


@on_ranks(2)
def test_errors():
    with pytest.raises(AmpAssertionError, match="^group_size 3 does not divide the 2 ranks$"):
        create_syncbn_process_group(3)
    with pytest.raises(
        AmpValueError, match="^Expected more than 1 value per channel when training, got 1 over all ranks$"
    ):
        SyncBatchNorm(5)(torch.randn(1 - RANK, 5))
    with pytest.raises(AmpValueError, match=r"^expected 5 channels, got 6 in an input of \(4, 6\)$"):
        SyncBatchNorm(5)(torch.randn(4, 6))
    with pytest.raises(ValueError, match=r"^expected at least 2D input \(got 1D input\)$"):
        SyncBatchNorm(5)(torch.randn(5))


def test_one_class_and_no_group_without_a_process_group():
    assert SyncBatchNorm is Optimized is Fallback
    assert issubclass(SyncBatchNorm, nn.SyncBatchNorm)
    assert create_syncbn_process_group(0) is None


# --- convert_syncbn_model ---------------------------------------------------------------------------------------------


def test_convert():
    inner = nn.Sequential(nn.BatchNorm2d(3, eps=1e-3, momentum=None), nn.InstanceNorm2d(3, affine=True))
    model = nn.ModuleDict({"inner": inner, "one": nn.BatchNorm1d(4, affine=False), "last": nn.Linear(2, 2)})
    model["one"].eval()
    inner[0].running_mean.fill_(3.0)
    # The same objects: optimizers made before go on.
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


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_on_a_gpu_as_on_the_cpu(dtype):
    x, z, _ = whole((8, 5, 4, 2), dtype, 0)
    x, z = x.movedim(1, -1), z.movedim(1, -1)
    norm, on_gpu = (SyncBatchNorm(5, channel_last=True, fuse_relu=True) for _ in range(2))
    torch.testing.assert_close(on_gpu.cuda()(x.cuda(), z.cuda()).cpu(), norm(x, z))
    torch.testing.assert_close(on_gpu.running_var.cpu(), norm.running_var)
