"""The lab: emulated hosts with shaped links on one Linux machine.

Any command can run on the hosts. Each host has its own address and link and uses the kernel's TCP/IP stack.
"""

from thinwire.tools.lab.lab import Lab
from thinwire.tools.lab.launching import HostResult, HostTraffic, RunResult
from thinwire.tools.lab.units import Rates

__all__ = ["HostResult", "HostTraffic", "Lab", "Rates", "RunResult"]
