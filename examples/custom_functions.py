"""Uses custom autograd functions in mixed precision: torch's custom_fwd and custom_bwd, apex's registered functions.

    python examples/custom_functions.py                     # O1: amp casts each op, in fp16
    python examples/custom_functions.py --opt-level O4      # in bf16; O0, O2, O3 and O5 too

A net of custom functions learns digits three times: with ``MatMul``, which uses custom_fwd, under torch.autocast and
under amp; and under amp with ``ForeignMatMul``, which has no decorators. A table shows what registered functions gain.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from shared import Parser, accuracy, batches, load_digits
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd

from ampctx import GradScaler, amp, optimizers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The dtypes of the latest computations of the custom functions.
seen: dict[str, torch.dtype] = {}


class MatMul(torch.autograd.Function):
    """Several inputs, and an op that autocast casts. custom_bwd runs backward with the autocast state of forward."""

    @staticmethod
    @custom_fwd(device_type=DEVICE)
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        product = a.mm(b)
        seen["MatMul forward"] = product.dtype
        return product

    @staticmethod
    @custom_bwd(device_type=DEVICE)
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        grad_a, grad_b = grad.mm(b.t()), a.t().mm(grad)
        seen["MatMul backward"] = grad_b.dtype
        return grad_a, grad_b


class LogSumExp(torch.autograd.Function):
    """(N, classes) scores -> (N,). Needs fp32, because exp overflows fp16 from 11.1 on."""

    @staticmethod
    @custom_fwd(device_type=DEVICE, cast_inputs=torch.float32)
    def forward(ctx, scores: Tensor) -> Tensor:
        powers = scores.exp()
        total = powers.sum(dim=1)
        ctx.save_for_backward(powers, total)
        seen["LogSumExp forward"] = total.dtype
        return total.log()

    @staticmethod
    @custom_bwd(device_type=DEVICE)
    def backward(ctx, grad: Tensor) -> Tensor:
        powers, total = ctx.saved_tensors
        grad_scores = powers * (grad / total)[:, None]
        seen["LogSumExp backward"] = grad_scores.dtype
        return grad_scores


class ForeignMatMul(torch.autograd.Function):
    """Has no decorators. Under autocast its output is 16-bit and its saved tensors are fp32: backward mixes both."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return grad.mm(b.t()), a.t().mm(grad)


# At O1 and O4 amp casts the arguments of these functions. float_function and promote_function are decorators, too.
@amp.half_function
def gate(x: Tensor) -> Tensor:
    return x * x.sigmoid()


variance = amp.float_function(lambda x: (x - x.mean()).square().mean())
between = amp.promote_function(lambda x, y: x.lerp(y, 0.5))


def outcome_of(call: Callable[[], Tensor]) -> str:
    try:
        result = call()
        return f"{result.flatten()[0].item():g} {result.dtype}".replace("torch.", "")
    except RuntimeError as error:
        return type(error).__name__


def print_table(low_dtype: torch.dtype) -> None:
    """Prints the results of functions with casts, and without them under amp.disable_casts()."""
    x = torch.full((2,), 300.0, device=DEVICE)
    low = x.to(low_dtype)
    rows = [
        ("float", "torch.square of 16 bits", lambda: torch.square(low)),
        ("float", "variance of 16 bits", lambda: variance(torch.stack([low, -low]))),
        ("half", "F.silu of fp32", lambda: F.silu(x)),
        ("half", "gate of fp32", lambda: gate(x)),
        ("promote", "torch.lerp of both", lambda: torch.lerp(low, x, 0.5)),
        ("promote", "between of both", lambda: between(low, x)),
    ]
    print(f"{'kind':8} {'function':24} {'without casts':20} with casts")
    for kind, name, call in rows:
        with amp.disable_casts():
            without = outcome_of(call)
        print(f"{kind:8} {name:24} {without:20} {outcome_of(call)}")


class Net(nn.Module):
    def __init__(self, matmul: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.matmul = matmul
        self.first, self.second = nn.Parameter(torch.randn(64, 64) / 8), nn.Parameter(torch.randn(64, 10) / 8)
        self.norm = nn.LayerNorm(64)

    def forward(self, images: Tensor) -> Tensor:
        return self.matmul(F.silu(self.norm(self.matmul(images.flatten(1), self.first))), self.second)


def loss_of(scores: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy."""
    return (LogSumExp.apply(scores) - scores.gather(1, labels[:, None])[:, 0]).mean()


def make(matmul) -> tuple[Net, optimizers.FusedAdam]:
    torch.manual_seed(0)
    model = Net(matmul).to(DEVICE)
    return model, optimizers.FusedAdam(model.parameters(), lr=0.005)


def train_with_amp(matmul, opt_level, data):
    """Trains under amp. Call amp.reset() after using the model."""
    model, optimizer = amp.initialize(*make(matmul), opt_level=opt_level)
    for images, labels in data:
        loss = loss_of(model(images), labels)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def train_with_autocast(matmul, dtype, data):
    model, optimizer = make(matmul)
    scaler = GradScaler(DEVICE, enabled=dtype == torch.float16)
    for images, labels in data:
        with torch.autocast(DEVICE, dtype, enabled=dtype is not None):
            loss = loss_of(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


def types_seen() -> str:
    return ", ".join(f"{name} {dtype}".replace("torch.", "") for name, dtype in sorted(seen.items()))


def main() -> None:
    args = Parser(__doc__, opt_level="O1", device=False, epochs=6).parse_args()
    images, labels, test_images, test_labels = load_digits(DEVICE)
    data = [batch for epoch in range(args.epochs) for batch in batches(images, labels, 32, seed=epoch)]
    low_dtype = torch.bfloat16 if args.opt_level in ("O4", "O5") else torch.float16
    autocast_dtype = None if args.opt_level == "O0" else low_dtype
    model = train_with_autocast(MatMul.apply, autocast_dtype, data)
    print(f"torch.autocast to {autocast_dtype}: {types_seen()}")
    with_autocast = accuracy(model, test_images, test_labels)
    try:
        train_with_autocast(ForeignMatMul.apply, autocast_dtype, data[:1])
    except RuntimeError as error:
        print(f"ForeignMatMul there: {error}")

    model = train_with_amp(MatMul.apply, args.opt_level, data)
    print(f"amp at {args.opt_level}: {types_seen()}")
    with_amp = accuracy(model, test_images, test_labels)
    amp.reset()

    # Functions of other libraries. Call this before amp.initialize; amp.reset() restores them.
    amp.register_half_function(ForeignMatMul, "apply")
    amp.register_half_function(F, "silu")
    amp.register_float_function(torch, "square")
    amp.register_promote_function(torch, "lerp")
    # A lambda looks up ForeignMatMul.apply at each call, because amp.initialize replaces that attribute.
    model = train_with_amp(lambda a, b: ForeignMatMul.apply(a, b), args.opt_level, data)
    with_registered = accuracy(model, test_images, test_labels)
    print_table(low_dtype)
    amp.reset()
    accuracies = f"{with_autocast:.2f}% with torch.autocast, {with_amp:.2f}% with amp"
    print(f"test accuracy {accuracies}, {with_registered:.2f}% with amp and registered functions")


if __name__ == "__main__":
    main()
