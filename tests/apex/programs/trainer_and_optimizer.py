import sys
import torch
from torch import nn

try:
    from apex import amp

    _has_apex = True
except ImportError:
    _has_apex = False


def is_apex_available():
    return _has_apex


class Args:
    fp16 = "--fp16" in sys.argv
    fp16_opt_level = "O1"
    gradient_accumulation_steps = 2
    max_grad_norm = 0.7
    n_gpu = 1


class Trainer:
    def __init__(self, model, args):
        self.model, self.args = model, args
        self.optimizer = None

    def train(self, batches):
        model = self.model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        optimizer = self.optimizer
        if self.args.fp16:
            if not is_apex_available():
                raise ImportError("apex is missing: --fp16 needs it")
            model, self.optimizer = amp.initialize(model, self.optimizer, opt_level=self.args.fp16_opt_level)
        model.zero_grad()
        tr_loss = 0.0
        for step, inputs in enumerate(batches):
            tr_loss += self.training_step(model, inputs)
            print(tr_loss)
            if (step + 1) % self.args.gradient_accumulation_steps == 0:
                if self.args.fp16:
                    torch.nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), self.args.max_grad_norm)
                else:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
                self.optimizer.step()
                model.zero_grad()

    def training_step(self, model, inputs):
        model.train()
        loss = self.compute_loss(model, inputs)
        if self.args.n_gpu > 1:
            loss = loss.mean()
        if self.args.gradient_accumulation_steps > 1:
            loss = loss / self.args.gradient_accumulation_steps
        if self.args.fp16:
            with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        return loss.item()

    def compute_loss(self, model, inputs):
        x, y = inputs
        return nn.functional.cross_entropy(model(x), y)


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
Trainer(net, Args()).train([(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(10)])
