"""The few system calls that Python 3.10 lacks.

Standard library only: the processes inside the namespaces import this file on its own, without thinwire.
"""

import ctypes
import fcntl
import os
import socket
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_BIND = 0x1000
MS_REC = 0x4000
MS_SLAVE = 0x80000

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4

_SIOCETHTOOL = 0x8946
# TCP segmentation, generic segmentation, generic receive, large receive as one flag word each.
_ETHTOOL_OFFLOADS = {"tso": 0x1F, "gso": 0x24, "gro": 0x2C}

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process (for CLONE_NEWPID: its future children) into new namespaces."""
    _call("unshare", flags)


def setns(descriptor: int, kind: int) -> None:
    """Move this process (for CLONE_NEWPID: its future children) into the namespace of a descriptor."""
    _call("setns", descriptor, kind)


def mount(source: str, target: str, kind: str, flags: int = 0) -> None:
    """Mount a file system, or change how an existing mount spreads."""
    _call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None)


def die_with_parent(number: int) -> None:
    """Ask the kernel for this signal when the parent ends, however it ends."""
    _call("prctl", _PR_SET_PDEATHSIG, ctypes.c_ulong(number))


def allow_joining() -> None:
    """Let processes of the same user open this process's namespaces (a new user namespace forbids it)."""
    _call("prctl", _PR_SET_DUMPABLE, ctypes.c_ulong(1))


def map_ids(uid: int, gid: int, outer_uid: int, outer_gid: int) -> None:
    """Give the user namespace that was just unshared its only user and group."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {outer_uid} 1"),
        ("gid_map", f"{gid} {outer_gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def offloads_off(device: str) -> None:
    """Turn segmentation offloads of a device off, so that its packets are the packets of the wire."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in _ETHTOOL_OFFLOADS.values():
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP", device.encode(), ctypes.addressof(value))
            fcntl.ioctl(control, _SIOCETHTOOL, request + bytes(40 - len(request)))
