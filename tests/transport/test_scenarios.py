"""The same scenarios over every transport."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.transport.scenarios import SCENARIOS
from thinwire.transport import connect, listen


@pytest.mark.parametrize("name", SCENARIOS)
def test_tcp(name: str) -> None:
    scenario = SCENARIOS[name]
    listener = listen("tcp://127.0.0.1:0")
    with ThreadPoolExecutor(scenario.workers) as pool:
        sides = [
            pool.submit(scenario.worker, lambda: connect(listener.address), number)
            for number in range(scenario.workers)
        ]
        try:
            scenario.server(listener, scenario.workers)
        finally:
            for side in sides:
                side.result(60)
            listener.close()
