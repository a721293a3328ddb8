"""Load for a server of OpenAI's addresses: open loop, so that a slow server is not asked less."""
