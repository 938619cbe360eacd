"""Uses every public method of GradScaler in one training loop.

    python examples/grad_scaler.py                          # fp16 under autocast
    python examples/grad_scaler.py --scaler torch           # the same loop with torch.amp.GradScaler: the same numbers
    python examples/grad_scaler.py --dtype bfloat16         # needs no scaling: a disabled scaler, in the same loop

A net learns a function in two stages. The first starts with a scale far too low and finds a good one in large steps. In
the middle the program saves and loads the scaler. The second stage has a loss 1024 times as large.
"""

import io

import torch
import torch.nn.functional as F
from shared import Parser
from torch import nn

import ampctx

SCALERS = {"ampctx": ampctx.GradScaler, "torch": torch.amp.GradScaler}


def report(step: int, scaler: torch.amp.GradScaler, why: str) -> None:
    print(
        f"step {step:3d}: scale {scaler.get_scale():g}, x {scaler.get_growth_factor():g} after "
        f"{scaler.get_growth_interval()} clean steps, x {scaler.get_backoff_factor():g} at an overflow: {why}"
    )


def main() -> None:
    parser = Parser(__doc__, steps=240)
    parser.add_argument("--scaler", default="ampctx", choices=list(SCALERS), help="default ampctx")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"], help="default float16")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    # bf16 has the range of fp32 and needs no scaling. A disabled scaler passes everything through: same loop.
    scaler = SCALERS[args.scaler](args.device, init_scale=2.0**4, enabled=dtype == torch.float16)
    if scaler.is_enabled():
        # Grow fast, and fall back by the same factor.
        scaler.set_growth_factor(8.0)
        scaler.set_backoff_factor(0.125)
        scaler.set_growth_interval(4)
        report(0, scaler, "looking for the scale")

    losses, scales, skipped = [], [], 0
    for step in range(args.steps):
        if step == args.steps // 4 and scaler.is_enabled():
            scaler.set_growth_factor(2.0)
            scaler.set_backoff_factor(0.5)
            scaler.set_growth_interval(2000)
            report(step, scaler, "found, now the usual rule")
        if step == args.steps // 2:
            # Save after update(), with the states of model and optimizer. The state of a disabled scaler is empty.
            file = io.BytesIO()
            torch.save({"scaler": scaler.state_dict()}, file)
            file.seek(0)
            scaler = SCALERS[args.scaler](args.device, enabled=scaler.is_enabled())
            scaler.load_state_dict(torch.load(file, weights_only=True)["scaler"])
            if scaler.is_enabled():
                report(step, scaler, "saved and loaded")

        size = 1024.0 if step >= 3 * args.steps // 4 else 1.0  # the factor of the loss: second stage, first stage
        x = 4 * torch.rand(64, 1, device=args.device) - 2
        optimizer.zero_grad()
        with torch.autocast(args.device, dtype=dtype):
            output = model(x)
            fit = F.mse_loss(output, torch.sin(3 * x)) * size
            small = output.square().mean() * 1e-6 * size
        # scale() takes one tensor or several.
        torch.autograd.backward(scaler.scale([fit, small]))
        # From here on gradients are unscaled, to clip or read.
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # Returns the result of optimizer.step(), or None if it was skipped.
        scaler.step(optimizer)

        scale = scaler.get_scale()
        if step + 1 == 3 * args.steps // 4 and scaler.is_enabled():
            # The next loss is 1024 times as large. Otherwise ten skipped steps would lower the scale.
            scaler.update(new_scale=scale / 1024)
            report(step + 1, scaler, "set by hand")
        else:
            scaler.update()
            skipped += scaler.get_scale() < scale
        losses.append(fit.item() / size)
        scales.append(scale)
    last = 3 * args.steps // 4 - 1
    print(
        f"loss {losses[0]:.4f} -> {losses[-1]:.4f} | loss scale {scales[0]:g} -> {scales[last]:g} -> {scales[-1]:g} | "
        f"skipped steps {skipped} of {len(losses)}"
    )


if __name__ == "__main__":
    main()
