"""The models of a training step as data: the sizes, the stages and the batch of each."""

from dataclasses import dataclass, replace

LLAMA = "Llama 3 8B"
PIXELS = 3 * 16 * 16  # of a patch of an image


@dataclass(frozen=True)
class Shape:
    """The sizes and the stages of a model. The defaults are those of Llama 3 8B.

    ``norm`` is "rms", or "layer" with a bias. ``norm_after`` puts a block's norms behind attention
    and the feed-forward network: "part" is x + norm(part(x)), and "sum" norm(x + part(x)).
    ``qk_norm`` is the norm of q and k: "" for none, "head" over each head, "whole" over the whole
    projection. ``gated`` is output(silu(gate(x)) · up(x)), and else output(gelu(up(x))). ``biased``
    gives every projection of a block a bias, and the logits if they have a weight of their own.
    ``learned`` is the number of learned positions, which the embedding adds; 0 is rotation of q and
    k. ``causal`` is attention to earlier tokens alone. ``images`` makes it a ViT: patches and a
    class token, and ``vocab`` classes. ``tied`` is one weight for embedding and logits.

    ``adaptive`` is "dit" or "flux": a diffusion transformer, with ``channels`` values of a token of
    an image, ``vocab`` of what is predicted of it, and ``conditioning`` features of a sample.

    A step takes ``batch`` samples of ``length`` tokens: 4096 to 16384 tokens.
    """

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    vocab: int = 128256
    norm: str = "rms"
    eps: float = 1e-5
    norm_after: str = ""
    qk_norm: str = ""
    gated: bool = True
    biased: bool = False
    learned: int = 0
    causal: bool = True
    images: bool = False
    tied: bool = False
    theta: float = 500_000.0
    adaptive: str = ""
    channels: int = 0
    conditioning: int = 0
    batch: int = 2
    length: int = 4096

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    @property
    def narrow(self) -> int:
        """The columns of k and of v."""
        return self.kv_heads * self.head


# The sizes are those of the config.json of each model on Hugging Face, and the tests compare the
# number of parameters: meta-llama/Meta-Llama-3-8B, meta-llama/Llama-3.2-1B, Qwen/Qwen3-8B,
# allenai/OLMo-2-1124-7B, google/vit-large-patch16-384 (576 patches and the class token),
# openai-community/gpt2, google-bert/bert-base-uncased. Llama 3.2's scaling of the frequencies is
# left out: it changes the values of a table, and no time. So are BERT's types of tokens, the norm
# of its embedding, and the projection before its logits. facebook/DiT-XL-2-256 is without the
# embeddings of classes and positions, and black-forest-labs/FLUX.1-dev has one projection of its
# conditioning instead of three; all of its layers take more than 80 GiB.
_LAYER = {"norm": "layer", "gated": False, "biased": True}
_BASE = {"layers": 12, "hidden": 768, "heads": 12, "kv_heads": 12, "ffn": 3072, "tied": True}
_LARGE = {"layers": 24, "hidden": 1024, "heads": 16, "kv_heads": 16, "ffn": 4096, "vocab": 1000}
_DIT = {"layers": 28, "hidden": 1152, "heads": 16, "kv_heads": 16, "ffn": 4608, "vocab": 32}
_FLUX = {"layers": 19, "hidden": 3072, "heads": 24, "kv_heads": 24, "ffn": 12288, "vocab": 64}
_DIT |= {"adaptive": "dit", "channels": 16, "conditioning": 256}
_FLUX |= {"adaptive": "flux", "channels": 64, "conditioning": 1024, "qk_norm": "head", "theta": 1e4}
_IMAGES = {"learned": 577, "causal": False, "images": True, "eps": 1e-12}
_MASKED = {"learned": 512, "causal": False, "norm_after": "sum", "eps": 1e-12}
_NOISE = {"eps": 1e-6, "causal": False}
_QWEN = {"ffn": 12288, "vocab": 151936, "eps": 1e-6, "qk_norm": "head", "theta": 1e6}
_OLMO = {"ffn": 11008, "vocab": 100352, "eps": 1e-6, "qk_norm": "whole", "norm_after": "part"}
MODELS = {
    LLAMA: Shape(),
    "Llama 3.2 1B": Shape(layers=16, hidden=2048, ffn=8192, tied=True),
    "Qwen3 8B": Shape(layers=36, **_QWEN),
    "OLMo 2 7B": Shape(kv_heads=32, **_OLMO),
    "ViT-L": Shape(**_LARGE, **_LAYER, **_IMAGES, batch=14, length=577),
    "GPT-2": Shape(**_BASE, **_LAYER, vocab=50257, learned=1024, batch=8, length=1024),
    "BERT-base": Shape(**_BASE, **_LAYER, **_MASKED, vocab=30522, batch=32, length=128),
    "DiT-XL/2": Shape(**_DIT, **_LAYER, **_NOISE, batch=64, length=256),
    "Flux": Shape(**_FLUX, **_LAYER, **_NOISE, batch=1, length=4608),
}


def tiny(shape: Shape) -> Shape:
    """The same stages with sizes that a CPU computes in milliseconds."""
    kv_heads = 4 if shape.kv_heads == shape.heads else 2
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": kv_heads, "ffn": 48, "vocab": 40}
    return replace(shape, **sizes, learned=16 if shape.learned else 0, batch=2, length=8)
