"""The udp transport: message bodies in datagrams, next to a TCP connection for everything that must arrive."""
