"""The input of ip, tc, bridge and nft that builds a lab's network, as text; `Lab` runs the commands.

A token bucket in each direction limits the rate. One random number per packet decides about loss.
"""

from collections.abc import Mapping, Sequence

# Bytes of a full Ethernet frame as the kernel counts them, without the checksum: a packet of 1500 and a header of 14.
FRAME = 1514
# A queue of 50 ms absorbs bursts of many senders to one receiver; a slow link still needs room for some packets.
_QUEUE_SECONDS = 0.05
_QUEUE_FRAMES = 100
# TCP packets that enter the host's shaper as one bundle and are split before they leave the host. On two shared
# cores, a bundle of 8 carried 935 Mbit/s, single packets 265.
_BUNDLE = 8
# Smaller buckets lose tokens whenever a timer is late; larger ones let short messages pass unshaped. A bundle must fit
# into every bucket: if the link becomes slower, a waiting bundle that is larger would block the queue forever.
_BURST_SECONDS = 0.001
_BURST_FRAMES = _BUNDLE + 1
# Loss is drawn in parts per million.
_DICE = 1_000_000
# Kernel settings of a namespace by path. They turn off IPv6, TCP's saved metrics of earlier connections, and the pass
# of bridged packets through the IP firewall, which costs time even without rules.
SETTINGS = {
    **{f"/proc/sys/net/bridge/bridge-nf-call-{tables}": "0" for tables in ("iptables", "ip6tables", "arptables")},
    **{f"/proc/sys/net/ipv6/conf/{devices}/disable_ipv6": "1" for devices in ("all", "default")},
    "/proc/sys/net/ipv4/tcp_no_metrics_save": "1",
}


def bucket(rate: int) -> str:
    """Return the arguments of tc's token bucket filter (tbf) for a rate in bits per second."""
    burst = max(_BURST_FRAMES * FRAME, round(rate / 8 * _BURST_SECONDS))
    queue = max(_QUEUE_FRAMES * FRAME, round(rate / 8 * _QUEUE_SECONDS))
    return f"tbf rate {rate}bit burst {burst} limit {queue + burst}"


def queue_lines(device: str, rate: int | None, *, delay: float = 0.0, loss: float = 0.0) -> list[str]:
    """Return the tc batch lines that shape what leaves a device; netem does the delay and the loss, if any."""
    if not delay and not loss:
        return [f"qdisc replace dev {device} root {f'handle 1: {bucket(rate)}' if rate else 'handle 2: noqueue'}"]
    # The queue must hold all delayed packets, or netem drops them.
    how = f"netem limit {1000 + round((rate or 10**10) / 8 / FRAME * delay)}"
    how += f" delay {round(delay * 1e6)}us" if delay else ""
    how += f" loss {loss * 100:g}%" if loss else ""
    lines = [f"qdisc replace dev {device} root handle 3: {how}"]
    inner = f"handle 4: {bucket(rate)}" if rate else "handle 5: pfifo limit 1000"
    return [*lines, f"qdisc replace dev {device} parent 3:1 {inner}"]


def loss_rules(losses: Mapping[int, float]) -> str:
    """Return the nftables rules of the switch, which drop packets with the larger loss of their two links.

    Both links compare the same random number. So if all hosts have the same loss, it is the loss between any two.
    """
    lossy = {host: round(loss * _DICE) for host, loss in losses.items() if loss > 0}
    start = "table bridge thinwire\ndelete table bridge thinwire\n"
    if not lossy:
        return start
    chains = "".join(f" chain host{host} {{ meta mark < {parts} drop; }}\n" for host, parts in sorted(lossy.items()))
    ports = ", ".join(f'"h{host}" : jump host{host}' for host in sorted(lossy))
    return (
        f"{start}table bridge thinwire {{\n{chains}"
        " chain forward {\n"
        "  type filter hook forward priority 0; policy accept;\n"
        f"  meta mark set numgen random mod {_DICE}\n"
        f"  iifname vmap {{ {ports} }}\n"
        f"  oifname vmap {{ {ports} }}\n"
        " }\n}\n"
    )


def switch_lines(peers: Sequence[str]) -> list[str]:
    """Return the ip batch lines that build the switch and one cable to each host's namespace."""
    lines = ["link add switch type bridge stp_state 0 forward_delay 0 mcast_snooping 0", "link set switch up"]
    for host, path in enumerate(peers):
        # TCP builds packets of many segments even where a device has no offloads, unless their size is limited.
        peer = f"peer name eth0 gso_max_segs {_BUNDLE} address {hardware(host)} netns {path}"
        lines += [f"link add h{host} gso_max_segs 1 type veth {peer}", f"link set h{host} master switch up"]
    return lines


def forwarding_lines(hosts: int) -> list[str]:
    """Return the bridge batch lines that give the switch every host's port, so that it floods no packets."""
    quiet = [f"link set dev h{host} learning off flood off mcast_flood off" for host in range(hosts)]
    return quiet + [f"fdb add {hardware(host)} dev h{host} master static" for host in range(hosts)]


def host_lines(host: int, hosts: int) -> list[str]:
    """Return the ip batch lines of a host: its address, and those of its neighbours, so that no ARP is needed."""
    lines = ["link set lo up", f"address add {address(host)}/24 dev eth0", "link set eth0 up"]
    return lines + [
        f"neigh replace {address(other)} lladdr {hardware(other)} dev eth0 nud permanent"
        for other in range(hosts)
        if other != host
    ]


def address(host: int) -> str:
    """Return a host's IPv4 address, which exists only inside the lab."""
    return f"10.77.0.{host + 1}"


def hardware(host: int) -> str:
    """Return a host's Ethernet address (locally administered)."""
    return f"02:77:00:00:00:{host + 1:02x}"
