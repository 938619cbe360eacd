import sys
import torch
from torch import nn

try:
    from apex import amp
except ImportError:
    amp = None

fp16 = "--fp16" in sys.argv


class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.body_opt = torch.optim.SGD(self.body.parameters(), lr=0.2)
        self.head_opt = torch.optim.Adam(self.head.parameters(), lr=0.05)
        self.critic_opt = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
        if fp16:
            [self.body, self.head, self.critic], [self.body_opt, self.head_opt, self.critic_opt] = amp.initialize(
                [self.body, self.head, self.critic],
                [self.body_opt, self.head_opt, self.critic_opt],
                opt_level="O1",
                verbosity=0,
            )

    def update(self, x, y):
        self.body_opt.zero_grad()
        self.head_opt.zero_grad()
        self.critic_opt.zero_grad()
        loss = nn.functional.cross_entropy(self.head(self.body(x).relu()), y)
        value = nn.functional.mse_loss(self.critic(x).squeeze(1), y.float())
        if fp16:
            with amp.scale_loss(loss, [self.body_opt, self.head_opt]) as scaled_loss:
                scaled_loss.backward()
            with amp.scale_loss(value, self.critic_opt) as scaled_value:
                scaled_value.backward()
        else:
            loss.backward()
            value.backward()
        self.body_opt.step()
        self.head_opt.step()
        self.critic_opt.step()
        return loss.item(), value.item()


trainer = Trainer()
for _ in range(6):
    print(*trainer.update(torch.randn(16, 8), torch.randint(0, 4, (16,))))
