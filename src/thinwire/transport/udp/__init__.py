"""The udp transport: gradients travel in UDP packets, next to a TCP connection for everything that must arrive."""
