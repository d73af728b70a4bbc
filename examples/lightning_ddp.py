"""Lightning: a callback attaches, logs, and keeps each rank's residual beside Lightning's checkpoints.

torchrun --standalone --nproc-per-node 2 examples/lightning_ddp.py /tmp/lightning
"""

import sys

import lightning as L
import torch
from torch.utils.data import DataLoader

from task import make_data, make_net, report
from thinwire.integrations.lightning import ThinwireCallback


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(directory: str) -> None:
    checkpoint = None
    for epochs in (2, 4):  # the second Trainer resumes from the first one's checkpoint
        module, callback = Classifier(), ThinwireCallback(0.01)
        options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "enable_progress_bar": False, "logger": False}
        trainer = L.Trainer(max_epochs=epochs, callbacks=[callback], default_root_dir=directory, **options)
        trainer.fit(module, DataLoader(make_data(), batch_size=16, shuffle=True), ckpt_path=checkpoint)
        checkpoint = trainer.checkpoint_callback.best_model_path
    report(module.net, callback.link.step)


if __name__ == "__main__":
    main(sys.argv[1])
