"""A small training run on digits in one process, which writes the event logs for tests of the report."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from thinwire.tools.events import Eval, EventLog, Run, RunLog, Step, read_log
from thinwire.tools.observe import describe_machine, gradient_histogram, now
from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.recipe import DataOrder, Recipe, Splits


@dataclass
class Replica:
    """One worker's residual; the model itself is shared, since all replicas are equal."""

    density: float | None  # None: dense
    residual: dict[str, Tensor] = field(default_factory=dict)

    def send(self, name: str, gradient: Tensor) -> tuple[Tensor, int]:
        """What this worker contributes, and how many entries travel."""
        if self.density is None:
            return gradient.clone(), gradient.numel()
        total = gradient + self.residual.get(name, torch.zeros_like(gradient))
        kept = max(1, int(self.density * total.numel()))
        places = total.abs().flatten().topk(kept).indices
        sent = torch.zeros_like(total)
        sent.view(-1)[places] = total.flatten()[places]
        self.residual[name] = total - sent
        return sent, kept


@dataclass
class Training:
    """All workers of a run, one after the other; `rate` adds the computed time of a link in bytes a second."""

    method: str
    density: float | None = None
    workers: int = 2
    steps: int = 4
    seed: int = 0
    rate: float | None = None
    evaluate_every: int = 2
    limit: int | None = 50
    local: dict[str, Tensor] = field(default_factory=dict)  # the last worker's gradient of the last step
    recipe: Recipe = field(default_factory=lambda: get_recipe("digits"))

    def run(self, path: Path) -> RunLog:
        """Train and return the log, read back from its file."""
        recipe, splits = self.recipe, self.recipe.load(None)
        order = DataOrder(len(splits.train), batch=recipe.defaults.batch, workers=self.workers, seed=self.seed)
        model = recipe.build(self.seed)
        optimizer = recipe.optimizer(model)
        replicas = [Replica(self.density) for _ in range(self.workers)]
        start = Run(
            command=f"python -m tests.tools.report.training {self.method}",
            recipe=recipe.name,
            method=self.method,
            workers=self.workers,
            batch=order.batch,
            parameters=recipe.parameter_count(),
            seed=self.seed,
            rate="none" if self.rate is None else f"{self.rate * 8 / 1e6:.0f}mbit (computed)",
            target=recipe.defaults.target,
            version="test",
            machine=describe_machine(),
            date=now(),
        )
        wall = 0.0
        with EventLog(path, start) as log:
            for step in range(1, self.steps + 1):
                record = self.step(step, wall, model, optimizer, order, splits, replicas)
                wall = record.wall
                log.write(record)
                if step % self.evaluate_every == 0:
                    for name, split in (("test", splits.test), ("train", splits.train)):
                        value = recipe.evaluate(model, split, self.limit)
                        log.write(
                            Eval(
                                step=step,
                                epoch=order.epoch(step),
                                wall=wall,
                                split=name,
                                metric=recipe.metric,
                                value=value,
                            )
                        )
            for name, gradient in self.local.items():
                log.write(gradient_histogram(self.steps, name, gradient))
            log.end("max_steps")
        return read_log(path)

    def step(
        self,
        step: int,
        wall: float,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        order: DataOrder,
        splits: Splits,
        replicas: list[Replica],
    ) -> Step:
        """One step of all workers; phases are those of one worker, on average."""
        marks = {"compute": 0.0, "compress": 0.0, "exchange": 0.0, "apply": 0.0}
        mean = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        loss, entries = 0.0, 0
        self.local = {}
        for rank, replica in enumerate(replicas):
            begin = time.perf_counter()
            model.zero_grad()
            batch_loss = self.recipe.loss(model, splits.train.batch(order.at(step - 1, rank)))
            batch_loss.backward()
            loss += batch_loss.item() / self.workers
            computed = time.perf_counter()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                self.local[name] = parameter.grad
                sent, count = replica.send(name, parameter.grad)
                mean[name] += sent / self.workers
                entries += count
            marks["compute"] += (computed - begin) / self.workers
            marks["compress"] += (time.perf_counter() - computed) / self.workers
        begin = time.perf_counter()
        for name, parameter in model.named_parameters():
            parameter.grad = mean[name]
        optimizer.step()
        marks["apply"] = time.perf_counter() - begin
        parameters = sum(p.numel() for p in model.parameters())
        per_entry = 4 if self.density is None else 8
        sent_bytes = per_entry * entries // self.workers
        marks["exchange"] = 0.0 if self.rate is None else sent_bytes * (self.workers - 1) / self.rate
        return Step(
            step=step,
            epoch=order.epoch(step),
            wall=wall + sum(marks.values()),
            bytes_sent=sent_bytes,
            bytes_received=sent_bytes * (self.workers - 1),
            loss=loss,
            density=entries / self.workers / parameters,
            residual_norm=float(sum(r.norm() for r in replicas[0].residual.values())),
            compute=marks["compute"],
            compress=marks["compress"],
            exchange=marks["exchange"],
            apply=marks["apply"],
        )
