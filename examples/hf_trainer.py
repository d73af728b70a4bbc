"""Hugging Face Trainer: a callback attaches to the wrapped model and saves the residual beside each checkpoint.

torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py /tmp/trainer
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import thinwire
from task import accuracy, checksum, make_data, make_net


class ThinwireCallback(TrainerCallback):  # type: ignore[misc]
    """Every rank writes its own residual into the checkpoint's directory."""

    def __init__(self, trainer: Trainer, codec: Any = 0.01, resume_from: str | None = None) -> None:
        self._trainer, self._codec, self._resume = trainer, codec, resume_from
        self.link: thinwire.Link | None = None

    def _file(self, directory: str, arguments: TrainingArguments) -> Path:
        return Path(directory) / f"thinwire-{arguments.process_index}.pt"

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.link = thinwire.attach(self._trainer.model_wrapped, self._codec)
        if self._resume is not None:
            self.link.load_state_dict(torch.load(self._file(self._resume, args), weights_only=True))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        assert self.link is not None
        path = self._file(f"{args.output_dir}/checkpoint-{state.global_step}", args)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(self.link.state_dict(), path)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def fit(directory: str, epochs: int, resume_from: str | None) -> tuple[Classifier, ThinwireCallback]:
    model = Classifier()
    arguments = TrainingArguments(
        output_dir=directory,
        use_cpu=True,
        ddp_backend="gloo",
        num_train_epochs=epochs,
        per_device_train_batch_size=16,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        save_strategy="epoch",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"x": x, "labels": y} for x, y in make_data()]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)  # type: ignore[arg-type]
    callback = ThinwireCallback(trainer, resume_from=resume_from)
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume_from)
    return model, callback


def main(directory: str) -> None:
    torch.set_num_threads(1)
    fit(directory, 2, None)
    checkpoint = max(Path(directory).glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    model, callback = fit(directory, 4, str(checkpoint))
    assert callback.link is not None
    print(
        f"rank {torch.distributed.get_rank()}: accuracy {accuracy(model.net):.3f}, checksum {checksum(model.net)}, "
        f"step {callback.link.step}\n",
        end="",
        flush=True,
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
