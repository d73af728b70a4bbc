"""System calls for namespaces, mounts and network devices that Python 3.10 lacks, and the exchange of netlink messages.

Uses the standard library only: `holder.py` and `enter.py` import this file by its path, without thinwire.
"""

import ctypes
import fcntl
import os
import socket
import struct

# The flags of namespaces, by their names in /proc. They are joined in this order: the user namespace comes first,
# because joining it gives the rights to join the others.
NAMESPACES = {"user": 1 << 28, "net": 1 << 30, "ipc": 1 << 27, "uts": 1 << 26, "pid": 1 << 29, "mnt": 1 << 17}

MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_SIOCETHTOOL = 0x8946
# Requests to /dev/net/tun: choose the number of the next device, create it. Its packets are Ethernet frames, each after
# a header of virtio, without the older header of four bytes.
_TUNSETIFINDEX, _TUNSETIFF = 0x400454DA, 0x400454CA
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x2, 0x1000, 0x4000
# Commands that set TCP segmentation, generic segmentation and generic receive offload.
_ETHTOOL_OFFLOADS = {"tso": 0x1F, "gso": 0x24, "gro": 0x2C}
# Other offloads are features with a name: commands that return their number and their names, and that set them.
_ETHTOOL_COUNT, _ETHTOOL_NAMES, _ETHTOOL_SET = 0x37, 0x1B, 0x3B
_FEATURES, _NAME_BYTES = 4, 32
# With this offload, datagrams that are sent in one call (UDP_SEGMENT) would be forwarded and lost as one packet.
_NAMED_OFFLOADS = ("tx-udp-segmentation",)

# Numbers of netlink: options of a socket, types of messages, and flags of an answer.
_SOL_NETLINK, _NETLINK_CAP_ACK, _NETLINK_EXT_ACK = 270, 10, 11
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_NLM_F_ACK_TLVS, _NLMSGERR_ATTR_MSG = 0x200, 1
_HEADER = struct.Struct("IHHII")  # length, type, flags, sequence, port
_ANSWER_BYTES = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def unshare(*kinds: str) -> None:
    """Move this process into new namespaces; a PID namespace applies to its future children."""
    _call("unshare", sum(NAMESPACES[kind] for kind in kinds))


def setns(descriptor: int, kind: str) -> None:
    """Move this process into an open namespace; a PID namespace applies to its future children."""
    _call("setns", descriptor, NAMESPACES[kind])


def mount(source: str, target: str, kind: str, flags: int = 0) -> None:
    """Mount a file system, or change the propagation of an existing mount."""
    _call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None)


def die_with_parent(number: int) -> None:
    """Let the kernel send this signal to this process when its parent ends."""
    _call("prctl", _PR_SET_PDEATHSIG, ctypes.c_ulong(number))


def allow_joining() -> None:
    """Let processes of the same user open this process's namespaces, which a new user namespace forbids."""
    _call("prctl", _PR_SET_DUMPABLE, ctypes.c_ulong(1))


def map_ids(uid: int, gid: int, outer_uid: int, outer_gid: int) -> None:
    """Map one user and one group of the user namespace that was just created to an outer user and group."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {outer_uid} 1"), ("gid_map", f"{gid} {outer_gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def offloads_off(device: str) -> None:
    """Turn the segmentation offloads of a device off, so that it handles packets of the size on a real wire."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in _ETHTOOL_OFFLOADS.values():
            _ethtool(control, device, struct.pack("II", command, 0))
        answer = _ethtool(control, device, struct.pack("IIQI", _ETHTOOL_COUNT, 0, 1 << _FEATURES, 0))
        (count,) = struct.unpack_from("I", answer, 16)
        asked = struct.pack("III", _ETHTOOL_NAMES, _FEATURES, count) + bytes(count * _NAME_BYTES)
        rows = _ethtool(control, device, asked)[12:]
        names = [rows[at : at + _NAME_BYTES].split(b"\0")[0].decode() for at in range(0, len(rows), _NAME_BYTES)]
        words = [0] * ((count + 31) // 32)
        for number in (names.index(name) for name in _NAMED_OFFLOADS if name in names):
            words[number // 32] |= 1 << number % 32
        blocks = b"".join(struct.pack("II", word, 0) for word in words)  # mask, value
        _ethtool(control, device, struct.pack("II", _ETHTOOL_SET, len(words)) + blocks)


def _ethtool(control: socket.socket, device: str, value: bytes) -> bytes:
    """Run an ethtool command on a device and return the buffer with the driver's answer."""
    buffer = ctypes.create_string_buffer(value, len(value))
    request = struct.pack("16sP", device.encode(), ctypes.addressof(buffer))
    fcntl.ioctl(control, _SIOCETHTOOL, request + bytes(40 - len(request)))
    return buffer.raw


def open_tap(device: str, index: int) -> int:
    """Create a TAP device and return its file descriptor; the device exists until it is closed."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(tap, _TUNSETIFINDEX, struct.pack("i", index))
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    except OSError:
        os.close(tap)
        raise
    return tap


def netlink(protocol: int) -> socket.socket:
    """Return a netlink socket that configures the present network namespace, even after this process leaves it."""
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
    for option in (_NETLINK_CAP_ACK, _NETLINK_EXT_ACK):  # explain errors, and do not repeat the request in the answer
        link.setsockopt(_SOL_NETLINK, option, 1)
    return link


def exchange(link: socket.socket, request: bytes) -> bytes:
    """Send a request and return the kernel's answer without its end; raise OSError if the kernel refuses it."""
    link.send(request)
    answer = b""
    while True:
        data, at = link.recv(_ANSWER_BYTES), 0
        while at < len(data):
            length, kind, flags, *_ = _HEADER.unpack_from(data, at)
            if kind == _NLMSG_ERROR:
                _raise_refusal(data[at : at + length], flags)
            if kind in (_NLMSG_ERROR, _NLMSG_DONE):
                return answer
            answer += data[at : at + length]
            at += (length + 3) & ~3


def _raise_refusal(message: bytes, flags: int) -> None:
    """Raise OSError for an error message, with the kernel's explanation if there is one; code 0 is no error."""
    (code,) = struct.unpack_from("i", message, _HEADER.size)
    if code == 0:
        return
    at = 2 * _HEADER.size + 4 if flags & _NLM_F_ACK_TLVS else len(message)
    while at < len(message):  # attributes with a length and a type
        length, kind = struct.unpack_from("HH", message, at)
        if kind == _NLMSGERR_ATTR_MSG:
            raise OSError(-code, message[at + 4 : at + length].rstrip(b"\0").decode(errors="replace").rstrip("."))
        at += (length + 3) & ~3
    raise OSError(-code, os.strerror(-code))
