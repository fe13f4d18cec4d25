"""Models of Hugging Face whose norms round in different ways: a configuration, and the class."""

from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig, Olmo2Config, Qwen3Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

MODELS = {
    "llama": (LlamaConfig, LlamaRMSNorm),
    "qwen3": (Qwen3Config, Qwen3RMSNorm),
    "olmo2": (Olmo2Config, Olmo2RMSNorm),
    "gemma2": (Gemma2Config, Gemma2RMSNorm),
    "gemma3": (Gemma3TextConfig, Gemma3RMSNorm),
}
