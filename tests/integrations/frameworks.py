"""Trainings of each framework, which all ranks of a test run: 64 steps in 4 epochs, with a checkpoint after each.

Each returns the parameters' checksums, the number of the link's steps and the residual's norm. Where a framework has
loggers of its own, the link's figures must be in them. At `kill_at` steps all
processes kill themselves, as in a power failure; called again, a training resumes from the newest checkpoint.
"""

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.link import jobs

Reached = tuple[list[int], int, float]
OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
RATES = {"sgd": 0.1, "adamw": 0.003}


def data() -> TensorDataset:
    x, y = jobs.batch(0, 0, 512)
    return TensorDataset(x, y)


def make(name: str, net: nn.Module) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = OPTIMIZERS[name](net.parameters(), lr=RATES[name])
    return optimizer


def net() -> jobs.Net:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return jobs.Net()


FIGURES = {"thinwire/bytes_sent", "thinwire/density", "thinwire/compression_ratio", "thinwire/residual_norm"}


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def reached(module: nn.Module, link: Any) -> Reached:
    return jobs.digest(module), link.step, float(link.stats()["residual_norm"])


def lightning_trainer(rank: int, directory: str, optimizer: str, kill_at: int) -> Reached:
    import lightning as L
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from thinwire.integrations.lightning import ThinwireCallback

    class Classifier(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make(optimizer, self)

    class Killer(Callback):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            if trainer.global_step == kill_at:
                end()

    module, callback = Classifier(), ThinwireCallback(0.05)
    saving = ModelCheckpoint(directory, filename="{epoch}", every_n_epochs=1, save_top_k=1, monitor="step", mode="max")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=4,
        callbacks=[callback, saving, Killer()],
        logger=CSVLogger(directory, name="logs"),
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    newest = max(Path(directory).glob("*.ckpt"), key=lambda p: p.stat().st_mtime, default=None)
    trainer.fit(module, DataLoader(data(), batch_size=16, shuffle=True), ckpt_path=newest)
    kept = {path.name for path in Path(directory).glob("*.ckpt")}
    assert "epoch=0.ckpt" not in kept  # and the ranks' files of older checkpoints are removed with them
    assert {path.name for path in Path(directory).glob("*.thinwire")} == {f"{name}.thinwire" for name in kept}
    if rank == 0:
        logged = max(Path(directory).glob("logs/*/metrics.csv"), key=lambda p: p.stat().st_mtime).read_text()
        assert set(logged.splitlines()[0].split(",")) >= FIGURES
        assert len(logged.splitlines()) > 2
    return reached(module, callback.link)


def lightning_fabric(rank: int, directory: str, optimizer: str, kill_at: int) -> Reached:
    from lightning.fabric import Fabric

    from thinwire.integrations.lightning import attach

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    made = net()
    model, trained = fabric.setup(made, make(optimizer, made))
    link = attach(fabric, model, trained, 0.05)
    state = {"model": model, "optimizer": trained, "epoch": 0}
    newest = Path(directory) / "newest.ckpt"
    if newest.exists():
        fabric.load(newest, state)
    # Fabric's order of shuffled data depends on how many epochs a process has seen, so that a resumed run has another.
    loader = fabric.setup_dataloaders(DataLoader(data(), batch_size=16))
    for epoch in range(int(state["epoch"]), 4):
        for x, y in loader:
            trained.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(x), y))
            trained.step()
            if link.step == kill_at:
                end()
        state["epoch"] = epoch + 1
        fabric.save(newest, state)
    return reached(made, link)


def accelerate(rank: int, directory: str, optimizer: str, kill_at: int) -> Reached:
    from accelerate import Accelerator, DataLoaderConfiguration

    from thinwire.integrations.accelerate import attach

    # Only this sampler's order of shuffled data depends on nothing but its saved seed and the epoch.
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    made = net()
    model, trained, loader = accelerator.prepare(
        made, make(optimizer, made), DataLoader(data(), batch_size=16, shuffle=True)
    )
    link = attach(accelerator, model, trained, 0.05)
    newest = max(Path(directory).iterdir(), key=lambda p: p.name, default=None)
    if newest is not None:
        accelerator.load_state(str(newest))
    for epoch in range(link.step // 16, 4):
        loader.set_epoch(epoch)  # a loader of a new process begins to count at 0
        for x, y in loader:
            trained.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            trained.step()
            if link.step == kill_at:
                end()
        accelerator.save_state(f"{directory}/{epoch}")
    return reached(made, link)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def _tensorboard_names(directory: Path) -> set[str]:
    """The names of what TensorBoard shows of the newest run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    newest = max(directory.glob("runs/*"), key=lambda p: p.stat().st_mtime)
    shown = EventAccumulator(str(newest))
    shown.Reload()
    return set(shown.Tags()["scalars"])


def transformers(rank: int, directory: str, optimizer: str, kill_at: int) -> Reached:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from thinwire.integrations.transformers import ThinwireCallback

    class Killer(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == kill_at:
                end()

    arguments = TrainingArguments(
        directory,
        use_cpu=True,
        ddp_backend="gloo",
        num_train_epochs=4,
        per_device_train_batch_size=16,
        optim="sgd" if optimizer == "sgd" else "adamw_torch",
        learning_rate=RATES[optimizer],
        save_strategy="epoch",
        logging_steps=10,
        report_to=["tensorboard"],
        disable_tqdm=True,
    )
    callback = ThinwireCallback(0.05)
    x, y = data().tensors
    rows = [{"x": x[i], "labels": y[i]} for i in range(len(x))]
    trainer = Trainer(Classifier(), arguments, train_dataset=rows, callbacks=[callback, Killer()])
    trainer.train(resume_from_checkpoint=any(Path(directory).glob("checkpoint-*")) or None)
    assert trainer.state.global_step == 64
    if rank == 0:
        assert _tensorboard_names(Path(directory)) >= {f"train/{name}" for name in FIGURES}
    return reached(trainer.model.net, callback.link)  # type: ignore[union-attr, arg-type]


TRAININGS = {each.__name__: each for each in (lightning_trainer, lightning_fabric, accelerate, transformers)}
