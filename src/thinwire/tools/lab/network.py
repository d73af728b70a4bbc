"""The network of a lab: a switch, a link from it to each host, and what shapes the links.

Each link ends in the interface `eth0` of its host and in a port of the switch. The shaper of `eth0` limits what the
host sends, that of the port what it receives.
"""

from collections.abc import Mapping

from thinwire.tools.lab import loss, netlink, shaping
from thinwire.tools.lab.namespaces import SWITCH, Namespaces
from thinwire.tools.lab.units import Rates


class LabNetwork:
    """Configures the network inside a lab's namespaces by requests to the kernel, which the holder sends."""

    def __init__(self, spaces: Namespaces, hosts: int) -> None:
        self._spaces = spaces
        self._hosts = hosts

    def build(self) -> None:
        """Build the switch and connect every host to it; the links have no shapers yet."""
        everyone = range(self._hosts)
        self.connect()
        self.offloads_off()
        self._spaces.ask("configure", where=SWITCH, devices=[], settings=shaping.SETTINGS)
        neighbours = [netlink.add_neighbour(host) for host in everyone]
        for host in everyone:
            self._spaces.ask("configure", where=host, devices=[shaping.INTERFACE], settings=shaping.SETTINGS)
            others = neighbours[:host] + neighbours[host + 1 :]
            self._spaces.send(host, [*netlink.add_address(host), *others])

    def connect(self) -> None:
        """Create the switch, and between it and each host a cable: the interface of the host and a port."""
        requests = [netlink.add_switch()]
        for host, namespace in enumerate(self._spaces.handles):
            requests += [netlink.add_cable(host, namespace), *netlink.add_port(host)]
        self._spaces.send(SWITCH, requests)

    def offloads_off(self) -> None:
        """Let the ports handle packets of the size on a real wire."""
        ports = [shaping.port(host) for host in range(self._hosts)]
        self._spaces.ask("configure", where=SWITCH, devices=ports, settings={})

    def shape(self, host: int, rates: Rates, *, delay: float = 0.0, lost: float = 0.0) -> None:
        """Set the rates of a host's link; netem delays and drops what the host sends, if that is asked for."""
        self._spaces.send(SWITCH, netlink.queues(shaping.port_index(host), rates.down))
        self._spaces.send(host, netlink.queues(shaping.INTERFACE_INDEX, rates.up, delay=delay, loss=lost))

    def lose(self, losses: Mapping[int, float]) -> None:
        """Let the switch drop packets with the larger loss of their two links, and none where no loss is given."""
        self._spaces.send(SWITCH, [loss.loss_rules(losses)])

    def insert_delay_line(self) -> None:
        """Attach the delay line's port; from now on, only what the delay line sends reaches the hosts."""
        ports = [netlink.isolate(host) for host in range(self._hosts)]
        self._spaces.send(SWITCH, [*netlink.attach(shaping.DELAY_PORT_INDEX), *ports])

    def turn(self, host: int, *, on: bool) -> None:
        """Disconnect a host from the switch, or connect it again."""
        self._spaces.send(SWITCH, [netlink.turn(shaping.port_index(host), on=on)])
