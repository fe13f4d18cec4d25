"""Which norms of a compiled model are slower as ops than as parts of Inductor's kernels."""

# The most elements of a row that stay. Queries and keys have rows of 64 to 256 elements. Inductor
# fuses their norms with the rotary embedding that follows. It cannot fuse an op, and then reads the
# normalised rows once more.
SMALL = 256
