"""Any server with OpenAI's /v1/completions that takes token ids and returns the sampled ones with their log-probs."""

from retrain.inference_engine.base import OPENAI
from retrain.inference_engine.vllm import VLLMDialect, VLLMEngine


class OpenAIDialect(VLLMDialect):
    title = "The OpenAI-compatible server"


class OpenAIEngine(VLLMEngine):
    capabilities = OPENAI
    dialect_class = OpenAIDialect
