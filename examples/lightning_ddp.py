"""Lightning: a callback attaches to the strategy's DDP model and keeps the residual in Lightning's checkpoints.

torchrun --standalone --nproc-per-node 2 examples/lightning_ddp.py /tmp/lightning
"""

import sys
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

import thinwire
from task import accuracy, checksum, make_data, make_net


class ThinwireCallback(L.Callback):
    """Lightning writes one checkpoint, so that it holds the mean of all ranks' residuals."""

    def __init__(self, codec: Any = 0.01) -> None:
        self._codec = codec
        self._loaded: dict[str, Any] | None = None
        self.link: thinwire.Link | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.link = thinwire.attach(trainer.strategy.model, self._codec, optimizer=trainer.optimizers[0])
        if self._loaded is not None:  # Lightning restores callbacks before there is a DDP model
            self.link.load_state_dict(self._loaded)

    def state_dict(self) -> dict[str, Any]:
        return self.link.state_dict(gather=True) if self.link is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.link is not None:
            self.link.detach()


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(directory: str, epochs: int, checkpoint: str | None) -> tuple[Classifier, ThinwireCallback, L.Trainer]:
    module, callback = Classifier(), ThinwireCallback()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=epochs,
        callbacks=[callback],
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(make_data(), batch_size=16, shuffle=True), ckpt_path=checkpoint)
    return module, callback, trainer


def main(directory: str) -> None:
    torch.set_num_threads(1)
    path = f"{directory}/half.ckpt"
    _, _, trainer = fit(directory, 2, None)
    trainer.save_checkpoint(path)
    module, callback, trainer = fit(directory, 4, path)
    assert callback.link is not None
    print(
        f"rank {trainer.global_rank}: accuracy {accuracy(module.net):.3f}, checksum {checksum(module.net)}, "
        f"step {callback.link.step}\n",
        end="",
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1])
