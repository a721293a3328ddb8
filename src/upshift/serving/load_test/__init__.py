"""Send load to a server of OpenAI's addresses. The load is an open loop, so a slow server does not get fewer requests."""
