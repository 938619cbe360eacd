"""What test_parallel_syncbn.py runs on each rank: its share of a batch that the test takes as a whole."""

import functools

import torch
import torch.distributed as dist
from apex.parallel import DistributedDataParallel, SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group
from torch import nn

from ampctx import amp

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
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


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


def share(tensors, split):
    return [t[:split] if dist.get_rank() == 0 else t[split:] for t in tensors]


def steps(shape, dtype, split, options, add=False):
    """Outputs, gradients and buffers of two steps of training and one of evaluation."""
    norm = norm_of(SyncBatchNorm, dtype, **options)
    last = options.get("channel_last", False)
    found = {"out": [], "grad": [], "z_grad": []}
    for step in range(2):
        x, z, grad = share(whole(shape, dtype, step), split)
        if last:
            x, z, grad = x.movedim(1, -1), z.movedim(1, -1), grad.movedim(1, -1)
        x.requires_grad_(), z.requires_grad_()
        out = norm(x, z) if add else norm(x)
        out.backward(grad)
        assert out.dtype == x.grad.dtype == dtype
        assert out.shape == x.shape
        for name, tensor in {"out": out.detach(), "grad": x.grad, "z_grad": z.grad if add else z.detach() * 0}.items():
            found[name].append(tensor.movedim(-1, 1) if last else tensor)
    x = share(whole(shape, dtype, 2), split)[0]
    norm.eval()
    if options.get("track_running_stats", True):
        found["eval"] = norm(x.movedim(1, -1)).movedim(-1, 1) if last else norm(x)
    found["params"] = {name: p.grad for name, p in norm.named_parameters()}
    found["buffers"] = dict(norm.named_buffers())
    return found


def training(level):
    """A training with O1, O2 or O5 of a converted model in apex's wrapper: the weights, and all buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = convert_syncbn_model(model)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    wrapped = DistributedDataParallel(model)
    for step in range(3):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        with amp.scale_loss(wrapped(x).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    return [p.detach() for p in amp.master_params(optimizer)], dict(model[1].named_buffers())


def in_groups(group_size):
    """The mean that each rank learns from inputs of 2 and 4."""
    norm = SyncBatchNorm(1, momentum=1.0, process_group=create_syncbn_process_group(group_size))
    norm(torch.full((2, 1), 2.0 + 2.0 * dist.get_rank()))
    return norm.running_mean.item()


def message_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def one_value():
    split = 1
    return message_of(lambda: SyncBatchNorm(5)(share([torch.randn(1, 5)], split)[0]))


SCENARIOS = {
    **{
        f"{shape}-{split}-{options}": functools.partial(
            steps, SHAPES[shape], torch.float32, SPLITS[split], OPTIONS[options]
        )
        for shape in SHAPES
        for split in SPLITS
        for options in OPTIONS
    },
    **{f"{name}": functools.partial(steps, SHAPES["4d"], dtype, 3, {}) for name, dtype in DTYPES.items()},
    "z": functools.partial(steps, SHAPES["4d"], torch.float32, 3, {"channel_last": True, "fuse_relu": True}, add=True),
    **{f"training-{level}": functools.partial(training, level) for level in ("O0", "O1", "O2", "O5")},
    **{f"groups-{size}": functools.partial(in_groups, size) for size in (0, 1, 2)},
    "bad-group": lambda: message_of(lambda: create_syncbn_process_group(3)),
    "one-value": one_value,
    "channels": lambda: message_of(lambda: SyncBatchNorm(5)(torch.randn(4, 6))),
    "dimensions": lambda: message_of(lambda: SyncBatchNorm(5)(torch.randn(5))),
}
