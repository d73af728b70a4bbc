"""The codec: a tensor becomes a frame of bytes and back."""
