"""The figures of a lab's network: addresses, device numbers, kernel settings, and the sizes of buckets and queues.

A token bucket in each direction limits the rate. One random number per packet decides about loss.
"""

# Bytes of a full Ethernet frame as the kernel counts them, without the checksum: a packet of 1500 and a header of 14.
FRAME = 1514
# A queue of 50 ms absorbs bursts of many senders to one receiver; a slow link still needs room for some packets.
_QUEUE_SECONDS = 0.05
_QUEUE_FRAMES = 100
# TCP packets that enter the host's shaper as one bundle and are split before they leave the host. On two shared
# cores, a bundle of 8 carried 935 Mbit/s, single packets 265.
BUNDLE = 8
# Smaller buckets lose tokens whenever a timer is late; larger ones let short messages pass unshaped. A bundle must fit
# into every bucket: if the link becomes slower, a waiting bundle that is larger would block the queue forever.
_BURST_SECONDS = 0.001
_BURST_FRAMES = BUNDLE + 1
# Names and numbers of devices. The numbers are chosen, not looked up: the kernel's own begin at 1 in each namespace.
INTERFACE = "eth0"
INTERFACE_INDEX = SWITCH_INDEX = 1000
_FIRST_PORT_INDEX = SWITCH_INDEX + 1
# The port of the switch through which the delay line sends.
DELAY_PORT, DELAY_PORT_INDEX = "delayed", SWITCH_INDEX - 1
# Kernel settings of a namespace by path. They turn off IPv6, TCP's saved metrics of earlier connections, and the pass
# of bridged packets through the IP firewall, which costs time even without rules. They let every command use ping.
SETTINGS = {
    **{f"/proc/sys/net/bridge/bridge-nf-call-{tables}": "0" for tables in ("iptables", "ip6tables", "arptables")},
    **{f"/proc/sys/net/ipv6/conf/{devices}/disable_ipv6": "1" for devices in ("all", "default")},
    "/proc/sys/net/ipv4/tcp_no_metrics_save": "1",
    "/proc/sys/net/ipv4/ping_group_range": "0 0",
}


def bucket(rate: int) -> tuple[int, int]:
    """Return the bytes of a token bucket and of its queue for a rate in bits per second."""
    burst = max(_BURST_FRAMES * FRAME, round(rate / 8 * _BURST_SECONDS))
    queue = max(_QUEUE_FRAMES * FRAME, round(rate / 8 * _QUEUE_SECONDS))
    return burst, queue


def delayed_packets(rate: int | None, delay: float) -> int:
    """Return the number of packets that a delay in seconds must be able to hold, or it would drop some."""
    return 1000 + round((rate or 10**10) / 8 / FRAME * delay)


def address(host: int) -> str:
    """Return a host's IPv4 address, which exists only inside the lab."""
    return f"10.77.0.{host + 1}"


def hardware(host: int) -> str:
    """Return a host's Ethernet address (locally administered)."""
    return f"02:77:00:00:00:{host + 1:02x}"


def port(host: int) -> str:
    """Return the name of the switch's port at the end of a host's link."""
    return f"h{host}"


def port_index(host: int) -> int:
    """Return the device number of the switch's port at the end of a host's link."""
    return _FIRST_PORT_INDEX + host
