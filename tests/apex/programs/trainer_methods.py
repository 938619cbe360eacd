import torch
from torch import nn
import torch.nn.functional as F

try:
    from apex import amp

    APEX_AVAILABLE = True
except ImportError:
    APEX_AVAILABLE = False


class Trainer:
    def __init__(self, model, use_amp, accumulate):
        self.model = model
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        self.use_amp = use_amp and APEX_AVAILABLE
        self.accumulate = accumulate
        if self.use_amp:
            self.model, self.optimizer = amp.initialize(self.model, self.optimizer, opt_level="O1", verbosity=0)

    def fit(self, batches):
        self.model.train()
        self.optimizer.zero_grad()
        for index, batch in enumerate(batches):
            self.batch_train(batch, index)

    def batch_train(self, batch, index):
        x, y = batch
        out = self.model(x)
        loss = F.cross_entropy(out, y)
        self.loss_backpass(loss)
        if (index + 1) % self.accumulate == 0:
            self.clip_gradients()
            self.optimizer.step()
            self.optimizer.zero_grad()
        print(loss.item())

    def clip_gradients(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)

    def loss_backpass(self, loss):
        if self.use_amp:
            with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()

    def save(self):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.use_amp:
            state["amp"] = amp.state_dict()
        return state


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
trainer = Trainer(model, True, 2)
trainer.fit([(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(10)])
print(len(trainer.save()["amp"]))
