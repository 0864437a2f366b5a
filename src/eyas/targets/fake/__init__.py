"""A server that speaks vLLM's and SGLang's side of the protocol over a small model, with faults on order."""
