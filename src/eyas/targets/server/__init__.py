"""The target behind vLLM or SGLang servers: an asynchronous client that trusts nothing it is sent."""
