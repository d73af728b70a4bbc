"""One rank of `thinwire bench advice`: predicts each method's step, then measures it, in the same processes.

Run by the parent in the lab; rank 0 prints the predictions, every rank what it measured.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.exchange.choose import NAMES
from thinwire.tools.bench.ddp_worker import Contestant
from thinwire.tools.race.advise import AdviceReport, Subject, make_report, probed_wire
from thinwire.tools.recipes.convnet import cuda_convnet
from thinwire.tune.forecast import forecast

NAMES_OF = {kind: name for name, kind in NAMES.items()}


def subject(batch: int) -> Subject:
    """The model and the batch of `thinwire bench ddp`."""
    torch.manual_seed(0)
    model = cuda_convnet()
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))

    def loss(step: int) -> Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    return Subject("cuda-convnet", model, loss, torch.optim.SGD(model.parameters(), lr=0.01))


def predicted(found: AdviceReport, contestant: Contestant) -> float:
    """Seconds of a step with the exchange that the contestant really uses."""
    used = NAMES_OF.get(type(contestant.link.exchange)) if contestant.link is not None else None
    return min(
        forecast(setting, found.figures.work, found.wire.network).seconds
        for setting in found.settings
        if setting.name == contestant.method and used in (None, setting.exchange)
    )


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, methods = dist.get_rank(), options["methods"]
    contestants = [Contestant(method, options["batch"]) for method in methods]
    for contestant in contestants:
        contestant.steps(options["warmup"])
    for _ in range(options["rounds"]):
        # Every round predicts anew: the machine's moods must hit prediction and measurement alike.
        codecs = [method for method in methods if method not in ("dense", "fp16")]
        found = make_report(subject(options["batch"]), probed_wire(), codecs, "")
        for contestant in contestants:
            took = contestant.measure(options["steps"])["step"]
            row = {"method": contestant.method, "predicted": predicted(found, contestant), "measured": took}
            if rank == 0:
                print("ROW " + json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
