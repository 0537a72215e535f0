from tensorrt_llm import LLM as LLM
