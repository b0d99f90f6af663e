"""Plug-ins: token graphs inside other people's models.

`graphattn.integrations.transformers` for Hugging Face's models, `graphattn.integrations.torch` for
PyTorch's own attention modules. Each loads what it plugs into, and nothing loads them by itself.
"""
