"""The conformance kit: the laws that our compressors are held to, for those of others; see ``docs/conformance.md``.

The plugin is asked for by name: an entry point would import torch in every pytest run of the environment.
"""
