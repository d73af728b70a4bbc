"""The lab: emulated hosts with shaped links on one Linux machine.

Any command runs on N hosts, each with its own address and link, over the kernel's real TCP/IP stack.
"""

from thinwire.tools.lab.counters import Traffic
from thinwire.tools.lab.lab import Lab
from thinwire.tools.lab.launching import HostResult, RunResult
from thinwire.tools.lab.units import Rates

__all__ = ["HostResult", "Lab", "Rates", "RunResult", "Traffic"]
