"""What all tests share."""

import os
import signal
from collections.abc import Iterator

# One thread for every process, before torch counts the cores: on a busy machine the threads of a small operation
# wait for one another longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from tests.cluster import Cluster

pytest_plugins = ["tests.no_skips"]

# No test asserts times: an example may take long when others compute.
settings.register_profile("thinwire", deadline=None)
settings.load_profile("thinwire")


# A shell's background job ignores Ctrl-C, and so would all that the tests start and want to stop by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()
