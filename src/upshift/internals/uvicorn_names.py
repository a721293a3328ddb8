"""List the undocumented names of uvicorn that Upshift uses."""

from __future__ import annotations

from upshift.internals.lookup import Internal

HEADER_LIMITS = "Ending connections whose headers do not come"
HTTP_PROTOCOL = Internal("uvicorn", "uvicorn.protocols.http.auto:AutoHTTPProtocol", HEADER_LIMITS)
CYCLE = Internal("uvicorn", "HTTPProtocol.cycle", HEADER_LIMITS)
SCOPE = Internal("uvicorn", "HTTPProtocol.scope", HEADER_LIMITS)
CYCLE_SCOPE = Internal("uvicorn", "RequestResponseCycle.scope", HEADER_LIMITS)
RESPONSE_COMPLETE = Internal("uvicorn", "RequestResponseCycle.response_complete", HEADER_LIMITS)
