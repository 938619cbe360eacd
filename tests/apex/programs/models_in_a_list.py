import copy
import torch
from torch import nn

try:
    import apex
    from apex import amp
except ImportError:
    print("no apex")


class Learner:
    def __init__(self, config):
        self.config = config
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        self.optim = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.ema = copy.deepcopy(self.net)
        if config["amp"]:
            [self.net], self.optim = amp.initialize([self.net], self.optim, opt_level=config["amp_level"])
        self.history = []

    def run(self, data):
        for big in data:
            self.optim.zero_grad()
            for x, y in big:
                out = self.net(x)
                loss = nn.functional.cross_entropy(out, y) / len(big)
                if self.config["amp"]:
                    with amp.scale_loss(loss, self.optim) as scaled:
                        scaled.backward()
                else:
                    loss.backward()
                self.history.append(loss.item())
            if self.config["clip"]:
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.config["clip"])
            self.optim.step()
            self.update_ema()
            print(sum(self.history[-2:]))
            acc = accuracy(out, y)
            print(acc)

    def update_ema(self):
        with torch.no_grad():
            for a, b in zip(self.ema.parameters(), self.net.parameters()):
                a.mul_(0.9).add_(b, alpha=0.1)

    def checkpoint(self):
        return {"net": self.net.state_dict(), "amp": amp.state_dict() if self.config["amp"] else None}


def accuracy(out, y):
    return (out.argmax(1) == y).float().mean().item()


torch.manual_seed(0)
learner = Learner({"amp": True, "amp_level": "O1", "clip": 0.5})
learner.run([[(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(2)] for _ in range(8)])
learner.checkpoint()
