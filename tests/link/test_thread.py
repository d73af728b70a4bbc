"""The link's thread computes on as many cores as the script allows."""

import os
import subprocess
import sys

# Matrix products of a job, and the share of the processor time meanwhile that other threads took.
PROGRAM = """
import time
import torch
from thinwire.link.thread import Job, LinkThread

class Owner:
    def run(self, jobs):
        matrix = torch.randn(512, 512)
        own, total = time.thread_time(), time.process_time()
        for _ in range(100):
            matrix @ matrix
        own, total = time.thread_time() - own, time.process_time() - total
        self.others = total - own
        self.share = self.others / total
        return
        yield

    def end_step(self):
        pass

    def describe(self, error):
        return error

    def look(self):
        return None

torch.set_num_threads(1)
owner = Owner()
thread = LinkThread(owner.run, owner.end_step, owner.describe, owner.look)
tensor = torch.zeros(1)
thread.submit(Job(tensor, {"a": tensor}, first=True, last=True)).wait()
print(owner.share)
"""


def test_products_take_the_threads_that_the_script_set() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert float(done.stdout) < 0.2
