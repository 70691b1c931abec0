"""The engines that run the stages: one protocol, a fake, and vLLM."""
