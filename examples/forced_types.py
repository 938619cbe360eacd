"""Keeps layers and functions in fp32, with the same arguments at every opt level.

    python examples/forced_types.py                             # trains at each of O0 to O5
    python examples/forced_types.py --opt-level O2 --without keep_fp32      # fails without it

The net reads the UCI handwritten digits as images of 0 to 255, row by row. Two of its ops fail in 16 bits: the sums of
squares in ``RMSNorm`` overflow fp16, and torch has no cdist for 16-bit types.
"""

import torch
import torch.nn.functional as F
from shared import OPT_LEVELS, Parser, accuracy, load_digits
from torch import Tensor, nn

from ampctx import amp, optimizers

# Modules by name pattern and by class; functions by name.
FORCED = {"keep_fp32": ["head.*", nn.LayerNorm], "ops_fp32": {"softmax", "cdist"}}


class RMSNorm(nn.LayerNorm):
    """Normalizes by root mean squares. Many models write this by hand and cast to fp32 inside; this one does not."""

    computed_in: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.computed_in = x.dtype
        power = x.square().sum(-1, keepdim=True) / x.shape[-1]
        return x * torch.rsqrt(power + self.eps) * self.weight + self.bias


class Net(nn.Module):
    """Maps (N, 1, 8, 8) images to (N, 10) scores: the negative distance to a prototype of each digit."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(8, width), RMSNorm(width)
        self.position, self.attention = nn.Parameter(torch.randn(8, width)), nn.Linear(width, 8)
        self.head = nn.Sequential(nn.Linear(8 * width, width), nn.GELU(), nn.Linear(width, 16))
        self.prototypes = nn.Parameter(torch.randn(10, 16))

    def forward(self, images: Tensor) -> Tensor:
        rows = self.norm(self.body(images[:, 0])) + self.position
        weights = self.attention(rows).softmax(dim=1)
        return -torch.cdist(self.head((weights.mT @ rows).flatten(1)), self.prototypes)


def train(args, level: str, images: Tensor, labels: Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = Net().to(images.device)
    optimizer = optimizers.FusedAdam(model.parameters(), lr=0.003)
    forced = {name: value for name, value in FORCED.items() if name not in args.without}
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, **forced)
    for epoch in range(args.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch)).to(images.device)
        for batch in order.split(32):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def types_inside(model: Net, images: Tensor) -> str:
    """The dtypes that ``body``, ``norm`` and ``head`` compute in."""
    found = {}
    for name, layer in (("body", model.body), ("head", model.head[0])):
        layer.register_forward_hook(lambda module, args, output, name=name: found.update({name: output.dtype}))
    model(images)
    types = {"body": found["body"], "norm": model.norm.computed_in, "head": found["head"]}
    return ", ".join(f"{name} in {str(dtype).removeprefix('torch.')}" for name, dtype in types.items())


def main() -> None:
    parser = Parser(__doc__, epochs=4)
    parser.add_argument("--opt-level", nargs="+", default=OPT_LEVELS, choices=OPT_LEVELS, help="default all")
    parser.add_argument("--without", nargs="+", default=[], choices=list(FORCED), help="leave out one or both")
    args = parser.parse_args()
    images, labels, test_images, test_labels = load_digits(args.device)
    images, test_images = (images + 1) * 127.5, (test_images + 1) * 127.5
    reached = {}
    for level in args.opt_level:
        try:
            model = train(args, level, images, labels)
            reached[level] = accuracy(model, test_images, test_labels)
            print(f"{level}: {types_inside(model, test_images)}, test accuracy {reached[level]:.2f}%")
        except RuntimeError as error:
            reached[level] = 0.0
            print(f"{level}: {type(error).__name__}: {error}")
        amp.reset()
    words = ", ".join(name for name in FORCED if name not in args.without) or "nothing"
    print(f"with {words} at {', '.join(reached)}: test accuracy of {min(reached.values()):.2f}% or more")


if __name__ == "__main__":
    main()
