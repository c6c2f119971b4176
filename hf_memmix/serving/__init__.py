"""Serving: converted models and the from-scratch families on vLLM (`hf_memmix.serving.vllm`), and what they cost there.

`vllm serve FOLDER` and `memmix serve FOLDER` both work once `hf-memmix[vllm]` is installed; see README.md here.
"""
