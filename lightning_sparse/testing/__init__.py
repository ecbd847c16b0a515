"""The conformance kit: the laws that our compressors are held to, for those of others.

``python -m pytest -p lightning_sparse.testing.plugin --compressor mypackage:MyCompressor`` runs them, see
``docs/conformance.md``.
The plugin is asked for by name: an entry point would import this package, and torch with it, in every pytest run of an
environment that has it.
"""
