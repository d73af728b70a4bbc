"""What a server shows of its workers: the same figures as a table and for Prometheus."""

import io
import re
import socket
import threading
from urllib.request import urlopen

import torch
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from tests.server.serving import Ones, serving
from thinwire.server.server import Server
from thinwire.server.worker import Worker
from thinwire.tools.progress import lines_every
from thinwire.tools.race.serve_command import serve_metrics, status, table, waiting_for


def test_figures_of_a_running_server() -> None:
    model = Ones()
    server = Server(model, torch.optim.SGD(model.parameters(), lr=1.0), codec=None)
    values = {"test": 0.5}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving(server) as address, Worker(address, net := Ones(), "dense", name="ada") as worker:
        for _ in range(3):
            net().backward()
            worker.step()
        worker.wait()
        with serve_metrics(port, lambda: status(server, values)):
            text = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
        console = Console(width=160, file=io.StringIO(), record=True)
        console.print(table(server, values, "accuracy"))
    found = {s.name: s for family in text_string_to_metric_families(text) for s in family.samples}
    assert (found["thinwire_step"].value, found["thinwire_joined"].value) == (3.0, 1.0)
    assert found["thinwire_metric_test"].value == 0.5
    assert found["thinwire_worker_clock"].labels == {"slot": "0", "name": "ada"}
    assert found["thinwire_worker_bytes_received"].value > 0
    shown = console.export_text()
    assert "bsp, step 3, test accuracy 0.5000" in shown and "ada" in shown


def test_a_server_says_what_it_waits_for() -> None:
    model = Ones()
    server = Server(model, torch.optim.SGD(model.parameters(), lr=1.0), codec=None, expect=2)
    with serving(server):
        assert re.fullmatch(r"waiting for 2 of 2 workers to join, \d+ s so far", waiting_for(server))
        assert status(server, {})["waiting_for"].startswith("waiting for 2 of 2 workers")


def test_lines_are_printed_until_the_end() -> None:
    console, printed = Console(file=io.StringIO(), record=True), threading.Event()

    def sentence() -> str:
        printed.set()
        return "still waiting"

    with lines_every(0.01, sentence, console):
        assert printed.wait(30)
    assert "still waiting" in console.export_text()
    assert not any(thread.name == "thinwire-progress" for thread in threading.enumerate())
