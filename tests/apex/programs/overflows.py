"""A loss so large that the first scales overflow: the same steps must be skipped."""

import sys
import torch
from torch import nn

use_amp = "--amp" in sys.argv
if use_amp:
    from apex import amp


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    opt = torch.optim.SGD(model.parameters(), lr=1e-5)
    if use_amp:
        model, opt = amp.initialize(model, opt, opt_level="O1", loss_scale="dynamic", verbosity=0)
    for i in range(12):
        x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
        loss = 500.0 * nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        before = model[0].weight.detach().clone()
        if use_amp:
            with amp.scale_loss(loss, opt) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 50.0)
        opt.step()
        print(loss.item(), float((model[0].weight - before).abs().max() > 0))


main()
