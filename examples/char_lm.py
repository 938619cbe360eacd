"""Trains a small character GPT on English text in mixed precision, accumulating gradients over micro-batches.

    python examples/char_lm.py                      # O5: bf16 model, fp32 master weights, no loss scaling
    python examples/char_lm.py --opt-level O2       # fp16 model, fp32 master weights, dynamic loss scale
    python examples/char_lm.py --optimizer muon     # Muon for the matrices of the blocks, AdamW for the rest

The text is Python's language reference, ``pydoc_data.topics`` of the standard library. Its last tenth is held out.
"""

import math
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from shared import Parser, plot, writable
from torch import Tensor, nn

from ampctx import amp, clip_grad_norm_
from ampctx.optimizers import FusedMuon


class Text:
    """The text as character codes: the training part, the held-out part, and the alphabet of both."""

    def __init__(self, device: str) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        self.alphabet = "".join(sorted(set(text)))
        self.code = {char: code for code, char in enumerate(self.alphabet)}
        codes = torch.tensor([self.code[char] for char in text], device=device)
        self.train, self.test = codes[: -len(codes) // 10], codes[-len(codes) // 10 :]

    def batch(self, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """``size`` random pieces of the training part, (size, length), and the next character at each position."""
        starts = torch.randint(len(self.train) - length, (size, 1), generator=generator).to(self.train.device)
        positions = starts + torch.arange(length, device=self.train.device)
        return self.train[positions], self.train[positions + 1]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Maps (batch, time) character codes to (batch, time, alphabet) scores of the next character."""

    def __init__(self, alphabet: int, context: int, layers: int, heads: int) -> None:
        super().__init__()
        width = 32 * heads
        self.char, self.position = nn.Embedding(alphabet, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, alphabet, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.char.weight  # tied: one parameter, one master

    def forward(self, codes: Tensor) -> Tensor:
        positions = torch.arange(codes.shape[1], device=codes.device)
        return self.head(self.norm(self.blocks(self.char(codes) + self.position(positions))))


def loss_of(model: nn.Module, codes: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(codes).flatten(0, 1), targets.flatten())


@torch.no_grad()
def bits_per_char(model: nn.Module, codes: Tensor, context: int, pieces: int = 256) -> float:
    """Bits per character over ``pieces`` pieces of ``context`` characters, evenly spread over ``codes``."""
    starts = torch.linspace(0, len(codes) - context - 1, pieces).long().to(codes.device)
    positions = starts[:, None] + torch.arange(context, device=codes.device)
    losses = [loss_of(model, codes[p], codes[p + 1]) for p in positions.split(32)]
    return torch.stack(losses).mean().item() / math.log(2)


@torch.no_grad()
def sample(model: nn.Module, text: Text, context: int, prompt: str, length: int) -> str:
    codes = torch.tensor([[text.code[char] for char in prompt]])
    generator = torch.Generator().manual_seed(0)
    for _ in range(length):
        scores = model(codes[:, -context:].to(text.train.device))[0, -1].float().cpu()
        chosen = torch.multinomial(F.softmax(scores / 0.8, dim=-1), 1, generator=generator)
        codes = torch.cat((codes, chosen[None]), dim=1)
    return "".join(text.alphabet[code] for code in codes[0].tolist())


def make_optimizer(args, model: GPT) -> torch.optim.Optimizer:
    options = {"lr": args.lr, "betas": (0.9, 0.98), "weight_decay": 0.05}
    if args.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), **options)
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    chosen = set(matrices)
    others = [p for p in model.parameters() if p not in chosen]  # embeddings, the tied head, norms and biases
    groups = [{"params": matrices}, {"params": others, "use_muon": False, "betas": (0.9, 0.98)}]
    # Updates as large as AdamW's, so that both share the learning rate and its schedule.
    return FusedMuon(groups, lr=args.lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")


def train(args, text: Text) -> tuple[nn.Module, list[tuple[int, float, float]], int]:
    """Trains. Returns the model, (step, training, held-out bits per char) of each evaluation, and skipped steps."""
    torch.manual_seed(0)
    model = GPT(len(text.alphabet), args.context, args.layers, args.heads).to(args.device)
    optimizer = make_optimizer(args, model)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    generator = torch.Generator().manual_seed(0)
    history = [(0, float("nan"), bits_per_char(model, text.test, args.context))]
    since_last = []
    for step in range(1, args.steps + 1):
        warmup = min(1.0, step / (0.1 * args.steps))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warmup * (1 - 0.95 * step / args.steps)
        for micro in range(args.accumulate):
            loss = loss_of(model, *text.batch(args.batch_size, args.context, generator))
            # Gradients of the first micro-batches stay scaled and add up. The last block unscales and checks the sum.
            more = micro < args.accumulate - 1
            with amp.scale_loss(loss / args.accumulate, optimizer, delay_unscale=more) as scaled_loss:
                scaled_loss.backward()
            since_last.append(loss.detach())
        clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % args.eval_every == 0 or step == args.steps:
            train_bits = torch.stack(since_last).mean().item() / math.log(2)
            history.append((step, train_bits, bits_per_char(model, text.test, args.context)))
            since_last.clear()
            print(f"step {step}: bits per char {train_bits:.3f} in training, {history[-1][2]:.3f} held out", flush=True)
    return model, history, amp.skipped_steps(optimizer)


def main() -> None:
    sizes = {"batch_size": 8, "accumulate": 2, "context": 64, "heads": 4, "layers": 2}
    parser = Parser(__doc__, opt_level="O5", steps=800, eval_every=100, **sizes)
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "muon"], help="default adamw")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate; default 0.003")
    parser.add_argument("--plot", type=writable, metavar="PATH", help="draw the loss into this PNG")
    args = parser.parse_args()
    text = Text(args.device)
    model, history, skipped = train(args, text)
    print("sample:", sample(model, text, args.context, prompt="The ", length=200), sep="\n")
    if args.plot:
        steps, training, held_out = zip(*history, strict=True)
        with plot(args.plot, size=(8, 4.5)) as axis:
            axis.plot(steps, training, "o-", label="training, mean since the last point")
            axis.plot(steps, held_out, "o-", label="held out")
            axis.set(title=f"Character GPT at {args.opt_level}", xlabel="step", ylabel="bits per character")
            axis.legend()
    scaling = f"loss scale {amp.loss_scale():g} | skipped steps {skipped} of {args.steps}"
    print(f"held-out bits per char {history[-1][2]:.3f} (untrained {history[0][2]:.3f}) | {scaling}")


if __name__ == "__main__":
    main()
