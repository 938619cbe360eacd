import torch
from torch import nn, optim
from apex import amp


def train_model(model, criterion, optimizer, scheduler, dataloaders, num_epochs=2):
    best_acc = 0.0
    for epoch in range(num_epochs):
        for phase in ["train", "val"]:
            if phase == "train":
                model.train()
            else:
                model.eval()
            running_loss = 0.0
            running_corrects = 0
            for inputs, labels in dataloaders[phase]:
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    outputs = model(inputs)
                    _, preds = torch.max(outputs, 1)
                    loss = criterion(outputs, labels)
                    if phase == "train":
                        with amp.scale_loss(loss, optimizer) as scaled_loss:
                            scaled_loss.backward()
                        optimizer.step()
                running_loss += loss.item() * inputs.size(0)
                running_corrects += torch.sum(preds == labels.data)
                print(loss.item())
            if phase == "train":
                scheduler.step()
            epoch_acc = running_corrects.double() / 16
            print(running_loss, epoch_acc.item())
            if phase == "val" and epoch_acc > best_acc:
                best_acc = epoch_acc
    return model


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
opt = optim.SGD(net.parameters(), lr=0.3)
net, opt = amp.initialize(net, opt, opt_level="O1", verbosity=0)
data = {p: [(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(5)] for p in ["train", "val"]}
train_model(net, nn.CrossEntropyLoss(), opt, optim.lr_scheduler.StepLR(opt, 1, 0.5), data)
