"""Embeddings pushed from Encode to Prefill: vLLM's encoder-cache connector of EAServe.

An encoder sends one bundle per engine step and destination: a sealed memory file that is handed
over a Unix socket. A prefill engine keeps what came and holds a request back until its items are
there.
"""
