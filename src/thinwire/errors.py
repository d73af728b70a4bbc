"""What can go wrong, by name: every error that thinwire raises on purpose.

Messages are one sentence: what is wrong, where, and what to do.
"""


class ThinwireError(Exception):
    """Base of all errors of thinwire."""


class FrameError(ThinwireError, ValueError):
    """Bytes that are not a valid frame: truncated, corrupt, foreign or hostile."""


class LabError(ThinwireError):
    """The emulated network cannot be built or used here."""


class LinkError(ThinwireError, RuntimeError):
    """A link cannot be made, or broke: ranks disagree, a peer is gone, replicas differ."""


class TransportError(ThinwireError, RuntimeError):
    """A transport cannot be opened or used: the address, the keys, or the other side."""


class RecipeError(ThinwireError):
    """A recipe is unknown, or its data is missing, truncated or corrupt."""


class LogError(ThinwireError):
    """An event log cannot be read or written."""


class DamagedFileError(ThinwireError, ValueError):
    """A file does not match its checksum, or has none."""


class MessageError(ThinwireError, ValueError):
    """A message between server and worker that is malformed, or not allowed in the present state."""


class ServerError(ThinwireError, RuntimeError):
    """A worker cannot train with its server: it was refused, the server is gone, or its messages make no sense."""


class ServerCheckpointError(ThinwireError):
    """A checkpoint of the parameter server cannot be used."""
