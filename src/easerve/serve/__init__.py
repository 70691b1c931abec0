"""The server: the asyncio driver of the core and the OpenAI API in front of it."""
