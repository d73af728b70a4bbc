"""What the kernel counted: bytes and packets of each host's link.

Read at the switch's end of each cable, behind the host's own shaper, with the 14-byte Ethernet headers.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Bytes and packets that a host sent and received."""

    sent_bytes: int = 0
    sent_packets: int = 0
    received_bytes: int = 0
    received_packets: int = 0

    def __sub__(self, earlier: "Traffic") -> "Traffic":
        return Traffic(
            self.sent_bytes - earlier.sent_bytes,
            self.sent_packets - earlier.sent_packets,
            self.received_bytes - earlier.received_bytes,
            self.received_packets - earlier.received_packets,
        )


def parse_counters(text: str, hosts: int) -> list[Traffic]:
    """Read the switch's /proc/net/dev; what the switch's port h3 received is what host 3 sent."""
    ports = {}
    for line in text.splitlines()[2:]:
        name, _, figures = line.partition(":")
        ports[name.strip()] = [int(figure) for figure in figures.split()]
    counted = [ports[f"h{host}"] for host in range(hosts)]
    return [Traffic(port[0], port[1], port[8], port[9]) for port in counted]
