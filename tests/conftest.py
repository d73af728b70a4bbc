"""What all tests share."""

import os
from collections.abc import Iterator

# One thread for every process, before torch counts the cores: on a busy machine the threads of a small operation
# wait for one another longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from tests.cluster import Cluster

# No test asserts times: an example may take long when others compute.
settings.register_profile("thinwire", deadline=None)
settings.load_profile("thinwire")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()
