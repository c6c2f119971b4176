"""Serving: converted models and the families trained from scratch on vLLM (`hf_memmix.serving.vllm`), and their cost.

`vllm serve FOLDER` and `memmix serve FOLDER` both work once vLLM is installed; see README.md here.
"""
