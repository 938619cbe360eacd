"""Adds the norm of the gradients to the loss (a double backward), with both interfaces of ampctx.

    python examples/gradient_penalty.py                     # apex's interface, at O2
    python examples/gradient_penalty.py --api torch         # torch.autocast and GradScaler
    python examples/gradient_penalty.py --weight 0          # no penalty, to compare with

No optimizer unscales what torch.autograd.grad returns, so the program scales and unscales it by itself. The double
backward goes through a BatchNorm in training mode. wgan_gp.py has the penalty of a GAN.
"""

import torch
import torch.nn.functional as F
from shared import Parser
from torch import Tensor, nn

from ampctx import GradScaler, amp


def norm_of(grads: list[Tensor]) -> Tensor:
    return torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()


def train_apex(model, data, args):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    norms = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)

        # In fp16 small gradients would round to 0, so scale this backward, too. Reading the scale is a host sync. Call
        # torch.autograd.grad without the casts of O1.
        scale = amp.loss_scale()
        with amp.disable_casts():
            # model.parameters(), because the graph does not contain amp.master_params.
            scaled_grads = torch.autograd.grad(loss * scale, list(model.parameters()), create_graph=True)
        # Gradients of an fp16 model are fp16: divide and square them in fp32.
        grad_norm = norm_of([grad.float() / scale for grad in scaled_grads])

        with amp.scale_loss(loss + args.weight * grad_norm, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        norms.append(grad_norm.item())
    return norms, amp.loss_scale(), amp.skipped_steps(optimizer)


def train_torch(model, data, args):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = GradScaler(args.device)
    norms, skipped = [], 0
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast(args.device, dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)

        scaled_grads = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        # unscale_ does not see these gradients, because they are in no .grad.
        inv_scale = 1.0 / scaler.get_scale()
        grads = [grad * inv_scale for grad in scaled_grads]

        # The penalty belongs to the forward pass, under autocast.
        with torch.autocast(args.device, dtype=torch.float16):
            grad_norm = norm_of(grads)
            loss = loss + args.weight * grad_norm
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        norms.append(grad_norm.item())
        skipped += not scaler.outcome(optimizer).stepped
    return norms, scaler.get_scale(), skipped


def moons(count: int, device: str) -> tuple[Tensor, Tensor]:
    """Points on two interleaved half circles, and the index of their circle."""
    label = torch.randint(2, (count,), device=device)
    angle = 3.1416 * torch.rand(count, device=device)
    side = 1.0 - 2.0 * label
    x = torch.stack((angle.cos() * side + label, angle.sin() * side + 0.5 * label), dim=1)
    return x + 0.3 * torch.randn_like(x), label


def main() -> None:
    parser = Parser(__doc__, opt_level="O2", apis=True, steps=200)
    parser.add_argument("--weight", type=float, default=0.5, help="weight of the penalty; default 0.5")
    args = parser.parse_args()
    hidden = [nn.Linear(2, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()]
    model = nn.Sequential(*hidden, nn.Linear(32, 2)).to(args.device)
    data = (moons(32, args.device) for _ in range(args.steps))
    train = train_apex if args.api == "apex" else train_torch
    norms, scale, skipped = train(model, data, args)
    x, y = moons(1000, args.device)
    model.eval()
    with torch.no_grad():
        accuracy = 100 * (model(x).argmax(1) == y).float().mean().item()
    last = norms[-50:]
    gradients = f"gradient norm {norms[0]:.3f} at first, {sum(last) / len(last):.3f} in the last {len(last)} steps"
    scaling = f"loss scale {scale:g} | skipped steps {skipped} of {len(norms)}"
    print(f"accuracy {accuracy:.1f}% | {gradients} | {scaling}")


if __name__ == "__main__":
    main()
