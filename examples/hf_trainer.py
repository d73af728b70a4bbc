"""Hugging Face Trainer: a callback attaches, logs, and keeps each rank's residual in the Trainer's checkpoints.

torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py /tmp/trainer
"""

import sys

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from task import make_data, make_net, report
from thinwire.integrations.transformers import ThinwireCallback


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main(directory: str) -> None:
    data = [{"x": x, "labels": y} for x, y in make_data()]
    for epochs in (2, 4):  # the second Trainer resumes from the first one's checkpoint
        arguments = TrainingArguments(
            directory,
            use_cpu=True,
            ddp_backend="gloo",
            num_train_epochs=epochs,
            per_device_train_batch_size=16,
            optim="sgd",
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            save_strategy="epoch",
            report_to=[],
            disable_tqdm=True,
        )
        callback = ThinwireCallback(0.01)
        trainer = Trainer(Classifier(), arguments, train_dataset=data, callbacks=[callback])
        trainer.train(resume_from_checkpoint=epochs == 4)
    report(trainer.model.net, callback.link.step)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
