import torch
from torch import nn


class Model:
    def __init__(self, net, apex_level, max_grad_norm=0.5):
        self.net = net
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.02)
        self.max_grad_norm = max_grad_norm
        try:
            from apex import amp
        except ImportError:
            raise ImportError("apex is missing")
        self.net, self.optimizer = amp.initialize(self.net, self.optimizer, opt_level=apex_level)

    def fit(self, data):
        self.optimizer.zero_grad()
        for step, (x, y) in enumerate(data):
            loss = nn.functional.cross_entropy(self.net(x), y)
            self._backward(loss)
            if step % 2:
                self._clip()
                self.optimizer.step()
                self.optimizer.zero_grad()
            print(loss.item())

    def _backward(self, loss):
        try:
            from apex import amp
        except ImportError:
            raise ImportError("apex is missing")

        with amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()

    def _clip(self):
        from apex import amp

        torch.nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), self.max_grad_norm)


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
Model(net, "O1").fit([(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(10)])
