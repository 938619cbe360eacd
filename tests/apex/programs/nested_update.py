import sys
import torch
from torch import nn


class Engine:
    def __init__(self, function):
        self.function, self.iteration = function, 0

    def run(self, batches):
        for batch in batches:
            self.iteration += 1
            print(self.function(self, batch))


class Double(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, x, y, z):
        return nn.functional.cross_entropy(self.a(x), y), nn.functional.cross_entropy(self.b(x), z)


def train(fp16):
    torch.manual_seed(0)
    model = Double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if fp16:
        from apex import amp  # needed here only

        model, optimizer = amp.initialize(model, optimizer, opt_level=fp16)

    def update(engine, batch):
        model.train()
        x, y, z = tuple(t.to("cpu") for t in batch)
        (lm_loss), (mc_loss), *_ = model(x, y, z)
        loss = (lm_loss * 1.0 + mc_loss * 0.5) / 2
        if fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if engine.iteration % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    trainer = Engine(update)
    g = torch.Generator().manual_seed(0)
    trainer.run(
        [
            (
                torch.randn(8, 8, generator=g),
                torch.randint(0, 4, (8,), generator=g),
                torch.randint(0, 2, (8,), generator=g),
            )
            for _ in range(12)
        ]
    )


train("O1" if "--fp16" in sys.argv else "")
