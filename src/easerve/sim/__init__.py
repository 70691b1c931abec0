"""The server's own core in virtual time, over modelled engines. No asyncio, no clock."""
