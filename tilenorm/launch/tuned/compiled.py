"""Which norms of a compiled model are slower as ops than as parts of Inductor's kernels."""

# The most elements of a row that stay. Queries and keys have rows of 64 to 256 elements. Inductor
# fuses their norms with the rotary embedding that follows. It cannot fuse an op, and then reads the
# normalised rows once more.
SMALL = 256
# The least rows · N² of a norm that becomes an op on a GPU without CUDA graphs. A layer of a
# transformer multiplies matrices in about 12 · rows · N² multiply-adds. Where those take less of
# the GPU's time than the layer takes of the host's, the step waits for the host. On an H200 (driver
# 580.159, 2026-11-25) a step of 0.85e10 rows · N² (ViT-L, 14 x 577 tokens) lost 12.6% of its
# tokens/s, because a call of an op took the host about 50 µs more than a kernel of Inductor's. A
# step of 1.7e10 (Llama 3.2 1B, 4096 tokens) gained 1.2%. With bound functions ViT-L's step still
# lost 4.7% on an H100 (driver 580.159, 2026-11-25).
LEAST_WORK = 12_000_000_000
