"""Everything that knows vLLM 0.32."""
