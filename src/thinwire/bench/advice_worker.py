"""One rank of `thinwire bench advice`: predicts each method's step, then measures it, in the same processes.

Run by the parent in the lab; rank 0 prints the predictions, every rank what it measured.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.bench.ddp_worker import Contestant
from thinwire.race.advising import make_report, probed_wire
from thinwire.race.measuring import Subject
from thinwire.recipes.convnet import cuda_convnet


def subject(batch: int) -> Subject:
    """The model and the batch of `thinwire bench ddp`."""
    torch.manual_seed(0)
    model = cuda_convnet()
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))

    def loss(step: int) -> Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    return Subject("cuda-convnet", model, loss, torch.optim.SGD(model.parameters(), lr=0.01))


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, methods = dist.get_rank(), options["methods"]
    contestants = [Contestant(method, options["batch"]) for method in methods]
    for contestant in contestants:
        contestant.steps(options["warmup"])
    for turn in range(options["rounds"]):
        # Every round predicts anew: the machine's moods must hit prediction and measurement alike.
        codecs = [method for method in methods if method not in ("dense", "fp16")]
        found = make_report(subject(options["batch"]), probed_wire(), codecs, "")
        predicted = {row.method: row.seconds for row in found.advice.rows}
        for contestant in contestants:
            took = contestant.measure(options["steps"])["step"]
            row = {
                "method": contestant.method,
                "round": turn,
                "predicted": predicted[contestant.method],
                "measured": took,
            }
            if rank == 0:
                print("ROW " + json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
