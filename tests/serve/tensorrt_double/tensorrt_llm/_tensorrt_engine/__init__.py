from tensorrt_llm import LLM as LLM  # type: ignore[import-not-found]
